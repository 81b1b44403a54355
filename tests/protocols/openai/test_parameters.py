"""The parameters of a line: what it says before what the command line says."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.batch import PROTOCOLS, Style
from cortexmlx.protocols.openai.parameters import body_variables, usual_variables
from cortexmlx.protocols.request import Defaults
from cortexmlx.protocols.responses import LOGPROBS
from cortexmlx.types.sampling_params import SamplingParams

DEFAULTS = SamplingParams(max_tokens=99, temperature=0.5)
ASKED: dict[Style, dict[str, Any]] = {
    Style.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    Style.COMPLETIONS: {"prompt": "hi"},
    Style.RESPONSES: {"input": "hi"},
    Style.SIMPLE: {"prompt": "hi"},
}


def params_of(said: dict[str, Any], style: Style) -> SamplingParams:
    return PROTOCOLS[style].read({**ASKED[style], **said}, Defaults(DEFAULTS)).params


@pytest.mark.parametrize(
    ("said", "style", "changed"),
    [
        ({}, Style.CHAT, {}),
        ({"max_tokens": 3, "max_completion_tokens": 5}, Style.CHAT, {"max_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 3}, Style.SIMPLE, {"max_tokens": 5}),
        (
            {"temp": 0.1, "stop": "x", "logit_bias": {"4": 1}},
            Style.SIMPLE,
            {"temperature": 0.1, "stop": ("x",), "logit_bias": {4: 1}},
        ),
        ({"logprobs": True, "top_logprobs": 4}, Style.CHAT, {"logprobs": 4}),
        ({"logprobs": True}, Style.CHAT, {"logprobs": 0}),
        ({"logprobs": False, "top_logprobs": 0}, Style.CHAT, {}),
        ({"logprobs": 4}, Style.COMPLETIONS, {"logprobs": 4}),
        ({"max_output_tokens": 5}, Style.RESPONSES, {"max_tokens": 5}),
        ({"include": [LOGPROBS], "top_logprobs": 2}, Style.RESPONSES, {"logprobs": 2}),
    ],
)
def test_what_a_line_says_goes_before_the_defaults(said: dict[str, Any], style: Style, changed: dict[str, Any]) -> None:
    expected = SamplingParams(**{"max_tokens": 99, "temperature": 0.5, **changed})
    assert params_of(said, style) == expected


@pytest.mark.parametrize(
    ("said", "style", "says"),
    [
        ({"logprobs": 2}, Style.CHAT, "logprobs is 2, but must be true or false: the number is `top_logprobs`"),
        ({"top_logprobs": 2}, Style.CHAT, 'top_logprobs needs "logprobs": true'),
        ({"top_logprobs": 2}, Style.RESPONSES, f'top_logprobs needs "include": ["{LOGPROBS}"]'),
        ({"include": ["reasoning.encrypted_content"]}, Style.RESPONSES, "but only"),
        ({"include": 1}, Style.RESPONSES, "include is 1, but must be a list"),
        ({"temp": 1, "temperature": 2}, Style.SIMPLE, "there are both 'temp' and 'temperature'"),
        ({"logprobs": True}, Style.COMPLETIONS, "logprobs is True"),
        ({"logit_bias": {"a": 1}}, Style.CHAT, "but must be an object from token ids to numbers"),
    ],
)
def test_what_cannot_be_meant_is_refused(said: dict[str, Any], style: Style, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        params_of(said, style)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, {}),
        ({"reasoning_effort": None, "chat_template_kwargs": None}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high", "a": None}},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_a_body_asks_for_variables_as_vllms_or_openais(body: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert body_variables(body) == wanted


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, {"enable_thinking": True, "a": 1}),
        ({"chat_template_kwargs": {"a": None}}, {"enable_thinking": True, "a": 1}),
        ({"chat_template_kwargs": {"a": 2}}, {"enable_thinking": True, "a": 2}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False, "a": 1}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "a": 1, "reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"a": 1, "reasoning_effort": "none"}),
    ],
)
def test_what_a_body_says_goes_over_what_is_usual(body: dict[str, Any], wanted: dict[str, Any]) -> None:
    """No effort is a switch, too, which a usual one must not turn back."""
    assert usual_variables(body_variables(body), {"enable_thinking": True, "a": 1}) == wanted
