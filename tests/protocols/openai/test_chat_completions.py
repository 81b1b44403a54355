"""The body of a chat completion, as a request of the engine: what it asks for, and the path of what is wrong in it."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.openai.chat_completions import read
from cortexmlx.protocols.request import Defaults
from cortexmlx.types.messages import EFFORT
from cortexmlx.types.sampling_params import SamplingParams

USER = {"role": "user", "content": "hi"}
DEFAULTS = Defaults(SamplingParams(max_tokens=99), {"a": 1})


def asked(**body: Any) -> Any:
    return read({"messages": [USER], **body}, DEFAULTS)


def test_a_body_becomes_a_request_with_the_defaults_of_who_serves_it() -> None:
    request = asked(n=2, stop="x", logprobs=True, top_logprobs=3, reasoning_effort="low", user="me")
    assert request.prompts == ([USER],) and not request.raw and not request.echo
    assert request.params == SamplingParams(max_tokens=99, n=2, stop=("x",), logprobs=3)
    assert request.template_vars == {"a": 1, EFFORT: "low"}
    assert request.body["user"] == "me"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, (False, False)),
        ({"stream": None, "stream_options": None}, (False, False)),
        ({"stream": True}, (True, False)),
        ({"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}, (True, True)),
        ({"stream": True, "stream_options": {"include_usage": None}}, (True, False)),
    ],
)
def test_a_stream_is_asked_for_with_or_without_its_usage(body: dict[str, Any], wanted: tuple[bool, bool]) -> None:
    request = asked(**body)
    assert (request.stream, request.include_usage) == wanted


CALL = {"function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, "hi"]}, "messages[1]"),
        ({"messages": [USER, {"content": "hi"}]}, "messages[1].role"),
        ({"messages": [{**USER, "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [USER], "tools": [{}]}, "tools[0]"),
        ({"messages": [USER], "tools": {}}, "tools"),
        ({"messages": [USER], "tool_choice": "f"}, "tool_choice"),
        ({"messages": [USER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": [USER], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"temperatur": 1}, "temperatur"),
        ({"temperature": -1}, "temperature"),
        ({"temp": 1, "temperature": 1}, "temp"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a" * 9] * 2000}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 500}, "top_logprobs"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"stream": True, "prompt_logprobs": 1}, "stream"),
    ],
)
def test_an_error_names_the_field_with_its_path(body: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(**body)
    assert refused.value.field is not None and refused.value.field.endswith(path)
    assert refused.value.field.partition("[")[0].partition(".")[0] in {*body}
