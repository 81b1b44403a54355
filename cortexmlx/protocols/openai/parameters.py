"""The fields that the bodies of the OpenAI API share: sampling, the form of an answer, tools, template variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.error_text import note
from cortexmlx.protocols.fields import FORMS, RENAMED, Unserved, check_fields, checked, inside
from cortexmlx.protocols.history import known_fields, mend_tool
from cortexmlx.protocols.request import Defaults
from cortexmlx.structured.output import VLLM_OPTIONS, StructuredOutput
from cortexmlx.structured.tools import Tool
from cortexmlx.types.messages import EFFORT, NO_VARIABLES, THINKING, TemplateVars, meant
from cortexmlx.types.sampling_params import SamplingParams

FORM_FIELDS = frozenset({"response_format", "structured_outputs", *FORMS})
"""The fields of a body that ask for a form."""

TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
"""The fields of a body that offer tools."""

SAMPLING = frozenset(f.name for f in fields(SamplingParams)) - {"logits_processors", "structured"} - TOOL_FIELDS
"""The sampling parameters that a body may set under their own names. FORM_FIELDS has those for the form of an answer,
and TOOL_FIELDS those for what it may call.
"""

ALIASES = {"temp": "temperature", "max_completion_tokens": "max_tokens", **RENAMED}
"""Other names of parameters. If a body has both names, `max_completion_tokens` wins, as in the OpenAI API."""

UNENFORCED = frozenset({"min_tokens", "skip_special_tokens"})
"""Fields of vLLM that are served where that is what happens anyway. Otherwise a note says that they are not."""

CHOICES = frozenset({"return_token_ids"})
"""vLLM's fields of a reply with choices."""

TEMPLATE = (EFFORT, "chat_template_kwargs")
"""The fields that set variables of the chat template. A prompt that does not go through it must not have them."""

SHARED = SAMPLING | ALIASES.keys() | UNENFORCED | set(TEMPLATE) | FORM_FIELDS
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
        if alias in said and name in SAMPLING:
            if alias != "max_completion_tokens" and name in values:
                raise InvalidRequest(f"there are both {alias!r} and {name!r}: give one of them", field=alias)
            values[name] = said[alias]
    values |= form_values(said) | _unenforced(said, values)
    return values | {name: convert(values[name]) for name, convert in _CONVERT.items() if name in values}


