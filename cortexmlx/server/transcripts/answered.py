"""Answered: an answer, to be known again when a client sends it back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cortexmlx.structured.tools import Tool, ToolCall, loaded
from cortexmlx.types.request import Completion, Message

THOUGHTS = "reasoning_content"
"""The field of a message that has its thoughts."""


@dataclass(frozen=True)
class Answered:
    """An answer with the tokens that the model wrote."""

    content: str
    thinking: str
    calls: tuple[ToolCall, ...]
    text: str
    """All that the model wrote, without the token that ended it."""
    tokens: tuple[int, ...]
    """The tokens of `text`."""
    end: str
    """The text of the token that ended it; empty if none did."""
    omitted: tuple[str, ...] = ()
    """For each call, the defaults of the arguments that the model left out, as a JSON object. Some clients put them in:
    they mean the same.
    """

    @classmethod
    def of(cls, completion: Completion, tokens: tuple[int, ...], end: str, tools: Sequence[Tool] = ()) -> Answered:
        """Return what is remembered of a completion whose text has these tokens, and which could call `tools`."""
        calls, schemas = completion.tool_calls, {tool.name: tool.schema for tool in tools}
        omitted = tuple(_omitted(call, schemas.get(call.name, {})) for call in calls)
        return cls(completion.text, completion.thinking, calls, completion.raw_text, tokens, end, omitted)

    def is_said_by(self, message: Message) -> bool:
        """Whether a message is this answer. White space around its text, and the form of its calls' arguments, may
        differ. Of its thoughts nothing is known here: a template may leave them out.
        """
        said = message.get("content") or ""
        if message.get("role") != "assistant" or not isinstance(said, str) or said.strip() != self.content.strip():
            return False
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, list | tuple) or len(calls) != len(self.calls):
            return False
        omitted = self.omitted or ("{}",) * len(calls)
        return all(map(is_call, calls, self.calls, omitted))

    def thoughts_are_of(self, message: Message) -> bool:
        """Whether a message has the thoughts of this answer, or neither has any."""
        said = message.get(THOUGHTS) or ""
        return isinstance(said, str) and said.strip() == self.thinking.strip()

    def has(self, text: str) -> bool:
        """Whether a text is in what was written, also in a call whose arguments spell it with escapes."""
        values = (json.dumps(call.values, ensure_ascii=False) for call in self.calls)
        return text in self.text or any(text in each for each in values)

    def given_back(self, message: Message) -> Message:
        """Return a message of this answer's calls with their arguments in the order in which the model wrote them."""
        return {**message, "tool_calls": [call.as_mapping() for call in self.calls]}


def is_call(message: object, call: ToolCall, omitted: str = "{}") -> bool:
    """Whether a call in a message is this one: the same id, function and arguments. It may also have `omitted`
    arguments, with these values.
    """
    function = message.get("function") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(function, Mapping):
        return False
    if message.get("id") != call.id or function.get("name") != call.name:
        return False
    return _same(function.get("arguments"), call, omitted)


def _same(arguments: object, call: ToolCall, omitted: str) -> bool:
    try:
        if canonical(arguments) == canonical(call.values):
            return True
        usual = loaded(omitted)
        if not usual or not isinstance(arguments, Mapping):
            return False
        said = {
            name: value
            for name, value in arguments.items()
            if name not in usual or canonical(value) != canonical(usual[name])
        }
        return canonical(said) == canonical(call.values)
    except (ValueError, TypeError, RecursionError):
        return False


def _omitted(call: ToolCall, schema: Mapping[str, Any]) -> str:
    """Return the defaults of a schema's properties that a call does not have, as a JSON object."""
    properties, values = schema.get("properties"), call.values
    if not isinstance(properties, Mapping):
        return "{}"
    usual = {
        name: part["default"]
        for name, part in properties.items()
        if name not in values and isinstance(part, Mapping) and "default" in part
    }
    return json.dumps(usual)


canonical: Callable[[Any], str] = json.JSONEncoder(sort_keys=True).encode
"""Returns JSON that is the same for equal values: unlike in Python, true is not 1."""
