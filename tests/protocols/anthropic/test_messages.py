"""Bodies of `/v1/messages`: what they ask for, what they are refused, and what replies say."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import Message

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.request import Defaults, ReplyInfo, Request
from cortexmlx.protocols.seal import Seal
from cortexmlx.types.request import Completion, FinishReason, Timings, Usage
from cortexmlx.types.sampling_params import SamplingParams

DEFAULTS = Defaults(SamplingParams(max_tokens=None, temperature=0.5))
THINKS = Defaults(SamplingParams(), {"enable_thinking": False, "other": 1})
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
SEAL = Seal(b"s", "ann")
INFO = ReplyInfo("7", "m", 1, lambda token: b"", seal=SEAL)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **more}


def read(defaults: Defaults = DEFAULTS, **more: Any) -> Request:
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
    assert messages.read_prompt({"messages": body()["messages"]}, DEFAULTS).prompts == read().prompts


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
        back = messages.read(body(messages=turns), Defaults(SamplingParams(), seal=SEAL)).prompts[0]
        assert isinstance(back[1], dict) and back[1]["reasoning_content"] == "hmm"


def test_an_answer_without_a_word_is_an_empty_text() -> None:
    assert messages.write(read(), [[answer(text="")]], INFO)["content"] == [{"type": "text", "text": ""}]
    only = messages.write(read(), [[answer(text="", thinking="hmm")]], INFO)["content"]
    assert [block["type"] for block in only] == ["thinking"]