def _unenforced(said: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the fields in UNENFORCED set. Raises InvalidRequest."""
    least, most = said.get("min_tokens", said.get("min_new_tokens", 0)), values.get("max_tokens")
    if type(least) is not int or least < 0:
        raise InvalidRequest(f"min_tokens is {least!r:.80}, but must be an integer from 0", field="min_tokens")
    if not checked("skip_special_tokens", said.get("skip_special_tokens", True), bool, "true or false"):
        note("skip_special_tokens", "skip_special_tokens is not enforced: an answer's text has no special tokens")
    if type(most) is int and 0 < most <= least:
        return {"ignore_eos": True}
    if least:
        note("min_tokens", "min_tokens is not enforced, unless it is max_tokens")
    return {}


def sampling_params(defaults: SamplingParams, values: Mapping[str, Any], said: Mapping[str, Any]) -> SamplingParams:
    """Return the defaults with these values, where -1 means no limit, as in vLLM and llama.cpp. Raises InvalidRequest
    with the name that the body `said` has for the field.
    """
    limits = {name: least for name, least in _NO_LIMIT.items() if type(values.get(name)) is int and values[name] == -1}
    stops = {"stop": [each for each in values["stop"] if each != ""]} if isinstance(values.get("stop"), list) else {}
    try:
        return replace(defaults, **{**values, **limits, **stops})
    except InvalidRequest as error:
        names = (alias for alias, name in _OTHER_NAMES if name == error.field and alias in said)
        error.field = next(names, error.field)
        raise


def template_variables(
    said: Mapping[str, Any], defaults: Defaults, *, templated: bool = True, more: TemplateVars = NO_VARIABLES
) -> TemplateVars:
    """Return the variables of the chat template: those that a body sets, and the usual ones that it does not set.

    A prompt that is not `templated` has no variables. `more` are those that the protocol has fields of its own for.
    Clients send them to every model, so a variable that the template is known not to read is left out, and noted.
    Raises InvalidRequest.
    """
    own = body_variables(said)
    if own and not templated:
        message = f"{', '.join(own)}: set for a chat template, which this prompt does not go through"
        raise InvalidRequest(message, field=next(name for name in TEMPLATE if said.get(name) is not None))
    own, known = {**more, **own}, defaults.known_vars
    if known is not None:
        for name, other in ((THINKING, "thinking"), ("thinking", THINKING)):
            if name in own and name not in known and other in known:
                own.setdefault(other, own.pop(name))
        switched = not known.isdisjoint({THINKING, "thinking"})
        unread = own.keys() - known - ({EFFORT} if switched and own.get(EFFORT) == "none" else set())
        for name in sorted(unread):
            near = meant(name[:80], known)
            note("template variables", f"the model's chat template does not read {name[:80]!r}, so it is ignored{near}")
        own = {name: value for name, value in own.items() if name not in unread}
    return usual_variables(own, defaults.template_vars) if templated else NO_VARIABLES


def body_variables(body: Mapping[str, object]) -> dict[str, object]:
    """Return the variables that a body sets. vLLM's `chat_template_kwargs` wins over OpenAI's `reasoning_effort`. Null
    sets nothing. Raises InvalidRequest.
    """
    if (effort := body.get(EFFORT)) is not None:
        checked(EFFORT, effort, str, "a text like 'low'")
    variables = checked("chat_template_kwargs", body.get("chat_template_kwargs") or {}, dict, "an object")
    return ({} if effort is None else {EFFORT: effort}) | {k: v for k, v in variables.items() if v is not None}


def usual_variables(own: TemplateVars, usual: TemplateVars) -> dict[str, object]:
    """Return a body's own variables on top of the `usual` ones. No effort switches thoughts off, whatever is usual."""
    return {name: value for name, value in usual.items() if name != THINKING or own.get(EFFORT) != "none"} | {**own}


def thinking_of(said: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, object]]:
    """Return the sampling parameters and the template's variables that other servers' fields for thoughts set:
    OpenRouter's `reasoning`, DeepSeek's and GLM's `thinking`, Qwen's `enable_thinking`. Raises InvalidRequest.
    """
    values: dict[str, Any] = {}
    variables: dict[str, object] = {}
    if "enable_thinking" in said:
        variables[THINKING] = flag(said, "enable_thinking")
    if isinstance(thinking := said.get("thinking"), bool):
        variables[THINKING] = thinking
    elif thinking is not None:
        with inside("thinking"):
            kind = checked("thinking", thinking, dict, "an object with a `type`").get("type")
            if kind not in ("enabled", "disabled", "adaptive", "auto"):
                raise InvalidRequest(f"type is {kind!r:.80}, but must be enabled or disabled", field="type")
            if kind in ("enabled", "disabled"):
                variables[THINKING] = kind == "enabled"
            if thinking.get("budget_tokens") is not None:
                values["max_thinking_tokens"] = thinking["budget_tokens"]
    with inside("reasoning"):
        reasoning = checked("reasoning", said.get("reasoning", {}), dict, "an object")
        given = {name: part for name, part in reasoning.items() if part is not None}
        check_fields(given, _REASONING, "`reasoning`")
        if "enabled" in given:
            variables[THINKING] = flag(given, "enabled")
        if "effort" in given:
            variables[EFFORT] = checked("effort", given["effort"], str, "a text like 'low'")
        if "max_tokens" in given:
            values["max_thinking_tokens"] = given["max_tokens"]
    return values, variables


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
        check_fields(options, ("include_usage", "include_obfuscation", _SO_FAR), "`stream_options`")
        given = {name: value for name, value in options.items() if value is not None}
        include_usage, so_far = flag(given, "include_usage"), flag(given, _SO_FAR)
    if options and not stream:
        raise InvalidRequest('stream_options needs "stream": true', field="stream_options")
    if stream and params.prompt_logprobs is not None:
        raise InvalidRequest("a stream has no log-probabilities of the prompt: ask without `stream`", field="stream")
    return {"stream": stream, "include_usage": include_usage, "usage_so_far": include_usage and so_far}


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> dict[int, Any]:
    try:
        return {int(token): bias for token, bias in value.items()}
    except (AttributeError, ValueError):
        message = f"logit_bias is {value!r:.80}, but must be an object from token ids to numbers"
        raise InvalidRequest(message, field="logit_bias") from None


_REASONING = ("effort", "enabled", "exclude", "generate_summary", "max_tokens", "summary")
_SO_FAR = "continuous_usage_stats"
_NO_LIMIT: Mapping[str, int | None] = {"top_k": 0, "max_tokens": None, "max_thinking_tokens": None}
_CONVERT: dict[str, Callable[[Any], Any]] = {"stop": _stops, "logit_bias": _biases}
_OTHER_NAMES = (
    *ALIASES.items(),
    ("max_output_tokens", "max_tokens"),
    ("top_logprobs", "logprobs"),
    ("stop_sequences", "stop"),
)
"""Pairs of a name that a body may use and the parameter that an error names."""


# The form of an answer: OpenAI's `response_format` and `text.format`, and vLLM's `structured_outputs`.


