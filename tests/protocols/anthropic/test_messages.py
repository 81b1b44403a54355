"""/v1/messages: bodies that are read, tools, whole replies, and the events of streams."""

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

from cortexmlx.errors import CortexError, InvalidRequest, KVCacheFull
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.anthropic.messages import read_tools, tool_input
from cortexmlx.protocols.request import ReplyInfo, Request, RequestDefaults
from cortexmlx.protocols.seal import Seal
from cortexmlx.structured.tools import CallDelta, ToolCall
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import Completion, FinishReason, Timings, TokenEvent, Usage
from cortexmlx.types.sampling_params import SamplingParams
from support import told_answers

DEFAULTS = RequestDefaults(SamplingParams(max_tokens=None, temperature=0.5))
THINKS = RequestDefaults(SamplingParams(), {"enable_thinking": False, "other": 1})
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
SEAL = Seal(b"s", "ann")
INFO = ReplyInfo("7", "m", 1, lambda token: b"", seal=SEAL)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **more}


def read(defaults: RequestDefaults = DEFAULTS, **more: Any) -> Request:
    return messages.read(body(**more), defaults)


def answer(**more: Any) -> Completion:
    said = {"text": "a", "finish_reason": FinishReason.STOP, "usage": Usage(9, 3, 4, thinking_tokens=1), **more}
    return Completion(token_ids=(1,), timings=Timings(0, 0, 0, 0, 0), raw_text="x", **said)


def test_the_parameters_are_those_of_the_body() -> None:
    params = read(temperature=1, top_p=0.5, top_k=7, stop_sequences=["x", "y"]).params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 1, 0.5, 7)
    assert params.stop == ("x", "y") and read().params.temperature == 0.5
    assert read(stream=True).stream and not read(stream=None).stream


def test_what_changes_no_answer_is_accepted() -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    hints = {"metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": edits, "mcp_servers": []}
    assert read(**hints, cache_control={"type": "ephemeral"}, container=None).params == read().params


@pytest.mark.parametrize(
    ("more", "field", "says"),
    [
        ({"max_tokens": None}, "max_tokens", "is missing"),
        ({"max_tokens": 0}, "max_tokens", "is 0"),
        ({"messages": None}, "messages", "must be a list"),
        ({"temperature": 1.5}, "temperature", "1.5"),
        ({"top_p": 2}, "top_p", "2"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"stop_sequences": "x"}, "stop_sequences", "a list"),
        ({"stream": 1}, "stream", "true or false"),
        ({"container": "c"}, "container", "not served"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "not served"),
        ({"thread": {"type": "create"}}, "thread", "not served"),
        ({"compaction": {}}, "compaction", "not served"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"thinking": "on"}, "thinking", "an object"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "belongs to"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens", "belongs to"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "above 0"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens", "above 0"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type", "adaptive"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display", "omitted"),
        ({"output_config": {"effort": "none"}}, "output_config.effort", "low"),
        ({"output_config": {"effort": []}}, "output_config.effort", "low"),
        ({"output_config": {"zzz": 1}}, "output_config.zzz", "unknown"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "json_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "JSON schema"),
    ],
)
def test_what_cannot_be_given_is_refused_by_name(more: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as raised:
        read(**more)
    assert raised.value.field == field


def test_thinking_is_a_hint_that_a_template_may_not_read() -> None:
    on = read(thinking={"type": "enabled", "budget_tokens": 100, "display": None})
    assert (on.hints, on.params.max_thinking_tokens, on.template_vars) == ({"enable_thinking": True}, 100, {})
    off = read(thinking={"type": "disabled"})
    assert (off.hints, off.params.max_thinking_tokens) == ({"enable_thinking": False}, 0)
    assert read(thinking={"type": "adaptive"}).hints == {"enable_thinking": True} and read().hints == {}


def test_adaptive_leaves_it_to_the_server_and_the_others_do_not() -> None:
    adaptive = read(THINKS, thinking={"type": "adaptive"})
    assert adaptive.template_vars == THINKS.template_vars and adaptive.hints == {}
    enabled = read(THINKS, thinking={"type": "enabled", "budget_tokens": 9})
    assert enabled.template_vars == {"other": 1} and enabled.hints == {"enable_thinking": True}
    assert read(THINKS).template_vars == THINKS.template_vars


@pytest.mark.parametrize(("effort", "told"), [("low", "low"), ("high", "high"), ("xhigh", "high"), ("max", "high")])
def test_effort_is_one_of_three_degrees(effort: str, told: str) -> None:
    assert read(output_config={"effort": effort}).hints == {"reasoning_effort": told}


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_an_answer_may_have_a_form(name: str) -> None:
    asked = {"type": "json_schema", "schema": SCHEMA}
    form = read(**{name: {"format": asked} if name == "output_config" else asked}).params.form
    assert form is not None and form.parse('{"a": "b"}') == {"a": "b"}


def test_a_prompt_that_is_counted_needs_no_max_tokens() -> None:
    assert messages.read_for_counting({"messages": body()["messages"]}, DEFAULTS).prompts == read().prompts


@pytest.mark.parametrize(
    ("said", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"stop_string": "x"}, "stop_sequence", "x"),
        ({"finish_reason": FinishReason.TOOL_CALLS, "stop_string": "x"}, "tool_use", None),
        ({"finish_reason": FinishReason.LENGTH, "usage": Usage(9, 5)}, "max_tokens", None),
        ({"finish_reason": FinishReason.LENGTH, "usage": Usage(9, 4)}, "model_context_window_exceeded", None),
        ({"finish_reason": FinishReason.CANCELLED}, "end_turn", None),
    ],
)
def test_why_an_answer_ended(said: dict[str, Any], reason: str, sequence: str | None) -> None:
    reply = Message.model_validate(messages.write(read(), [[answer(**said)]], INFO), strict=True)
    assert (reply.stop_reason, reply.stop_sequence) == (reason, sequence)


