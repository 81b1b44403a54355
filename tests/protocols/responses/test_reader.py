"""What is read of a body of responses, and which hints have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols import responses
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.protocols.responses.reader import response_details
from cortexmlx.protocols.seal import Seal
from cortexmlx.types.sampling_params import SamplingParams

USER = {"role": "user", "content": "hi"}


def prompts_of(said: dict[str, Any]) -> Any:
    return responses.read(said, RequestDefaults(SamplingParams())).prompts


@pytest.mark.parametrize("input_", ["hi", [USER], [{"type": "message", **USER, "id": "m", "status": "completed"}]])
def test_the_input_of_a_response_is_a_text_or_messages(input_: Any) -> None:
    assert prompts_of({"input": input_}) == ([USER],)
    system = {"role": "system", "content": "Be brief."}
    assert prompts_of({"input": input_, "instructions": "Be brief."}) == ([system, USER],)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"input": ""}, "input"),
        ({"input": [USER, {"type": "function_call_output"}]}, "input[1].call_id"),
        ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools[0]"),
        ({"input": "a", "tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
        ({"input": "a", "include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "truncation": "end"}, "truncation"),
        ({"input": "a", "instructions": 3}, "instructions"),
        ({"input": "a", "include": [responses.LOGPROBS, "x"]}, "include[1]"),
        ({"input": "a", "reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"input": "a", "reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"input": "a", "reasoning": {"budget": 3}}, "reasoning.budget"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "metadata": {"run": 7}}, "metadata"),
    ],
)
def test_an_error_names_the_field_with_its_path(body: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        responses.read(body, RequestDefaults(SamplingParams()))
    assert refused.value.field == path


HINTS: dict[str, Any] = {
    "client_metadata": {"session": "a"},
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "service_tier": "flex",
    "user": "u",
    "truncation": "auto",
    "background": False,
    "text": {"verbosity": "low"},
    "reasoning": {"summary": "auto", "generate_summary": None},
    "include": ["web_search_call.action.sources"],
}


def test_hints_change_nothing_of_what_is_asked() -> None:
    plain = responses.read({"input": "hi"}, RequestDefaults(SamplingParams()))
    hinted = responses.read({"input": "hi", **HINTS}, RequestDefaults(SamplingParams()))
    assert (hinted.prompts, hinted.params, hinted.template_vars) == (plain.prompts, plain.params, plain.template_vars)


@pytest.mark.parametrize(
    ("known", "effort", "read"),
    [
        (None, "low", {"reasoning_effort": "low"}),
        (frozenset({"reasoning_effort"}), "low", {"reasoning_effort": "low"}),
        (frozenset({"enable_thinking"}), "low", {}),
        (frozenset({"enable_thinking"}), "none", {"reasoning_effort": "none"}),
        (frozenset(), "none", {}),
    ],
)
def test_an_effort_is_left_out_where_the_template_knows_none(known: Any, effort: str, read: Any) -> None:
    defaults = RequestDefaults(SamplingParams(), known_vars=known)
    assert responses.read({"input": "hi", "reasoning": {"effort": effort}}, defaults).template_vars == read


def test_sealed_thoughts_are_asked_for_where_there_is_a_seal() -> None:
    asked = {"input": "hi", "include": [responses.ENCRYPTED]}
    assert response_details(
        responses.read(asked, RequestDefaults(SamplingParams(), seal=Seal(b"s", "a")))
    ).seal_thoughts