_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def form_values(said: Mapping[str, Any]) -> dict[str, StructuredOutput | None]:
    """Return `structured` as a body sets it, or nothing if the body does not set it. Raises InvalidRequest."""
    asked = [name for name in sorted(FORM_FIELDS) if name in said]
    if len(asked) > 1:
        raise InvalidRequest(f"there are both {asked[0]!r} and {asked[1]!r}: give one of them", field=asked[1])
    if not asked:
        return {}
    (name,) = asked
    if name in FORMS:
        return {"structured": _located(StructuredOutput.named, {FORMS[name]: said[name]}, name)}
    value = checked(name, said[name], dict, "an object")
    with inside(name):
        return {"structured": _vllm_form(value) if name == "structured_outputs" else response_format(value)}


def response_format(value: Mapping[str, Any]) -> StructuredOutput | None:
    """Return the form in a `response_format`, or None if it asks for plain text. Raises InvalidRequest."""
    kind = value.get("type")
    if kind in ("json_object", "json_schema") and value.get("schema") is not None:  # as llama.cpp has it
        check_fields(value, ("type", "schema"), "`response_format`")
        return json_schema({"schema": value["schema"]})
    if kind in ("text", "json_object"):
        check_fields(value, ("type",), "`response_format`")
        return None if kind == "text" else StructuredOutput.json()
    if kind != "json_schema":
        raise InvalidRequest(f"type is {kind!r:.80}, but must be text, json_object or json_schema", field="type")
    check_fields(value, ("type", "json_schema"), "`response_format`")
    named = checked("json_schema", value.get("json_schema"), dict, "an object with a `schema`")
    with inside("json_schema"):
        return json_schema(named)


def text_format(value: Mapping[str, Any]) -> StructuredOutput | None:
    """Return the form in the `format` of responses. There the fields of a schema are beside its type, not in an
    object.
    """
    if value.get("type") != "json_schema":
        return response_format(value)
    return json_schema({name: part for name, part in value.items() if name != "type"})


def json_schema(value: Mapping[str, Any]) -> StructuredOutput:
    """Return the form of a schema with its `name`. Keywords that cannot be enforced are ignored only if `strict` is
    false. A missing `strict` counts as true, and such a schema is refused.
    """
    check_fields(value, _SCHEMA_FIELDS, "`json_schema`")
    strict = checked("strict", True if value.get("strict") is None else value["strict"], bool, "true or false")
    if not isinstance(value.get("schema"), Mapping | bool):
        raise InvalidRequest("`schema` must be a JSON schema: an object", field="schema")
    return _located(lambda schema: StructuredOutput.json(schema, lenient=not strict), value["schema"], "schema")


def _vllm_form(value: Mapping[str, Any]) -> StructuredOutput:
    options = ("lenient", *VLLM_OPTIONS.values())
    for name in options:
        checked(name, False if value.get(name) is None else value[name], bool, "true or false")
    names = [name for name, part in value.items() if name not in options and part is not None]
    return _located(StructuredOutput.named, value, names[0] if len(names) == 1 else None)


def _located(make: Callable[[Any], StructuredOutput], value: Any, name: str | None) -> StructuredOutput:
    """Return `make(value)`. An InvalidRequest gets the name that the body has for the field."""
    try:
        return make(value)
    except InvalidRequest as error:
        error.field = name
        raise


# What an answer may call: `tools` and `tool_choice`.


_FUNCTION = ("name", "description", "parameters", "strict")


def tool_values(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that offer tools, as a body sets them. Raises InvalidRequest."""
    values: dict[str, Any] = {}
    if "tools" in said:
        listed = checked("tools", said["tools"], list, "a list of tools")
        tools = []
        for place, tool in enumerate(listed):
            with inside(f"tools[{place}]"):
                tools.append(_tool(tool))
        values["tools"] = tools
    if "tool_choice" in said:
        values["tool_choice"] = _choice(said["tool_choice"])
    if "parallel_tool_calls" in said:
        values["parallel_tool_calls"] = said["parallel_tool_calls"]
    return values


def _tool(tool: object) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"a tool is {tool!r:.80}, but must be an object with `type` and `function`")
    said = known_fields(mend_tool(tool), ("type", "function"), "a tool", ("function",))
    if isinstance(function := said.get("function"), Mapping):
        said["function"] = known_fields(function, _FUNCTION, "a tool's function", _FUNCTION)
    try:
        return Tool.of(said)
    except InvalidRequest as error:
        error.field = None
        raise


def _choice(choice: object) -> object:
    """Return a `tool_choice` as a text: a function's name for an object that names it."""
    if not isinstance(choice, Mapping):
        return choice
    named = choice.get("function")
    if choice.get("type") != "function" or not isinstance(named, Mapping) or not isinstance(named.get("name"), str):
        example = '{"type": "function", "function": {"name": ...}}'
        raise InvalidRequest(
            f"tool_choice is {dict(choice)!r:.80}, but must be auto, none, required or {example}", field="tool_choice"
        )
    return named["name"]