def test_the_usage_tells_cached_tokens_apart() -> None:
    usage = Message.model_validate(messages.write(read(), [[answer()]], INFO)).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 4, 3)
    assert usage.cache_creation_input_tokens == 0
    assert usage.output_tokens_details is not None and usage.output_tokens_details.thinking_tokens == 1


def test_thoughts_are_signed_and_come_back() -> None:
    for asked in (read(), read(thinking={"type": "adaptive", "display": "omitted"})):
        [thought, said] = messages.write(asked, [[answer(thinking="hmm")]], INFO)["content"]
        assert thought["thinking"] == ("" if "thinking" in asked.body else "hmm") and said["text"] == "a"
        turns = [*body()["messages"], {"role": "assistant", "content": [thought, said]}, *body()["messages"]]
        back = messages.read(body(messages=turns), RequestDefaults(SamplingParams(), seal=SEAL)).prompts[0]
        assert isinstance(back[1], dict) and back[1]["reasoning_content"] == "hmm"


def test_an_answer_without_a_word_is_an_empty_text() -> None:
    assert messages.write(read(), [[answer(text="")]], INFO)["content"] == [{"type": "text", "text": ""}]
    only = messages.write(read(), [[answer(text="", thinking="hmm")]], INFO)["content"]
    assert [block["type"] for block in only] == ["thinking"]


# Tools of Anthropic's API: those of a body, which to call, and the calls in replies.


TOOL_SCHEMA: Any = {"$schema": "x", "type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def tool(**more: Any) -> dict[str, Any]:
    return {"name": "f", "description": "d", "input_schema": TOOL_SCHEMA, **more}


def test_the_tools_of_a_body_are_those_of_the_request() -> None:
    hints = {"cache_control": {}, "defer_loading": True, "eager_input_streaming": True, "input_examples": [{}]}
    asked = [tool(type="custom", strict=True), tool(name="g", **hints, allowed_callers=["direct"], description=None)]
    f, g = SamplingParams(**read_tools({"tools": asked})).offered
    assert (f.name, f.description, f.schema, f.strict) == ("f", "d", TOOL_SCHEMA, True)
    assert (g.name, g.description, g.strict) == ("g", "", False)
    bare = {"type": "object", "properties": None, "required": None}
    assert read_tools({"tools": [tool(input_schema=bare)]})["tools"][0].schema == {"type": "object"}
    assert read_tools({}) == read_tools({"tools": []}) == {}


@pytest.mark.parametrize(
    ("choice", "values"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": "f"}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (
            {"type": "any", "disable_parallel_tool_use": False},
            {"tool_choice": "required", "parallel_tool_calls": True},
        ),
    ],
)
def test_a_choice_is_that_of_the_request(choice: dict[str, Any], values: dict[str, Any]) -> None:
    got = read_tools({"tools": [tool()], "tool_choice": choice})
    got.pop("tools")
    assert got == values


