"""A conversation in a file: one JSON object, written atomically, readable by its user only."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from cortexmlx.core.arguments import checked_adapter, is_list
from cortexmlx.errors import ConversationFileError, InvalidRequest
from cortexmlx.protocols.openai.messages import find_messages as openai_messages
from cortexmlx.protocols.openai.messages import parse_json_or_lines
from cortexmlx.sessions.turn import Transcript
from cortexmlx.stats import ModelInfo
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.system.files import write_atomically
from cortexmlx.types.messages import TemplateVars, checked_vars, plain_message
from cortexmlx.types.request import Message
from cortexmlx.types.sampling_params import SamplingParams

VERSION = 1
"""The version of the format. Files with another are refused. A field that may be missing needs no new one."""

LARGEST = 64 << 20
"""Bytes that a file may have: more than the longest context in any language."""

FORMAT = "cortexmlx conversation"
_IMAGES = ("image", "image_url")
"""The types of a message's parts that are images."""
_NOT_SAVED = ("logits_processors", "structured", "tools", "tool_choice", "parallel_tool_calls")
"""Sampling parameters that are not saved as they are: functions, which no file can hold, tools, which may be functions,
and a form, of which a type cannot be kept.
"""


@dataclass(frozen=True)
class SavedModel:
    """The model that a saved conversation was held with: its name, its path, and its `ModelInfo.identity`."""

    name: str
    path: str
    identity: str

    @property
    def reopen_name(self) -> str:
        """The name that opens the model from any folder: its path if it is a file or a folder, otherwise its name."""
        return self.path if Path(self.path).name == Path(self.name).name else self.name

    def model_change_note(self, info: ModelInfo, path: Path) -> str:
        """Return a note that the conversation in the file `path` continues with another model."""
        if self.name == info.name:
            return f"{path} was saved with another {self.name} ({self.path}): its texts are computed anew"
        return f"{path} was saved with {self.name} and continues with {info.name}: its texts are computed again"


@dataclass(frozen=True)
class SavedConversation:
    """What a conversation's file holds."""

    model: SavedModel
    system: str | None
    messages: tuple[Message, ...]
    params: SamplingParams
    transcript: Transcript | None
    """None if the file does not vouch for it."""
    template_vars: TemplateVars = field(default_factory=dict)
    unsent: int = 0
    """How many of the oldest messages were no longer sent to the model."""
    adapter: str | None = None
    """The name of the adapter that answered last; None: the model as it is, or it is not known."""

    def write(self, path: Path) -> None:
        """Write the conversation to a file. If that fails, the old file stays. Raises ConversationFileError."""
        sampling_fields: dict[str, Any] = {
            f.name: getattr(self.params, f.name) for f in fields(self.params) if f.name not in _NOT_SAVED
        }
        if self.params.form is not None:
            sampling_fields["structured"] = self.params.form.as_mapping()
        sampling_fields["logit_bias"] = {str(token): bias for token, bias in self.params.logit_bias.items()}
        has_images = any(map(shows_images, self.messages))  # whose tokens mean nothing to another process
        transcript = Transcript() if has_images or self.transcript is None else self.transcript
        content = {
            "format": FORMAT,
            "version": VERSION,
            "model": vars(self.model),
            "system": self.system,
            "messages": [without_images(message) for message in self.messages],
            **({"unsent": self.unsent} if self.unsent else {}),
            **({} if self.adapter is None else {"adapter": self.adapter}),
            "sampling": sampling_fields,
            "transcript": {"text": transcript.text, "tokens": transcript.tokens, "cuts": transcript.boundaries},
        }
        if self.template_vars:
            content["template_vars"] = dict(self.template_vars)
        try:
            as_read = json.loads(json.dumps(content))  # all keys are texts
            content["digest"] = digest = _digest(as_read)
            self._parse(as_read, digest)
            text = json.dumps(content, ensure_ascii=False, indent=1, separators=(",", ": "))
        except (TypeError, ValueError, RecursionError, InvalidRequest) as error:
            raise ConversationFileError(f"the conversation cannot be written as JSON: {error}") from error
        write_private(path, text.encode("utf-8", "surrogatepass"))

    @classmethod
    def read(cls, path: Path) -> SavedConversation:
        """Read a file that `write` wrote. Raises ConversationFileError for every other file."""
        content = _read_content(path)
        digest = content.pop("digest", None)
        if digest is not None and digest != _digest(content):
            raise ConversationFileError(
                f"{path} is damaged, or was changed since it was saved: its digest is not that of its content. Without "
                "its `digest` line it is taken as it is, and its messages are tokenized anew."
            )
        try:
            return cls._parse(content, digest)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, InvalidRequest) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise _foreign_file_error(path, reason) from error

    @classmethod
    def _parse(cls, content: Mapping[str, Any], digest: str | None) -> SavedConversation:
        """Return the conversation in a file's content. Raises errors of many classes if there is none."""
        system, messages = content["system"], content["messages"]
        if not (system is None or isinstance(system, str)):
            raise TypeError(f"its system prompt is {system!r:.80}, but must be a text or null")
        if not _are_messages(messages):
            raise TypeError("its messages are none")
        model = SavedModel(**{name: _checked_text(content["model"][name]) for name in ("name", "path", "identity")})
        params, variables = _parse_params(content["sampling"]), checked_vars(content.get("template_vars", {}))
        unsent = content.get("unsent", 0)
        if type(unsent) is not int or not 0 <= unsent <= len(messages):
            raise ValueError("more of it is unsent than there is")
        adapter = checked_adapter(content.get("adapter"))
        transcript = None if digest is None else _parse_transcript(content["transcript"])
        return cls(model, system, tuple(messages), params, transcript, variables, unsent, adapter)


