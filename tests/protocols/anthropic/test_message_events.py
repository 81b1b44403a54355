"""The events of a streamed message: together they say what the whole message says, however the answer was cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from cortexmlx.errors import InvalidRequest, KVCacheFull
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.request import ReplyInfo, Request
from cortexmlx.protocols.seal import Seal
from cortexmlx.structured.tools import CallDelta, ToolCall
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import Completion, FinishReason, Timings, TokenEvent, Usage
from cortexmlx.types.sampling_params import SamplingParams
from support import told_answers

SEAL = Seal(b"s", "ann")
INFO = ReplyInfo("7", "m", 1_767_225_600, lambda token: chr(token).encode(), seal=SEAL)
ASKED = Request(("hi",), SamplingParams(max_tokens=5))
OMITS = replace(ASKED, body={"thinking": {"type": "adaptive", "display": "omitted"}})
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TIMES = Timings(0, 0, 0, 0, 0)


def events(draw: Any, answer: Completion) -> Iterator[TokenEvent]:
    """An answer as the engine tells it, perhaps with progress first."""
    if draw(st.booleans()):
        yield TokenEvent("", progress=Progress("prefilling", 2, 5, 1))
    yield from told_answers.events(draw, answer)


def gathered(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events tell. Blocks come one after the other, each begun and ended."""
    assert [body["type"] for body in (told[0], *told[-2:])] == ["message_start", "message_delta", "message_stop"]
    message, inputs, open_block = dict(told[0]["message"]), "", -1
    content: list[dict[str, Any]] = []
    for body in told[1:-2]:
        if body["type"] == "content_block_start":
            assert open_block == -1 and body["index"] == len(content)
            content.append(dict(body["content_block"]))
            open_block, inputs = body["index"], ""
            continue
        assert body["index"] == open_block
        if body["type"] == "content_block_stop":
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads(inputs or "{}")
            open_block = -1
            continue
        match body["delta"]:
            case {"type": "text_delta", "text": text}:
                content[-1]["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                content[-1]["thinking"] += text
            case {"type": "signature_delta", "signature": signature}:
                content[-1]["signature"] = signature
            case {"type": "input_json_delta", "partial_json": text}:
                inputs += text
            case other:
                raise AssertionError(other)
    assert open_block == -1
    return {**message, "content": content, **told[-2]["delta"], "usage": told[-2]["usage"]}


CALLS = st.lists(st.sampled_from(["a", "b"]), max_size=3).map(
    lambda names: tuple(ToolCall(f"id{n}", name, '{"x": "é"}') for n, name in enumerate(names))
)


@given(
    st.text(max_size=8),
    st.text(max_size=8),
    CALLS,
    st.sampled_from(list(FinishReason)[:3]),
    st.sampled_from([None, "x"]),
    st.sampled_from([ASKED, OMITS]),
    st.data(),
)
def test_the_events_say_what_the_whole_message_says(
    text: str,
    thinking: str,
    calls: tuple[ToolCall, ...],
    reason: FinishReason,
    stop: str | None,
    asked: Request,
    data: st.DataObject,
) -> None:
    answer = Completion(
        text,
        (1,),
        reason,
        Usage(5, 3, 2),
        TIMES,
        thinking=thinking,
        raw_text="x",
        tool_calls=calls,
        stop_string=stop,
    )
    chunks = messages.MessageEvents(asked, INFO)
    told = [body for event in events(data.draw, answer) for body in chunks.of(event)]
    for body in told:
        EVENT.validate_python(body)
    whole = messages.write(asked, [[answer]], INFO)
    Message.model_validate(whole, strict=True)
    assert gathered(told) == whole


def test_a_text_after_a_call_is_a_block_of_its_own() -> None:
    chunks = messages.MessageEvents(ASKED, INFO)
    call = CallDelta(0, "id", "f", "{}")
    answer = Completion(
        "ab", (1,), FinishReason.TOOL_CALLS, Usage(5, 3), TIMES, tool_calls=(ToolCall("id", "f", "{}"),)
    )
    said = [TokenEvent("a"), TokenEvent("", tool_calls=(call,)), TokenEvent("b"), TokenEvent("", completion=answer)]
    blocks = gathered([body for event in said for body in chunks.of(event)])["content"]
    assert [block.get("text", block.get("name")) for block in blocks] == ["a", "f", "b"]


def test_a_call_that_was_cut_ends_as_max_tokens() -> None:
    chunks = messages.MessageEvents(ASKED, INFO)
    answer = Completion("", (1,), FinishReason.LENGTH, Usage(5, 5), TIMES, raw_text="x")
    cut = TokenEvent("", tool_calls=(CallDelta(0, "id", "f", '{"a'),))
    told = [*chunks.of(cut), *chunks.of(TokenEvent("", completion=answer))]
    assert told[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert messages.write(ASKED, [[answer]], INFO)["content"] == [{"type": "text", "text": ""}]


def test_the_first_event_has_the_tokens_of_the_prompt() -> None:
    informed = replace(INFO, progress=lambda: Progress("prefilling", 3, 9, 3))
    [start] = [b for b in messages.MessageEvents(ASKED, informed).of(TokenEvent("")) if b["type"] == "message_start"]
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (6, 3, 0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(KVCacheFull("the cache is full"), "overloaded_error"), (InvalidRequest("no"), "invalid_request_error")],
)
def test_a_request_that_fails_says_so(error: Any, kind: str) -> None:
    chunks = messages.MessageEvents(ASKED, INFO)
    told = [*chunks.of(TokenEvent("a")), *chunks.of(TokenEvent("", error=error))]
    assert told[-1] == {"type": "error", "error": {"type": kind, "message": str(error)}}
