"""The events of a streamed response: together they say what the whole response says, however the answer was cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cortexmlx.errors import KVCacheFull
from cortexmlx.protocols import responses
from cortexmlx.protocols.request import ReplyInfo, Request, RequestDefaults
from cortexmlx.structured.tools import CallDelta, ToolCall
from cortexmlx.types.logprobs import TokenLogprob
from cortexmlx.types.request import Completion, FinishReason, Timings, TokenEvent, Usage
from cortexmlx.types.sampling_params import SamplingParams
from support.open_responses import event_faults
from support.told_answers import events

INFO = ReplyInfo("7", "m", 1_767_225_600, lambda token: chr(token).encode())
ASKED = Request(("hi",), SamplingParams(max_tokens=5), body={"metadata": {"a": "b"}})
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


CALLS = st.lists(st.sampled_from(["a", "b"]), max_size=3).map(
    lambda names: tuple(ToolCall(f"id{n}", name, '{"x": "é"}') for n, name in enumerate(names))
)


@given(st.text(max_size=8), st.text(max_size=8), CALLS, st.sampled_from(list(FinishReason)[:3]), st.data())
def test_the_events_say_what_the_whole_response_says(
    text: str, thinking: str, calls: tuple[ToolCall, ...], reason: FinishReason, data: st.DataObject
) -> None:
    answer = Completion(
        text, (1,), reason, Usage(5, 3), Timings(0, 0, 0, 0, 0), thinking=thinking, raw_text="x", tool_calls=calls
    )
    chunks = responses.ResponseEvents(ASKED, INFO)
    told = [body for event in events(data.draw, answer) for body in chunks.convert(event)]
    for body in told:
        EVENT.validate_python(body)
    assert not list(event_faults(told))
    assert [body["sequence_number"] for body in told] == list(range(len(told)))
    assert told[0]["type"] == "response.created"
    whole, last = responses.write(ASKED, [[answer]], INFO), told[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert last["response"] == whole
    Response.model_validate(last["response"])
    for kind, expected in (("output_text", text), ("reasoning_text", thinking)):
        assert "".join(b["delta"] for b in told if b["type"] == f"response.{kind}.delta") == expected
    added = [b["item"]["id"] for b in told if b["type"] == "response.output_item.added"]
    done = {b["item"]["id"]: b["item"] for b in told if b["type"] == "response.output_item.done"}
    assert added == [item["id"] for item in whole["output"]] and done.keys() == set(added)
    for item in whole["output"]:
        assert {**done[item["id"]], "content": []} == {**item, "content": []}
        if item["type"] == "function_call":
            parts = [b["delta"] for b in told if b.get("item_id") == item["id"] and b["type"].endswith(".delta")]
            assert json.loads("".join(parts)) == {"x": "é"}


@pytest.mark.parametrize("text", ["c", ""])
def test_thoughts_are_told_in_one_piece_with_log_probabilities_and_a_call_that_is_cut(text: str) -> None:
    logprobs = tuple(TokenLogprob(token, -0.5, ()) for token in b"abc")
    usage, raw = Usage(5, 3), f"<think>ab</think>{text}<tool_call>"
    reason, timings = FinishReason.LENGTH, Timings(0, 0, 0, 0, 0)
    answer = Completion(text, (97, 98, 99), reason, usage, timings, logprobs, thinking="ab", raw_text=raw)
    told_events = [TokenEvent("", token, logprobs[token - 97], thinking=chr(token)) for token in b"ab"]
    told_events.append(TokenEvent(text, 99, logprobs[2], tool_calls=(CallDelta(0, "id0", "f"),)))
    told_events.append(TokenEvent("", finish_reason=reason, completion=answer))
    chunks = responses.ResponseEvents(ASKED, INFO)
    told = [body for event in told_events for body in chunks.convert(event)]
    done = [body["item"] for body in told if body["type"] == "response.output_item.done"]
    output = told[-1]["response"]["output"]
    assert [(item["type"], item["status"]) for item in done] == [(item["type"], item["status"]) for item in output]
    assert done[0]["content"] == output[0]["content"] and output == responses.write(ASKED, [[answer]], INFO)["output"]
    deltas = (body for body in told if body["type"] == "response.output_text.delta")
    assert [each for body in deltas for each in body["logprobs"]] == output[1]["content"][0]["logprobs"]


def test_a_request_that_fails_says_so() -> None:
    chunks = responses.ResponseEvents(ASKED, INFO)
    told = [*chunks.convert(TokenEvent("a")), *chunks.convert(TokenEvent("", error=KVCacheFull("the cache is full")))]
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["error"] == {"code": "server_error", "message": "the cache is full"}
    EVENT.validate_python(told[-1])


def test_the_call_of_a_custom_tool_is_told_in_one_piece() -> None:
    tools = [{"type": "namespace", "name": "files", "tools": [{"type": "custom", "name": "patch"}]}]
    asked = responses.read({"input": "hi", "tools": tools}, RequestDefaults(SamplingParams()))
    call = ToolCall("id0", "files__patch", '{"input": "a\\nb"}')
    usage, timings = Usage(5, 3), Timings(0, 0, 0, 0, 0)
    answer = Completion("", (1,), FinishReason.TOOL_CALLS, usage, timings, raw_text="x", tool_calls=(call,))
    chunks = responses.ResponseEvents(asked, INFO)
    deltas = [CallDelta(0, call.id, call.name), *(CallDelta(0, arguments=piece) for piece in call.arguments)]
    told = [body for delta in deltas for body in chunks.convert(TokenEvent("", tool_calls=(delta,)))]
    assert [body["type"] for body in told] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
    ]
    told += chunks.convert(TokenEvent("", finish_reason=FinishReason.TOOL_CALLS, completion=answer))
    for body in told:
        EVENT.validate_python(body)
    assert [body["type"] for body in told[3:]] == [
        *("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"),
        *("response.output_item.done", "response.completed"),
    ]
    [item] = told[-1]["response"]["output"]
    assert told[3]["delta"] == told[4]["input"] == item["input"] == "a\nb"
    assert told[2]["item"]["id"] == told[3]["item_id"] == told[5]["item"]["id"] == item["id"]
    assert told[5]["item"] == item and (item["name"], item["namespace"]) == ("patch", "files")
