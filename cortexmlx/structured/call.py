"""ToolCall: what a model asks a tool to do. Plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A complete call of one tool."""

    id: str
    """Names the call in the message with its result."""
    name: str
    arguments: str
    """A JSON object as JSON text, as the model wrote it."""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name. A number that is too large for Python is infinite."""
        values: dict[str, Any] = loaded(self.arguments)
        return values

    def as_mapping(self) -> dict[str, Any]:
        """Return the call as chat templates read it: as in the OpenAI API, but with the arguments as an object."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.values}}


@dataclass(frozen=True)
class CallDelta:
    """A piece of a call that is being written. The first piece of a call has its `id` and `name`, the others have only
    `arguments`. The pieces of a call that is never completed, because the answer was cut, make no ToolCall.
    """

    index: int
    """The number of the call in its answer."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """The next characters of the arguments."""


def loaded(text: str, **options: Any) -> Any:
    """Return the value of a JSON text. Raises ValueError and RecursionError. Whole numbers may be of any length: Python
    refuses to read those of thousands of digits.
    """
    return json.loads(text, parse_int=_whole_number, **options)


def _whole_number(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def result_message(call: ToolCall, text: str) -> Mapping[str, object]:
    """Return the message that tells the model the result of a call."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
