"""JSON of strangers is parsed within bounds, and ordinary JSON as ever."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.errors import InvalidRequest
from cortexmlx.server.http import MOST_DEPTH, MOST_VALUES, event, parse_json
from support.effort import examples

TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(50), deadline=None)
@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_an_ordinary_body_is_what_json_says(body: dict[str, Any]) -> None:
    assert parse_json(json.dumps(body).encode()) == body


def nested(depth: int) -> bytes:
    """An object with lists in it, `depth` deep altogether."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_a_body_is_nested_so_deep_and_no_deeper() -> None:
    assert parse_json(nested(MOST_DEPTH))
    for depth in (MOST_DEPTH + 1, 500, 5_000, 200_000):
        with pytest.raises(InvalidRequest, match=r"nested more than 128 deep"):
            parse_json(nested(depth))


def test_a_body_has_so_many_values_and_no_more() -> None:
    def ids(count: int) -> bytes:
        return b'{"prompt":[' + b",".join([b"7"] * count) + b"]}"

    assert len(parse_json(ids(MOST_VALUES - 3))["prompt"]) == MOST_VALUES - 3
    with pytest.raises(InvalidRequest, match="more than 262,144 values"):
        parse_json(ids(MOST_VALUES + 1))


@pytest.mark.parametrize("call", [{"arguments": ""}, {"type": "tool_use", "input": ""}])
def test_values_in_the_arguments_of_calls_count_too(call: dict[str, str]) -> None:
    """They are JSON in a text, which is parsed: 5 million of them took 1 GB."""
    (name,) = [name for name, value in call.items() if not value]

    def calls(each: int) -> bytes:
        return json.dumps({"messages": [{"calls": [{**call, name: "{}," * each}] * 4}]}).encode()

    assert parse_json(calls(MOST_VALUES // 8))
    with pytest.raises(InvalidRequest, match="more than 262,144 values"):
        parse_json(calls(MOST_VALUES // 8 + 1))


@pytest.mark.parametrize("text", [",,," * 200_000, '\\"{[,' * 100_000, "a: b, " * 100_000])
def test_marks_in_a_text_are_no_values(text: str) -> None:
    assert parse_json(json.dumps({"text": text}).encode()) == {"text": text}


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":"' + b'\\",' * 3_000_000,
        b'"' * 3 + b'\\",' * 3_000_000,
        b"[]," * 3_000_000,
        b'{"a":' * 2_000_000,
        b'"a",' * 2_000_000,
        b"\\," * 3_000_000,
    ],
    ids=lambda data: repr(data[:8]),
)
def test_what_is_no_body_is_refused_in_time_that_grows_with_its_length(data: bytes) -> None:
    """The bound is on this process's CPU time: a search that begins anew at each mark would take hours."""
    began = time.process_time()
    with pytest.raises(InvalidRequest):
        parse_json(data)
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no JSON"),
        (b"[]", "must be a JSON object"),
        (b"\xff", "no UTF-8: invalid start byte at byte 0"),
        (b'{"a": "\xed\xa0\x80"}', "no UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "no UTF-8"),
        ('{"a": 1}'.encode("utf-32-le"), "no JSON"),
        (b'{"a":' + b"1" * 5000 + b"}", "an integer of more than 4,300 digits"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse_json(data)


def test_an_event_is_one_line_for_clients_that_split_at_any_line_break() -> None:
    body = {"arguments": '{"text": "a\u2028b\u2029c\x85d\x0be\x1cf\r\n"}', "\u2028": "漢"}
    [name, data] = event(body, "delta").decode().split("\n\n")[0].splitlines()
    assert name == "event: delta" and json.loads(data.removeprefix("data: ")) == body