@pytest.mark.parametrize(
    ("said", "field", "says"),
    [
        ({"tools": {}}, "tools", "a list"),
        ({"tools": [5]}, "tools[0]", "an object"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "web_search_20250305"),
        ({"tools": [tool(type=5)]}, "tools[0].type", "not served"),
        ({"tools": [tool(), tool(input_schema="x")]}, "tools[1].input_schema", "JSON schema"),
        ({"tools": [tool(input_schema={"type": "string"})]}, "tools[0]", "schema of an object"),
        ({"tools": [tool(name="a b")]}, "tools[0]", "'a b'"),
        ({"tools": [tool(name=None)]}, "tools[0]", "None"),
        ({"tools": [{"name": "f", "inputschema": {}}]}, "tools[0].inputschema", "did you mean 'input_schema'"),
        ({"tools": [tool(strict="yes")]}, "tools[0]", "true or false"),
        ({"tools": [tool(allowed_callers=["code_execution_20250825"])]}, "tools[0].allowed_callers", "direct"),
        ({"tool_choice": "auto"}, "tool_choice", "an object"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type", "no `tools`"),
        ({"tool_choice": {"type": "tool", "name": "none"}}, "tool_choice.name", "one of the `tools`"),
        ({"tool_choice": {"type": "tool", "name": []}}, "tool_choice.name", "one of the `tools`"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name", "type 'tool'"),
        ({"tool_choice": {"type": []}}, "tool_choice.type", "auto, any"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
            "t",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(said: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as raised:
        read_tools(said)
    assert raised.value.field == field


def test_the_input_of_a_call_is_json() -> None:
    assert tool_input(ToolCall("1", "f", '{"a": [1e999, -1e999, 1.5, "x", null]}')) == {
        "a": [1.7976931348623157e308, -1.7976931348623157e308, 1.5, "x", None]
    }
    assert tool_input(ToolCall("1", "f", "")) == {}
    digits = "9" * 5000
    assert json.loads(json.dumps(tool_input(ToolCall("1", "f", f'{{"a": {digits}}}')), allow_nan=False))
    with pytest.raises(CortexError, match="nested too deeply"):
        tool_input(ToolCall("1", "f", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"))


# The events of a streamed message: together they say what the whole message says, however the answer was cut.


STREAM_INFO = ReplyInfo("7", "m", 1_767_225_600, lambda token: chr(token).encode(), seal=SEAL)
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
    chunks = messages.MessageEvents(asked, STREAM_INFO)
    told = [body for event in events(data.draw, answer) for body in chunks.convert(event)]
    for body in told:
        EVENT.validate_python(body)
    whole = messages.write(asked, [[answer]], STREAM_INFO)
    Message.model_validate(whole, strict=True)
    assert gathered(told) == whole


def test_a_text_after_a_call_is_a_block_of_its_own() -> None:
    chunks = messages.MessageEvents(ASKED, STREAM_INFO)
    call = CallDelta(0, "id", "f", "{}")
    answer = Completion(
        "ab", (1,), FinishReason.TOOL_CALLS, Usage(5, 3), TIMES, tool_calls=(ToolCall("id", "f", "{}"),)
    )
    said = [TokenEvent("a"), TokenEvent("", tool_calls=(call,)), TokenEvent("b"), TokenEvent("", completion=answer)]
    blocks = gathered([body for event in said for body in chunks.convert(event)])["content"]
    assert [block.get("text", block.get("name")) for block in blocks] == ["a", "f", "b"]


def test_a_call_that_was_cut_ends_as_max_tokens() -> None:
    chunks = messages.MessageEvents(ASKED, STREAM_INFO)
    answer = Completion("", (1,), FinishReason.LENGTH, Usage(5, 5), TIMES, raw_text="x")
    cut = TokenEvent("", tool_calls=(CallDelta(0, "id", "f", '{"a'),))
    told = [*chunks.convert(cut), *chunks.convert(TokenEvent("", completion=answer))]
    assert told[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert messages.write(ASKED, [[answer]], STREAM_INFO)["content"] == [{"type": "text", "text": ""}]


def test_the_first_event_has_the_tokens_of_the_prompt() -> None:
    informed = replace(STREAM_INFO, progress=lambda: Progress("prefilling", 3, 9, 3))
    [start] = [
        b for b in messages.MessageEvents(ASKED, informed).convert(TokenEvent("")) if b["type"] == "message_start"
    ]
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (6, 3, 0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(KVCacheFull("the cache is full"), "overloaded_error"), (InvalidRequest("no"), "invalid_request_error")],
)
def test_a_request_that_fails_says_so(error: Any, kind: str) -> None:
    chunks = messages.MessageEvents(ASKED, STREAM_INFO)
    told = [*chunks.convert(TokenEvent("a")), *chunks.convert(TokenEvent("", error=error))]
    assert told[-1] == {"type": "error", "error": {"type": kind, "message": str(error)}}
