"""The conversation in a body of Anthropic's API, `system` and `messages`, as messages of the OpenAI API.

Neighbouring messages of one role are one turn. What a user says in a turn with results is a part of a result, in
`<user>` tags, since the loop of calls goes on: agents put reminders there. A user's message would end the loop, and
many chat templates leave out the thoughts of loops that have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import prefix_error_field
from cortexmlx.protocols.history import (
    Piece,
    add_image_paths,
    join_pieces,
    note_omitted_thoughts,
    orphan_result_message,
    pick_known_fields,
    pick_message_fields,
    read_arguments,
    read_image,
    read_part,
    read_pieces,
    require_name,
    split_content,
)
from cortexmlx.protocols.images import ImageParts
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.seal import Seal
from cortexmlx.types.request import Message

BILLING = "x-anthropic-billing-header:"
"""How a block of `system` begins that is for accounting. It differs in every conversation, so a prompt that begins with
it would share nothing with others in the prefix cache.
"""

_ENDS_WITH_ASSISTANT = (
    "the last message is an assistant's, but an answer cannot be continued: end with a user's message"
)


def read_conversation(fields: Mapping[str, Any], seal: Seal | None, images: ImageParts | None = None) -> list[Message]:
    """Convert `system` and `messages` of an Anthropic body into OpenAI-style messages. `seal` proves that thoughts are
    the model's own; None: they are not checked. `images` reads the images of users and tools, for a model that sees.
    Raises InvalidRequest with the path of an invalid or unserved block, or of a newest image that cannot be read.
    """
    with prefix_error_field("system"):
        system = [text for text in _content_texts(fields.get("system", [])) if not text.startswith(BILLING)]
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("`messages` must be a list of objects with `role` and `content`", field="messages")
    turns = _ConversationBuilder(seal, images)
    objects = ((n, each) for n, each in enumerate(messages) if isinstance(each, Mapping))
    last_user = max((n for n, each in objects if each.get("role") == "user"), default=-1)
    for index, message in enumerate(messages):
        with prefix_error_field(f"messages[{index}]"):
            role, content = _split_message(message)
            with prefix_error_field("content"):
                if role == "assistant":
                    turns.add_assistant(index, content)
                elif role == "user":
                    turns.add_user(index, content, is_newest=index == last_user)
                elif message.get("clear_at") == "next_user_message" and index < last_user:
                    continue
                elif turns.has_turns:
                    turns.add_system(index, _content_texts(content))
                else:
                    system += _content_texts(content)
    system_messages = [{"role": "system", "content": "\n".join(system)}] if any(system) else []
    turns.check_last_turn(len(messages) - 1)
    paths = ["system"] * len(system_messages) + turns.paths
    # The converted messages are read as OpenAI's are: repaired for the template, and their images read again.
    return read_messages(system_messages + turns.messages, paths, images)


@dataclass
class _Turn:
    """A message of the converted conversation (user, assistant, system or tool result) while blocks are added to it."""

    role: str
    index: int
    texts: list[Piece] = field(default_factory=list)
    """Its texts and images."""
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[Piece] = field(default_factory=list)
    """What the user says beside a result."""
    extra: dict[str, str] = field(default_factory=dict)

    def to_message(self) -> dict[str, Any]:
        """Return the turn as a message of the OpenAI API. An assistant's texts are joined without line breaks."""
        message: dict[str, Any] = {"role": self.role, **self.extra}
        remark_pieces = ["<user>", *self.remarks, "</user>"] if any(self.remarks) else []
        message["content"] = join_pieces([*self.texts, *remark_pieces], "" if self.role == "assistant" else "\n")
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class _ConversationBuilder:
    """Builds the turns of a conversation from Anthropic messages, one message after the other."""

    def __init__(self, seal: Seal | None, images: ImageParts | None) -> None:
        self._turns: list[_Turn] = []
        self._seal = seal
        self._images = images
        self._call_names: dict[str, str] = {}

    @property
    def has_turns(self) -> bool:
        """Whether there is a turn so far."""
        return bool(self._turns)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns so far as messages of the OpenAI API."""
        return [turn.to_message() for turn in self._turns]

    @property
    def paths(self) -> list[str]:
        """The JSON path of each turn's message in the request's body, for errors."""
        return [f"messages[{turn.index}]" for turn in self._turns]

    def add_system(self, index: int, texts: Sequence[Piece]) -> None:
        """Add the texts of a system message. They join the last turn if it is a system message, too."""
        self._last_or_new_turn("system", index).texts += texts

    def add_user(self, index: int, content: object, *, is_newest: bool) -> None:
        """Add a user's message: its texts and images, and the results of tool calls. `is_newest`: it is the
        user's last one. Raises InvalidRequest.
        """
        recent_turns: list[_Turn] = []
        while self._turns and self._turns[-1].role != "assistant":
            recent_turns.insert(0, self._turns.pop())
        results = [turn for turn in recent_turns if turn.role == "tool"]
        earlier_texts = [] if results else [text for turn in recent_turns if turn.role == "user" for text in turn.texts]
        old_result_count, orphans, texts = len(results), list[Piece](), list[Piece]()
        for path, block, kind in _content_blocks(content):
            with prefix_error_field(path):
                if kind == "tool_result":
                    result = self._read_result(index, block)
                    if result.role == "tool":
                        results.append(result)
                    else:
                        orphans += result.texts
                else:
                    piece = read_image(block, "", self._images, strict=is_newest) or read_part(block)
                    if piece or kind == "text":
                        (results[-1].remarks if results else texts).append(piece)
        texts = [*orphans, *texts]
        if not results:
            self._turns += recent_turns
            self._last_or_new_turn("user", index).texts += texts
            return
        if old_result_count:
            results[-1].remarks += texts
        else:
            results[0].remarks[:0] = [*earlier_texts, *texts]
        self._turns += results
        for turn in recent_turns:
            if turn.role == "system":
                self.add_system(turn.index, turn.texts)

    def add_assistant(self, index: int, content: object) -> None:
        """Add an assistant's message: its text, thoughts and tool calls. Raises InvalidRequest."""
        turn = self._last_or_new_turn("assistant", index)
        for path, block, kind in _content_blocks(content):
            with prefix_error_field(path):
                if kind == "tool_use":
                    turn.calls.append(self._read_call(block))
                elif kind in ("thinking", "redacted_thinking"):
                    turn.thoughts.append(self._read_thinking(block))
                else:
                    turn.texts.append(read_part(block))

    def check_last_turn(self, index: int) -> None:
        """Raise InvalidRequest if the conversation is empty or ends with an assistant's message."""
        if not self.has_turns:
            raise InvalidRequest("`messages` has no user's message", field="messages")
        if self._turns[-1].role == "assistant":
            raise InvalidRequest(_ENDS_WITH_ASSISTANT, field=f"messages[{index}]")

    def _last_or_new_turn(self, role: str, index: int) -> _Turn:
        """Return the last turn if it has this role, or else a new one, which is appended."""
        if not self.has_turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role, index))
        return self._turns[-1]

    def _read_result(self, index: int, block: Mapping[str, Any]) -> _Turn:
        """Convert a `tool_result` block into a tool's turn, or into a user's if its call is not in the conversation."""
        block = pick_known_fields(block, ("tool_use_id", "content", "is_error"), "a result")
        id, content = require_name("tool_use_id", block.get("tool_use_id")), block.get("content")
        content = add_image_paths("content", content)
        parts = [[part] for part in content] if isinstance(content, list) else [content]
        pieces = [piece for part in parts for piece in read_pieces(part, loose=True, images=self._images)]
        if block.get("is_error") not in (None, False, 0, "false"):
            first = pieces[0] if pieces else ""
            if not isinstance(first, str):
                pieces = ["Error:", *pieces]
            elif not first.lower().startswith("error"):
                pieces = [f"Error: {first}", *pieces[1:]]
        if id not in self._call_names:
            return _Turn("user", index, split_content(orphan_result_message(join_pieces(pieces, "\n"))["content"]))
        return _Turn("tool", index, pieces, extra={"tool_call_id": id, "name": self._call_names[id]})

    def _read_call(self, block: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a `tool_use` block into a tool call of the OpenAI API, and remember its name by its id."""
        id, name = (require_name(part, block.get(part)) for part in ("id", "name"))
        self._call_names[id] = name
        return {
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": read_arguments(block.get("input"))},
        }

    def _read_thinking(self, block: Mapping[str, Any]) -> str:
        """Return a `thinking` block's text if the seal shows that it is our own, or if there is no seal; else ""."""
        text, signature = block.get("thinking"), block.get("signature")
        if isinstance(text, str):
            if self._seal is None or (text and isinstance(signature, str) and self._seal.verify(text, signature)):
                return text
            if not text and isinstance(signature, str) and (thoughts := self._seal.unwrap(signature)) is not None:
                return thoughts
        note_omitted_thoughts()
        return ""


def _split_message(message: object) -> tuple[str, object]:
    """Return the role and the content of a message. Raises InvalidRequest."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"it is {message!r:.80}, but must be an object with `role` and `content`")
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"role is {role!r:.80}, but must be user, assistant or system", field="role")
    message = pick_message_fields(message, ("role", "content", "clear_at"), "a message")
    if role == "system" and message.get("clear_at") not in (None, "never", "next_user_message"):
        value_text = f"{message['clear_at']!r:.80}"
        raise InvalidRequest(f"clear_at is {value_text}, but must be never or next_user_message", field="clear_at")
    return role, message.get("content")


def _content_blocks(content: object) -> list[tuple[str, Mapping[str, Any], str]]:
    """Return the blocks of a message's content, each with its JSON path and its type. Raises InvalidRequest."""
    if isinstance(content, str):
        return [("", {"type": "text", "text": content}, "text")]
    if content is not None and not isinstance(content, list):
        raise InvalidRequest(f"it is {content!r:.80}, but must be a text or a list of blocks")
    blocks = []
    for index, block in enumerate(content or ()):
        if block is None:
            continue
        block = {"type": "text", "text": block} if isinstance(block, str) else block
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str):
            message = f"a block is {block!r:.80}, but must be an object with a `type`"
            raise InvalidRequest(message, field=f"[{index}]")
        blocks.append((f"[{index}]", block, kind))
    return blocks


def _content_texts(content: object) -> list[str]:
    """Return the text of each block of a content. Raises InvalidRequest for a block that has no text."""
    texts = []
    for path, block, _ in _content_blocks(content):
        with prefix_error_field(path):
            texts.append(read_part(block))
    return texts
