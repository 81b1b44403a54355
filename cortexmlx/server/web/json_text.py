"""JSON that strangers send: parsed within bounds, so that it holds up nobody else's stream."""

from __future__ import annotations

import json
import re
from typing import Any

from cortexmlx.errors import InvalidRequest

MOST_VALUES = 1 << 18
"""How many values and names a body may have. Python's parser holds the interpreter's lock while it makes them, on
whichever thread: about 0.2 s for a million. A thread is no help; this is.
"""

MOST_DEPTH = 128
"""How deep a body may be nested. Code that descends into it does not exhaust its stack."""

SMALL = 1 << 16
"""Bytes of a body that may be parsed and read on the event loop: some milliseconds."""

_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{,:]', re.DOTALL)
"""A text, also one without an end; or what stands before a value."""


def parsed(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises InvalidRequest."""
    _check_values(data)
    try:
        body = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is no UTF-8: {error.reason} at byte {error.start:,}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise InvalidRequest("the body has an integer of more than 4,300 digits") from None
        raise InvalidRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    _check_nested(body)
    return body


def _check_values(data: bytes) -> None:
    """Raise InvalidRequest if there are too many values. Texts are searched only if their marks could be too many."""
    if sum(map(data.count, (b"[", b"{", b",", b":"))) <= MOST_VALUES:
        return
    count = 0
    for part in _PARTS.finditer(data):
        count += part[0][0] != 0x22
        if count > MOST_VALUES:
            raise _too_many()


def _check_nested(body: dict[str, Any]) -> None:
    """Raise InvalidRequest if it is too deep, or if the arguments of its calls have too many values together."""
    level: list[Any] = [body]
    inner = 0
    for _ in range(MOST_DEPTH):
        inner += sum(_values_in_arguments(each) for each in level if isinstance(each, dict))
        if inner > MOST_VALUES:
            raise _too_many()
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _values_in_arguments(call: dict[str, Any]) -> int:
    """Return how many values the arguments of a call may have, which are JSON in a text."""
    text = call.get("input" if call.get("type") == "tool_use" else "arguments")
    return sum(map(text.count, "[{,:")) if isinstance(text, str) else 0


def _too_many() -> InvalidRequest:
    return InvalidRequest(
        f"the body has more than {MOST_VALUES:,} values: send a text instead of token ids, or shorten it"
    )


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body is nested more than {MOST_DEPTH} deep")