def parse_foreign_messages(path: Path, text: str) -> tuple[str | None, tuple[Message, ...]] | None:
    """Return the system prompt and the messages in a file of another program, in the format of the OpenAI API. None if
    the file is one of ours, or has no such messages. Raises ConversationFileError.
    """
    content = parse_json_or_lines(text)
    if isinstance(content, Mapping) and content.get("format") == FORMAT:
        return None
    try:
        messages = openai_messages(content)
    except InvalidRequest as error:
        raise ConversationFileError(f"{path}: {error}") from error
    if messages is None:
        return None
    first, *other_messages = messages
    return (str(first["content"]), tuple(other_messages)) if first["role"] == "system" else (None, tuple(messages))


def read_text(path: Path) -> str:
    """Return the text of a file that may hold a conversation. Raises ConversationFileError."""
    try:
        if not path.is_file():
            raise ConversationFileError(f"{path} is {'no file' if path.exists() else 'not there'}")
        size = path.stat().st_size
        if size > LARGEST:
            raise ConversationFileError(
                f"{path} has {size:,} bytes, and a saved conversation has {LARGEST:,} at most: it is something else"
            )
        text = path.read_bytes().decode("utf-8", "surrogatepass")
    except OSError as error:
        raise ConversationFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise _foreign_file_error(path, "it is no JSON, or torn") from error
    if not text:
        raise _foreign_file_error(path, "it is empty")
    return text


