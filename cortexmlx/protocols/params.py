"""The sampling parameters of a line: the command line's, and what the body says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import EFFORT, NO_VARIABLES, THINKING, TemplateVars
from cortexmlx.protocols.fields import ALIASES, SAMPLING, check_fields
from cortexmlx.protocols.request import Asked, Style
from cortexmlx.request import SamplingParams

LOGPROBS = "message.output_text.logprobs"
"""What a response's `include` may ask for."""


def params_of(said: Mapping[str, Any], style: Style, defaults: SamplingParams, echo: bool) -> SamplingParams:
    """The defaults with what the body says. What is to echo has its log-probabilities, too, if any were asked for."""
    values = {name: value for name, value in said.items() if name in SAMPLING}
    for alias, name in ALIASES.items():
        if alias in said:
            if alias != "max_completion_tokens" and name in values:
                raise InvalidRequest(f"there are both {alias!r} and {name!r}: give one of them")
            values[name] = said[alias]
    for name, convert in _CONVERT.items():
        if name in values:
            values[name] = convert(values[name])
    if style in (Style.CHAT, Style.RESPONSES):
        values["logprobs"] = _alternatives(said, style, defaults)
    if style is Style.RESPONSES and "max_output_tokens" in said:
        values["max_tokens"] = said["max_output_tokens"]
    if echo and values.get("logprobs") is not None:
        values.setdefault("prompt_logprobs", values["logprobs"])
    return replace(defaults, **values)


def echo_of(said: Mapping[str, Any]) -> bool:
    """Whether the answer's text is to begin with the prompt."""
    echo = said.get("echo", False)
    if not isinstance(echo, bool):
        raise InvalidRequest(f"echo is {echo!r}, but must be true or false")
    return echo


def variables_of(said: Mapping[str, Any], prompts: Sequence[Asked], usual: TemplateVars, *, raw: bool) -> TemplateVars:
    """The chat template's variables: the `usual` ones with those that the body sets. A response has the degree of
    thinking in `reasoning`.
    """
    reasoning = said.get("reasoning", {})
    if not isinstance(reasoning, Mapping):
        raise InvalidRequest(f"reasoning is {reasoning!r}, but must be an object")
    check_fields([name for name in reasoning if reasoning[name] is not None], ("effort",), "`reasoning`")
    body = {"reasoning_effort": reasoning.get("effort"), **said}
    own = body_vars(body)
    templated = all(not raw if isinstance(asked, str) else isinstance(asked[0], dict) for asked in prompts)
    if own and not templated:
        raise InvalidRequest(f"{', '.join(own)}: set for a chat template, which this prompt does not go through")
    return body_vars(body, usual) if templated else NO_VARIABLES


def body_vars(body: Mapping[str, object], usual: TemplateVars = NO_VARIABLES) -> dict[str, object]:
    """The template's variables that the body of a request asks for: vLLM's `chat_template_kwargs` and OpenAI's
    `reasoning_effort`, over which the former go; null asks for nothing. Both go over the `usual` ones. Raises
    InvalidRequest for what is none.
    """
    effort, variables = body.get(EFFORT), body.get("chat_template_kwargs") or {}
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest(f"{EFFORT} is {effort!r:.80}, but must be a text like 'low'")
    if not isinstance(variables, Mapping):
        raise InvalidRequest(f"chat_template_kwargs is {variables!r:.80}, but must be an object")
    own = ({} if effort is None else {EFFORT: effort}) | {k: v for k, v in variables.items() if v is not None}
    return {name: value for name, value in usual.items() if name != THINKING or own.get(EFFORT) != "none"} | own


def _alternatives(said: Mapping[str, Any], style: Style, defaults: SamplingParams) -> Any:
    """How many likely tokens to report: chats and responses switch it on and have the number in `top_logprobs`."""
    top = said.get("top_logprobs", 0)
    if style is Style.CHAT:
        asked, how = said.get("logprobs", False), '"logprobs": true'
        if not isinstance(asked, bool):
            raise InvalidRequest(f"logprobs is {asked!r}, but must be true or false: the number is `top_logprobs`")
    else:
        include, how = said.get("include", []), f'"include": ["{LOGPROBS}"]'
        if not isinstance(include, list):
            raise InvalidRequest(f"include is {include!r}, but must be a list")
        for name in include:
            if name != LOGPROBS:
                raise InvalidRequest(f"include has {name!r}, but only {LOGPROBS!r} is served")
        asked = bool(include)
    if not asked and top:
        raise InvalidRequest(f"top_logprobs needs {how}")
    return top if asked else defaults.logprobs


def _stops(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _biases(value: Any) -> dict[int, Any]:
    try:
        return {int(token): bias for token, bias in value.items()}
    except (AttributeError, ValueError):
        raise InvalidRequest(f"logit_bias is {value!r}, but must be an object from token ids to numbers") from None


_CONVERT: dict[str, Callable[[Any], Any]] = {"stop": _stops, "logit_bias": _biases}
