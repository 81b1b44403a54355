"""The non-blank lines of an input, as text or as JSON objects."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from cortexmlx.errors import InvalidRequest


def detect_lines(lines: Iterable[bytes | None], jsonl: bool | None) -> tuple[bool, Iterator[tuple[int, bytes | None]]]:
    """Wait for the first line that is not blank. Return whether the lines are JSON, and all lines that are not blank.

    Each line comes with its number, counted from 1. A None after the first line is passed on.
    """
    nonblank_lines = _nonblank_lines(lines)
    number, first = next(((number, line) for number, line in nonblank_lines if line is not None), (0, None))
    if first is None:
        return False, iter(())
    return first.startswith(b"{") if jsonl is None else jsonl, itertools.chain([(number, first)], nonblank_lines)


def _nonblank_lines(lines: Iterable[bytes | None]) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and the content of each line that is not blank; None for a line that has not arrived yet."""
    number = 0
    for line in lines:
        if line is None:
            yield number, None
            continue
        number += 1
        if stripped := line.strip():
            yield number, stripped.removeprefix(b"\xef\xbb\xbf")


def decode_line(line: bytes) -> str:
    """Decode a line. Raises InvalidRequest with the position of a byte that is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"not UTF-8: byte {error.object[error.start]:#04x} at column {error.start + 1}") from None


def parse_object(line: bytes, expected_fields: str = "`prompt` or `messages`") -> dict[str, Any]:
    """Parse a line as a JSON object. `expected_fields` names the fields that one should have. Raises InvalidRequest."""
    try:
        data = json.loads(decode_line(line), object_pairs_hook=_reject_duplicates)
    except InvalidRequest:
        raise
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("not JSON that can be read: nested too deeply") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"a JSON {type(data).__name__}, but must be an object with {expected_fields}")
    return data


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of its fields. Raises InvalidRequest if two have the same name: one would be lost."""
    data = dict(pairs)
    if len(data) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidRequest(f"{name!r} is there more than once")
    return data
