"""Calls as chat templates read them."""

from __future__ import annotations

import math

from cortexmlx.structured.tools import ToolCall, result_message

CALL = ToolCall("call_1", "f", '{"b": 1, "a": {"c": [null, "é"]}}')


def test_a_template_gets_the_arguments_as_an_object_in_their_order() -> None:
    called = CALL.as_mapping()
    assert called["id"] == "call_1" and called["type"] == "function"
    assert called["function"] == {"name": "f", "arguments": {"b": 1, "a": {"c": [None, "é"]}}}
    assert list(CALL.values) == ["b", "a"]


def test_whole_numbers_of_any_length_are_read() -> None:
    call = ToolCall("call_1", "f", f'{{"a": {"1" * 5000}, "b": -{"1" * 5000}, "c": {"1" * 4000}}}')
    assert call.values == {"a": math.inf, "b": -math.inf, "c": int("1" * 4000)}


def test_a_result_names_its_call() -> None:
    assert result_message(CALL, "42") == {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "42"}
