"""Chat messages: as a prompt, and as others write them, in the shape of the OpenAI API. No mlx, no threads."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.request import Message

TemplateVars = Mapping[str, object]
"""Variables for the model's chat template, by name: booleans, numbers, texts, and lists and maps of them."""

NO_VARIABLES: TemplateVars = MappingProxyType({})

THINKING = "enable_thinking"
"""The variable that switches thoughts on and off. A template that calls it `thinking` gets it under that name."""

EFFORT = "reasoning_effort"
"""The variable that says how much a model is to think, where a template has degrees of it."""

NO_TEXT = "holds a NUL or half of a surrogate pair, which is no text"

_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "reasoning_content")
_TEXTS = ("role", "name", "tool_call_id", "reasoning_content", "content")
_CALL = ("id", "type", "function", "index")
_TEXT_PARTS = ("text", "input_text", "output_text")
"""The types of parts that are text."""

_MOST_NAMED = 10


@dataclass(frozen=True)
class ChatPrompt:
    """Messages with variables for the model's chat template, in the place of the messages alone.

    `template_vars` such as `{"enable_thinking": False}` or `{"reasoning_effort": "low"}`; one that the template does
    not read raises InvalidRequest when the prompt is rendered.
    """

    messages: Sequence[Message]
    template_vars: TemplateVars = field(default_factory=dict)


def body_vars(body: Mapping[str, object], usual: TemplateVars = NO_VARIABLES) -> dict[str, object]:
    """The template's variables that the body of a request asks for: vLLM's `chat_template_kwargs` and OpenAI's
    `reasoning_effort`, over which the former go; null asks for nothing. Both go over the `usual` ones. Raises
    InvalidRequest for what is none.
    """
    effort, variables = body.get(EFFORT), body.get("chat_template_kwargs") or {}
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest(f"{EFFORT} is {effort!r:.80}, but must be a text like 'low'")
    if not isinstance(variables, Mapping):
        raise InvalidRequest(f"chat_template_kwargs is {variables!r:.80}, but must be an object")
    own = ({} if effort is None else {EFFORT: effort}) | {k: v for k, v in variables.items() if v is not None}
    return {name: value for name, value in usual.items() if name != THINKING or own.get(EFFORT) != "none"} | own


def checked_vars(variables: object) -> dict[str, object]:
    """A copy of the template's variables. Raises InvalidRequest for what is no map from names."""
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidRequest(f"template_vars is {variables!r:.80}, but must be a map from names to values")
    return dict(variables)


def read_messages(messages: object) -> list[Message]:
    """Messages of the OpenAI API as chat templates read them: without what is null, each text in one piece, arguments
    of tool calls as objects, and what developers say as the system's.

    Raises InvalidRequest for what is none, or is not served, with the number of the message: nothing is left out in
    silence, for an answer without it would be one to another question.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("`messages` must be a list of objects with `role` and `content`")
    read: list[Message] = []
    for number, message in enumerate(messages, 1):
        try:
            read.append(_message(message))
        except InvalidRequest as error:
            raise InvalidRequest(f"message {number}: {error}") from None
    return read


def plain_message(message: Mapping[str, object]) -> dict[str, object]:
    """The message with its text in one piece, where `content` is a list of parts as in the OpenAI API.

    Raises InvalidRequest for a part that is no text: a template would write a placeholder for it, and the model would
    answer as if it had seen something.
    """
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    return {**message, "content": "".join(map(_text_of, content))}


def is_text(text: str) -> bool:
    """It can be written in UTF-8, without NULs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def check_fields(names: Collection[str], known: Collection[str], what: str) -> None:
    """Raise InvalidRequest if there are fields that `what` does not have, with the names that they may stand for."""
    strange = [name for name in names if name not in known]
    if strange:
        shown = ", ".join(repr(name) + meant(name, known) for name in strange[:_MOST_NAMED])
        if len(strange) > _MOST_NAMED:
            shown += f" and {len(strange) - _MOST_NAMED} more"
        raise InvalidRequest(f"unknown field{'s' * (len(strange) > 1)} of {what}: {shown}")


def meant(name: str, known: Collection[str]) -> str:
    """A question that names the known one most like `name`, or nothing."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1, cutoff=0.7)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _message(message: object) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"it is {message!r:.80}, but must be an object with `role` and `content`")
    said = {name: value for name, value in message.items() if value is not None}
    check_fields(said, _FIELDS, "a message")
    if not isinstance(said.get("role"), str):
        raise InvalidRequest(f"`role` is {said.get('role')!r:.80}, but must be a text")
    if "refusal" in said:
        raise InvalidRequest("`refusal` is not served: templates know none. Put it into `content`")
    if said.pop("annotations", None):
        raise InvalidRequest("`annotations` are not served: templates know none")
    if said["role"] == "developer":
        said["role"] = "system"
    if said.get("tool_calls") == []:  # as servers say that there is none
        del said["tool_calls"]
    if "tool_calls" in said:
        said["tool_calls"] = _calls(said["tool_calls"])
        said.setdefault("content", "")
    said = plain_message(said)
    said.setdefault("content", None)
    for name in _TEXTS:
        text = said.get(name, "")
        if not isinstance(text, str):
            raise InvalidRequest(f"`{name}` is {text!r:.80}, but must be a text")
        if not is_text(text):
            raise InvalidRequest(f"`{name}` {NO_TEXT}")
    return said


def _calls(calls: object) -> list[dict[str, Any]]:
    """Tool calls with their arguments as an object, as templates want them; the OpenAI API has them as JSON text."""
    if not isinstance(calls, list):
        raise InvalidRequest("`tool_calls` must be a list of calls")
    return [_call(call) for call in calls]


def _call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        raise InvalidRequest("`tool_calls` has one without a `function` that has a `name`")
    check_fields(call, _CALL, "a tool call")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise InvalidRequest(f"the `arguments` of the tool call {name!r:.80} are no JSON: {error}") from None
        except RecursionError:
            raise InvalidRequest(f"the `arguments` of the tool call {name!r:.80} are nested too deeply") from None
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"the `arguments` of the tool call {name!r:.80} are {arguments!r:.40}, no object")
    return {**call, "function": {**function, "arguments": arguments}}


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS:
        if isinstance(text, str):
            return text
        raise InvalidRequest(f"a message's `content` has a part of type {kind!r} whose `text` is no text.")
    raise InvalidRequest(
        f"a message's `content` has a part of type {kind!r}, but only text is read: images, audio and files are not, "
        "by models with such parts either. Leave it out."
    )
