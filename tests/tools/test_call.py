"""Calls as chat templates read them."""

from __future__ import annotations

from cortexmlx.tools.call import ToolCall, result_message

CALL = ToolCall("call_1", "f", '{"b": 1, "a": {"c": [null, "é"]}}')


def test_a_template_gets_the_arguments_as_an_object_in_their_order() -> None:
    called = CALL.as_mapping()
    assert called["id"] == "call_1" and called["type"] == "function"
    assert called["function"] == {"name": "f", "arguments": {"b": 1, "a": {"c": [None, "é"]}}}
    assert list(CALL.values) == ["b", "a"]


def test_a_result_names_its_call() -> None:
    assert result_message(CALL, "42") == {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "42"}
