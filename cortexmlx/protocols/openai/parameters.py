"""The fields that all bodies of the OpenAI API share: sampling, template variables, unserved fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import EFFORT, NO_VARIABLES, THINKING, TemplateVars
from cortexmlx.protocols.fields import Unserved, check_fields, checked, inside
from cortexmlx.protocols.openai import forms, tools
from cortexmlx.sampling_params import SamplingParams

SAMPLING = frozenset(f.name for f in fields(SamplingParams)) - {"logits_processors", "structured"} - tools.FIELDS
"""The sampling parameters that a body may set under their own names. `forms` has the fields for the form of an answer,
and `tools` those for what it may call.
"""

ALIASES = {"temp": "temperature", "max_completion_tokens": "max_tokens"}
"""Other names of parameters. If a body has both names, `max_completion_tokens` wins, as in the OpenAI API."""

TEMPLATE = (EFFORT, "chat_template_kwargs")
"""The fields that set variables of the chat template. A prompt that does not go through it must not have them."""

SHARED = SAMPLING | ALIASES.keys() | set(TEMPLATE) | forms.FIELDS
"""The fields that every protocol but responses serves."""

STREAM = frozenset({"stream", "stream_options"})
"""The fields that ask for a stream of chunks. A caller that answers in one piece refuses them: see `Defaults.unserved`.
"""

NO_EFFECT = frozenset(
    {
        "metadata",
        "model",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that change no answer: the engine has one model, keeps nothing, and caches every prefix."""

_FUNCTIONS = "it is the old form of `tools` and `tool_choice`, so use these"
_UNTOLD = "a chat template tells a model about tools, and this prompt does not go through it: use messages"
_ANSWERS_IN_TEXT = "the model writes text only"

UNSERVED: Mapping[str, Unserved] = {
    "functions": Unserved(_FUNCTIONS, ([],)),
    "function_call": Unserved(_FUNCTIONS, ("none", "auto")),
    "modalities": Unserved(_ANSWERS_IN_TEXT, (["text"],)),
    "audio": Unserved(_ANSWERS_IN_TEXT),
    "web_search_options": Unserved("nothing is searched"),
    "moderation": Unserved("nothing is moderated"),
    "verbosity": Unserved("a model's answers have the length that they have", ("medium",)),
    "suffix": Unserved("a text is continued at its end only", ("",)),
    "logits_processors": Unserved("they are functions, which a file cannot hold", ([],)),
}
"""The unserved fields of every protocol. Responses have more of them."""


TOOLLESS: Mapping[str, Unserved] = {
    "tools": Unserved(_UNTOLD, ([],)),
    "tool_choice": Unserved(_UNTOLD, ("none", "auto")),
    "parallel_tool_calls": Unserved(_UNTOLD, (True, False)),
}
"""The unserved fields of a protocol without messages."""


def sampling_values(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that a body sets, by their own names. Raises InvalidRequest."""
    values = {name: value for name, value in said.items() if name in SAMPLING}
    for alias, name in ALIASES.items():
        if alias in said:
            if alias != "max_completion_tokens" and name in values:
                raise InvalidRequest(f"there are both {alias!r} and {name!r}: give one of them", field=alias)
            values[name] = said[alias]
    values |= forms.form_values(said)
    return values | {name: convert(values[name]) for name, convert in _CONVERT.items() if name in values}


def sampling_params(defaults: SamplingParams, values: Mapping[str, Any], said: Mapping[str, Any]) -> SamplingParams:
    """Return the defaults with these values. Raises InvalidRequest with the name that the body `said` has for the
    field.
    """
    try:
        return replace(defaults, **values)
    except InvalidRequest as error:
        names = (alias for alias, name in _OTHER_NAMES if name == error.field and alias in said)
        error.field = next(names, error.field)
        raise


def template_variables(
    said: Mapping[str, Any], usual: TemplateVars, *, templated: bool = True, effort: object = None
) -> TemplateVars:
    """Return the variables of the chat template: those that a body sets, and the `usual` ones that it does not set.

    A prompt that is not `templated` has no variables. `effort` is the degree of thinking, if the protocol has a field
    of its own for it. Raises InvalidRequest.
    """
    body = {EFFORT: effort, **said}
    own = body_variables(body)
    if own and not templated:
        message = f"{', '.join(own)}: set for a chat template, which this prompt does not go through"
        raise InvalidRequest(message, field=next(name for name in TEMPLATE if body.get(name) is not None))
    return body_variables(body, usual) if templated else NO_VARIABLES


def body_variables(body: Mapping[str, object], usual: TemplateVars = NO_VARIABLES) -> dict[str, object]:
    """Return the variables that a body sets, on top of the `usual` ones. vLLM's `chat_template_kwargs` wins over
    OpenAI's `reasoning_effort`. Null sets nothing. Raises InvalidRequest.
    """
    if (effort := body.get(EFFORT)) is not None:
        checked(EFFORT, effort, str, "a text like 'low'")
    variables = checked("chat_template_kwargs", body.get("chat_template_kwargs") or {}, dict, "an object")
    own = ({} if effort is None else {EFFORT: effort}) | {k: v for k, v in variables.items() if v is not None}
    return {name: value for name, value in usual.items() if name != THINKING or own.get(EFFORT) != "none"} | own


def alternatives(said: Mapping[str, Any], asked: bool, how: str, usual: int | None) -> Any:
    """Return the number of likely tokens to report at each place, or `usual` if the body did not ask. `how` switches
    them on. Raises InvalidRequest for `top_logprobs` in a body that does not switch them on.
    """
    top = said.get("top_logprobs", 0)
    if not asked and top:
        raise InvalidRequest(f"top_logprobs needs {how}", field="top_logprobs")
    return top if asked else usual


def flag(said: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true or false. A missing field is false. Raises InvalidRequest."""
    return checked(name, said.get(name, False), bool, "true or false")


def stream_of(said: Mapping[str, Any], params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a `Request` that ask for a stream and for its usage. Raises InvalidRequest."""
    stream = flag(said, "stream")
    options = checked("stream_options", said.get("stream_options", {}), dict, "an object")
    with inside("stream_options"):
        check_fields(options, ("include_usage", "include_obfuscation"), "`stream_options`")
        include_usage = flag({k: v for k, v in options.items() if v is not None}, "include_usage")
    if options and not stream:
        raise InvalidRequest('stream_options needs "stream": true', field="stream_options")
    if stream and params.prompt_logprobs is not None:
        raise InvalidRequest("a stream has no log-probabilities of the prompt: ask without `stream`", field="stream")
    return {"stream": stream, "include_usage": include_usage}


def _stops(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _biases(value: Any) -> dict[int, Any]:
    try:
        return {int(token): bias for token, bias in value.items()}
    except (AttributeError, ValueError):
        message = f"logit_bias is {value!r:.80}, but must be an object from token ids to numbers"
        raise InvalidRequest(message, field="logit_bias") from None


_CONVERT: dict[str, Callable[[Any], Any]] = {"stop": _stops, "logit_bias": _biases}
_OTHER_NAMES = (
    *ALIASES.items(),
    ("max_output_tokens", "max_tokens"),
    ("top_logprobs", "logprobs"),
    ("stop_sequences", "stop"),
)
"""Pairs of a name that a body may use and the parameter that an error names."""