def _read_content(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that `write` wrote. Raises ConversationFileError for other files."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _foreign_file_error(path, "it is no JSON, or torn") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _foreign_file_error(path, f'no JSON object with "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise ConversationFileError(
            f"{path} is a conversation in version {content.get('version')!r} of the format, and this program reads "
            f"version {VERSION}: read it with the one that wrote it"
        )
    return content


def _foreign_file_error(path: Path, reason: str) -> ConversationFileError:
    """Return the error for a file that is no saved conversation."""
    return ConversationFileError(f"{path} is not a saved conversation: {reason}")


def _digest(content: Mapping[str, Any]) -> str:
    """Return a hash of a file's content, to tell whether the content was changed."""
    json_text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(json_text.encode(), digest_size=16).hexdigest()


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its user can read. If that fails, the old file stays. Raises ConversationFileError."""
    try:
        Path(os.path.realpath(path)).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with write_atomically(path, private=True) as file:
            file.write(data)
    except OSError as error:
        raise ConversationFileError(f"{path} cannot be written: {error.strerror or error}") from error


def _are_messages(messages: object) -> bool:
    """Return whether a JSON value is a list of messages with roles."""
    return isinstance(messages, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)


def _checked_text(value: object) -> str:
    """Return a field of the saved model if it is a text. Raises TypeError otherwise."""
    if not isinstance(value, str):
        raise TypeError("its model is not named")
    return value


def _parse_params(sampling_fields: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters in a file. Raises ValueError if one is wrong."""
    biases = {int(token): bias for token, bias in sampling_fields["logit_bias"].items()}
    form = sampling_fields.get("structured")
    try:
        structured_output = None if form is None else StructuredOutput.named(form)
        return SamplingParams(**{**sampling_fields, "logit_bias": biases, "structured": structured_output})
    except InvalidRequest as error:
        raise ValueError(f"its {error}") from error


def _parse_transcript(record: Mapping[str, Any]) -> Transcript:
    """Return a file's transcript, after a check of its form: the digest only shows that the file is unchanged."""
    text, tokens, cuts = record["text"], record["tokens"], tuple((int(c), int(t)) for c, t in record["cuts"])
    all_cuts = [(0, 0), *cuts, (len(text), len(tokens))]
    is_ascending = all(a <= b for pair in pairwise(all_cuts) for a, b in zip(*pair, strict=True))
    if not (is_ascending and cuts and cuts[0] == (0, 0) and all(type(token) is int and token >= 0 for token in tokens)):
        raise ValueError("its transcript is none")
    return Transcript(text, tuple(tokens), cuts)


def shows_images(message: Message) -> bool:
    """Return whether a message has an image among its parts."""
    content = message.get("content")
    if isinstance(content, str) or not is_list(content):
        return False
    return any(isinstance(each, Mapping) and each.get("type") in _IMAGES for each in content)


def without_images(message: Message) -> Message:
    """Return a message with a line in place of each image, since files of conversations keep no images."""
    return plain_message(message, image_line) if shows_images(message) else message


def with_image_bytes(message: Message) -> Message:
    """Return a message with the bytes of the image files that it names: a file may be gone before the next turn."""
    content: Any = message.get("content")
    if not shows_images(message) or not any(isinstance(part.get("image"), (str, os.PathLike)) for part in content):
        return message
    from cortexmlx.vision.images import read_file

    def read_image(part: Mapping[str, Any]) -> Mapping[str, Any]:
        image = part.get("image")
        return {**part, "image": read_file(image)[1]} if isinstance(image, (str, os.PathLike)) else part

    return {**message, "content": [read_image(part) for part in content]}


def image_line(part: Mapping[str, Any]) -> str:
    """Return the line that stands for an image, with its `name` if there is one."""
    name = part.get("name")
    return f"[An image was here{f': {name}' if isinstance(name, str) else ''}. It is not kept.]\n"


def copy_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return copies of messages, so that nobody can change them later. Raises InvalidRequest if one is no message."""
    if not is_list(messages):
        raise InvalidRequest(f"messages are a list of maps, not {messages!r:.80}")
    copies: list[Message] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f'a message is a map with "role" and "content", not {message!r:.80}')
        copies.append(dict(message))
    return tuple(copies)


# A conversation as Markdown, for people to read.


def conversation_markdown(model: str, messages: Sequence[Message]) -> str:
    """Return a conversation as Markdown: a heading for each message, and its text unchanged."""
    parts = [f"# A conversation with {model}", *map(message_markdown, messages)]
    return "\n\n".join(parts) + "\n"


def message_markdown(message: Message) -> str:
    """Return one message as Markdown: a heading, its text, and its tool calls."""
    text = str(plain_message(message, image_line).get("content") or "").strip()
    tool_calls: Any = message.get("tool_calls")
    functions = (
        [each.get("function") for each in tool_calls if isinstance(each, Mapping)] if is_list(tool_calls) else []
    )
    calls = [f"    {_call_code(function)}" for function in functions if isinstance(function, Mapping)]
    return "\n\n".join(part for part in (f"## {str(message['role']).capitalize()}", text, "\n".join(calls)) if part)


def _call_code(function: Mapping[str, Any]) -> str:
    """Return a tool call as a line of code: `weather({"city": "Paris"})`."""
    arguments = function.get("arguments", "")
    arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function.get('name')}({' '.join(arguments_text.splitlines())})"
