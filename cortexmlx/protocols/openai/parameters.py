"""Body fields that the protocols share: sampling, structured output, tools, streaming, and variables of the chat
template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.error_text import add_note
from cortexmlx.protocols.fields import (
    PEER_ALIASES,
    PEER_FORMATS,
    UnservedField,
    prefix_error_field,
    reject_unknown_fields,
    require_type,
)
from cortexmlx.protocols.history import pick_known_fields, sanitize_tool
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.structured.output import VLLM_OPTIONS, StructuredOutput
from cortexmlx.structured.tools import Tool
from cortexmlx.types.messages import EFFORT, NO_VARIABLES, THINKING, TemplateVars, suggest_name
from cortexmlx.types.sampling_params import SamplingParams

FORM_FIELDS = frozenset({"response_format", "structured_outputs", *PEER_FORMATS})
"""The fields of a body that ask for a form."""

TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
"""The fields of a body that offer tools."""

SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams)) - {"logits_processors", "structured"} - TOOL_FIELDS
"""The sampling parameters that a body may set under their own names. FORM_FIELDS has those for the form of an answer,
and TOOL_FIELDS those for what it may call.
"""

ALIASES = {"temp": "temperature", "max_completion_tokens": "max_tokens", **PEER_ALIASES}
"""Other names of parameters. If a body has both names, `max_completion_tokens` wins, as in the OpenAI API."""

UNENFORCED_FIELDS = frozenset({"min_tokens", "skip_special_tokens"})
"""Fields of vLLM that are served where they have a meaning here. Otherwise they are refused, or a note says so."""

CHOICE_FIELDS = frozenset({"return_token_ids"})
"""vLLM's fields of a reply with choices."""

TEMPLATE_FIELDS = (EFFORT, "chat_template_kwargs")
"""The fields that set variables of the chat template. A prompt that does not go through it must not have them."""

SHARED_FIELDS = SAMPLING_FIELDS | ALIASES.keys() | UNENFORCED_FIELDS | set(TEMPLATE_FIELDS) | FORM_FIELDS
"""The fields that simple JSON, completions and chat completions serve."""

STREAM_FIELDS = frozenset({"stream", "stream_options"})
"""The fields that ask for a stream of chunks. A caller that answers in one piece refuses them: see
`RequestDefaults.unserved`.
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

_USE_TOOLS = "it is the old form of `tools` and `tool_choice`, so use these"
_NO_TEMPLATE_FOR_TOOLS = (
    "a chat template tells a model about tools, and this prompt does not go through it: use messages"
)
_TEXT_ONLY = "the model writes text only"

UNSERVED: Mapping[str, UnservedField] = {
    "functions": UnservedField(_USE_TOOLS, ([],)),
    "function_call": UnservedField(_USE_TOOLS, ("none", "auto")),
    "modalities": UnservedField(_TEXT_ONLY, (["text"],)),
    "audio": UnservedField(_TEXT_ONLY),
    "web_search_options": UnservedField("nothing is searched"),
    "moderation": UnservedField("nothing is moderated"),
    "verbosity": UnservedField("a model's answers have the length that they have", ("medium",)),
    "suffix": UnservedField("a text is continued at its end only", ("",)),
    "logits_processors": UnservedField("they are functions, which a file cannot hold", ([],)),
}
"""The unserved fields of every protocol. Responses have more of them."""


UNSERVED_TOOL_FIELDS: Mapping[str, UnservedField] = {
    "tools": UnservedField(_NO_TEMPLATE_FOR_TOOLS, ([],)),
    "tool_choice": UnservedField(_NO_TEMPLATE_FOR_TOOLS, ("none", "auto")),
    "parallel_tool_calls": UnservedField(_NO_TEMPLATE_FOR_TOOLS, (True, False)),
}
"""The unserved fields of a protocol without messages."""


def read_sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that a body sets, under their own names, not aliases. Raises InvalidRequest."""
    values = {name: value for name, value in fields.items() if name in SAMPLING_FIELDS}
    for alias, name in ALIASES.items():
        if alias in fields and name in SAMPLING_FIELDS:
            if alias != "max_completion_tokens" and name in values:
                raise InvalidRequest(f"there are both {alias!r} and {name!r}: give one of them", field=alias)
            values[name] = fields[alias]
    values |= read_structured(fields) | _read_min_tokens(fields, values)
    return values | {name: convert(values[name]) for name, convert in _CONVERTERS.items() if name in values}


def _read_min_tokens(fields: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters for `min_tokens`: `ignore_eos` if it equals `max_tokens`. Raises InvalidRequest otherwise.
    Add notes on it, and on a `skip_special_tokens` that is not enforced.
    """
    min_tokens, max_tokens = fields.get("min_tokens", fields.get("min_new_tokens", 0)), values.get("max_tokens")
    if type(min_tokens) is not int or min_tokens < 0:
        raise InvalidRequest(f"min_tokens is {min_tokens!r:.80}, but must be an integer from 0", field="min_tokens")
    if not require_type("skip_special_tokens", fields.get("skip_special_tokens", True), bool, "true or false"):
        add_note("skip_special_tokens", "skip_special_tokens is not enforced: an answer's text has no special tokens")
    if not min_tokens:
        return {}
    if min_tokens != max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens} and max_tokens {'not given' if max_tokens is None else max_tokens}: an end is "
            "put off up to max_tokens only, so make them equal, or leave min_tokens out",
            field="min_tokens",
        )
    add_note("min_tokens", "min_tokens is max_tokens, so end tokens do not end the answer (ignore_eos)")
    return {"ignore_eos": True}


def build_sampling_params(
    defaults: SamplingParams, values: Mapping[str, Any], fields: Mapping[str, Any]
) -> SamplingParams:
    """Return the defaults with these values; -1 means no limit, as in vLLM and llama.cpp, and 40.0 is the integer 40,
    as in JSON schemas. Raises InvalidRequest, which names the field as the body `fields` does.
    """
    values = {
        name: int(value) if type(value) is float and value.is_integer() and abs(value) < 2**53 else value
        for name, value in values.items()
    }
    limits = {
        name: unlimited_value
        for name, unlimited_value in _UNLIMITED_VALUES.items()
        if type(values.get(name)) is int and values[name] == -1
    }
    stops = {"stop": [each for each in values["stop"] if each != ""]} if isinstance(values.get("stop"), list) else {}
    with name_field_as_sent(fields):
        return replace(defaults, **{**values, **limits, **stops})


@contextmanager
def name_field_as_sent(fields: Mapping[str, Any]) -> Iterator[None]:
    """Have an InvalidRequest about a parameter, raised in this context, name the body's field that set it."""
    try:
        yield
    except InvalidRequest as error:
        names = (alias for alias, name in _OTHER_NAMES if name == error.field and fields.get(alias) is not None)
        error.field = next(names, error.field)
        raise


def template_variables(
    fields: Mapping[str, Any],
    defaults: RequestDefaults,
    *,
    uses_template: bool = True,
    extra_vars: TemplateVars = NO_VARIABLES,
) -> TemplateVars:
    """Return the variables for the chat template: those that a body sets, and the defaults for the others.

    Without `uses_template` there are no variables. `extra_vars` are those that the protocol has fields of its
    own for. Clients send them to every model, so a variable that the template is known not to read is left out, and
    noted. Raises InvalidRequest.
    """
    body_vars = body_variables(fields)
    if body_vars and not uses_template:
        message = f"{', '.join(body_vars)}: set for a chat template, which this prompt does not go through"
        raise InvalidRequest(message, field=next(name for name in TEMPLATE_FIELDS if fields.get(name) is not None))
    body_vars, known_vars = {**extra_vars, **body_vars}, defaults.known_vars
    if known_vars is not None:
        for name, other_name in ((THINKING, "thinking"), ("thinking", THINKING)):
            if name in body_vars and name not in known_vars and other_name in known_vars:
                body_vars.setdefault(other_name, body_vars.pop(name))
        has_thinking_switch = not known_vars.isdisjoint({THINKING, "thinking"})
        unread_names = (
            body_vars.keys()
            - known_vars
            - ({EFFORT} if has_thinking_switch and body_vars.get(EFFORT) == "none" else set())
        )
        for name in sorted(unread_names):
            suggestion = suggest_name(name[:80], known_vars)
            add_note(
                "template variables",
                f"the model's chat template does not read {name[:80]!r}, so it is ignored{suggestion}",
            )
        body_vars = {name: value for name, value in body_vars.items() if name not in unread_names}
    return merge_variables(body_vars, defaults.template_vars) if uses_template else NO_VARIABLES


def body_variables(body: Mapping[str, object]) -> dict[str, object]:
    """Return template variables: non-null `chat_template_kwargs` over `reasoning_effort`. Raises InvalidRequest."""
    if (effort := body.get(EFFORT)) is not None:
        require_type(EFFORT, effort, str, "a text like 'low'")
    variables = require_type("chat_template_kwargs", body.get("chat_template_kwargs") or {}, dict, "an object")
    return ({} if effort is None else {EFFORT: effort}) | {k: v for k, v in variables.items() if v is not None}


def merge_variables(body_vars: TemplateVars, default_vars: TemplateVars) -> dict[str, object]:
    """Return `body_vars` on top of `default_vars`. The effort "none" removes the default thinking switch."""
    return {
        name: value for name, value in default_vars.items() if name != THINKING or body_vars.get(EFFORT) != "none"
    } | {**body_vars}


def read_thinking(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, object]]:
    """Return the sampling parameters and template variables that other servers' thinking fields set. They are
    OpenRouter's `reasoning`, DeepSeek's and GLM's `thinking`, and Qwen's `enable_thinking`. Raises InvalidRequest.
    """
    values: dict[str, Any] = {}
    variables: dict[str, object] = {}
    if "enable_thinking" in fields:
        variables[THINKING] = read_flag(fields, "enable_thinking")
    if isinstance(thinking := fields.get("thinking"), bool):
        variables[THINKING] = thinking
    elif thinking is not None:
        with prefix_error_field("thinking"):
            kind = require_type("thinking", thinking, dict, "an object with a `type`").get("type")
            if kind not in ("enabled", "disabled", "adaptive", "auto"):
                raise InvalidRequest(f"type is {kind!r:.80}, but must be enabled or disabled", field="type")
            if kind in ("enabled", "disabled"):
                variables[THINKING] = kind == "enabled"
            if thinking.get("budget_tokens") is not None:
                values["max_thinking_tokens"] = thinking["budget_tokens"]
    with prefix_error_field("reasoning"):
        reasoning = require_type("reasoning", fields.get("reasoning", {}), dict, "an object")
        reasoning_fields = {name: part for name, part in reasoning.items() if part is not None}
        reject_unknown_fields(reasoning_fields, _REASONING_FIELDS, "`reasoning`")
        if "enabled" in reasoning_fields:
            variables[THINKING] = read_flag(reasoning_fields, "enabled")
        if "effort" in reasoning_fields:
            variables[EFFORT] = require_type("effort", reasoning_fields["effort"], str, "a text like 'low'")
        if "max_tokens" in reasoning_fields:
            values["max_thinking_tokens"] = reasoning_fields["max_tokens"]
    return values, variables


def read_top_logprobs(
    fields: Mapping[str, Any], is_requested: bool, required_field: str, default_count: int | None
) -> Any:
    """Return how many likely tokens to report at each place; `default_count` if log-probabilities are not requested.
    Raises InvalidRequest for `top_logprobs` without the `required_field`, which requests them.
    """
    top = fields.get("top_logprobs", 0)
    if not is_requested and top:
        raise InvalidRequest(f"top_logprobs needs {required_field}", field="top_logprobs")
    return top if is_requested else default_count


def read_flag(fields: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true or false. A missing field is false. Raises InvalidRequest."""
    return require_type(name, fields.get(name, False), bool, "true or false")


def read_stream_fields(fields: Mapping[str, Any], params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a Request that ask for a stream and for its usage. Raises InvalidRequest."""
    stream = read_flag(fields, "stream")
    options = require_type("stream_options", fields.get("stream_options", {}), dict, "an object")
    with prefix_error_field("stream_options"):
        reject_unknown_fields(options, ("include_usage", "include_obfuscation", _CONTINUOUS_USAGE), "`stream_options`")
        option_fields = {name: value for name, value in options.items() if value is not None}
        include_usage, so_far = read_flag(option_fields, "include_usage"), read_flag(option_fields, _CONTINUOUS_USAGE)
    if options and not stream:
        raise InvalidRequest('stream_options needs "stream": true', field="stream_options")
    if stream and params.prompt_logprobs is not None:
        raise InvalidRequest("a stream has no log-probabilities of the prompt: ask without `stream`", field="stream")
    return {"stream": stream, "include_usage": include_usage, "usage_so_far": include_usage and so_far}


def _to_bias_map(value: Any) -> dict[int, Any]:
    """Return `logit_bias` with token ids as integers. Raises InvalidRequest."""
    try:
        return {int(token): bias for token, bias in value.items()}
    except (AttributeError, ValueError):
        message = f"logit_bias is {value!r:.80}, but must be an object from token ids to numbers"
        raise InvalidRequest(message, field="logit_bias") from None


_REASONING_FIELDS = ("effort", "enabled", "exclude", "generate_summary", "max_tokens", "summary")
_CONTINUOUS_USAGE = "continuous_usage_stats"
_UNLIMITED_VALUES: Mapping[str, int | None] = {"top_k": 0, "max_tokens": None, "max_thinking_tokens": None}
_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "stop": lambda value: [value] if isinstance(value, str) else value,
    "logit_bias": _to_bias_map,
}
_OTHER_NAMES = (
    *ALIASES.items(),
    ("max_output_tokens", "max_tokens"),
    ("num_predict", "max_tokens"),
    ("top_logprobs", "logprobs"),
    ("stop_sequences", "stop"),
    *((name, "structured") for name in ("text", *FORM_FIELDS)),
)
"""Pairs of a name that a body may use and the parameter that an error names."""


# The form of an answer: OpenAI's `response_format` and `text.format`, and vLLM's `structured_outputs`.


_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def read_structured(fields: Mapping[str, Any]) -> dict[str, StructuredOutput | None]:
    """Return the parameter `structured` (the answer's form) if a body sets it, or nothing. Raises InvalidRequest."""
    form_names = [name for name in sorted(FORM_FIELDS) if name in fields]
    if len(form_names) > 1:
        raise InvalidRequest(
            f"there are both {form_names[0]!r} and {form_names[1]!r}: give one of them", field=form_names[1]
        )
    if not form_names:
        return {}
    (name,) = form_names
    if name in PEER_FORMATS:
        return {"structured": _make_structured(StructuredOutput.named, {PEER_FORMATS[name]: fields[name]}, name)}
    value = require_type(name, fields[name], dict, "an object")
    read = _read_structured_outputs if name == "structured_outputs" else read_response_format
    with prefix_error_field(name):
        return {"structured": read(value)}


def read_response_format(value: Mapping[str, Any]) -> StructuredOutput | None:
    """Return the structured output that a `response_format` asks for, or None for plain text. Raises InvalidRequest."""
    kind = value.get("type")
    if kind in ("json_object", "json_schema") and value.get("schema") is not None:  # as llama.cpp has it
        reject_unknown_fields(value, ("type", "schema"), "`response_format`")
        return read_json_schema({"schema": value["schema"]})
    if kind in ("text", "json_object"):
        reject_unknown_fields(value, ("type",), "`response_format`")
        return None if kind == "text" else StructuredOutput.json()
    if kind != "json_schema":
        raise InvalidRequest(f"type is {kind!r:.80}, but must be text, json_object or json_schema", field="type")
    reject_unknown_fields(value, ("type", "json_schema"), "`response_format`")
    schema_fields = require_type("json_schema", value.get("json_schema"), dict, "an object with a `schema`")
    with prefix_error_field("json_schema"):
        return read_json_schema(schema_fields)


def read_text_format(value: Mapping[str, Any]) -> StructuredOutput | None:
    """Return the structured output of a response's `text.format` (schema fields beside `type`); None: plain text."""
    if value.get("type") != "json_schema":
        return read_response_format(value)
    return read_json_schema({name: part for name, part in value.items() if name != "type"})


def read_json_schema(value: Mapping[str, Any]) -> StructuredOutput:
    """Return the structured output for `schema`. Unenforceable keywords are refused; ignored if `strict` is false. True
    closes objects: OpenAI's strict schemas must say so themselves.
    """
    reject_unknown_fields(value, _SCHEMA_FIELDS, "`json_schema`")
    strict = require_type("strict", True if value.get("strict") is None else value["strict"], bool, "true or false")
    if not isinstance(value.get("schema"), Mapping | bool):
        raise InvalidRequest("`schema` must be a JSON schema: an object", field="schema")
    return _make_structured(
        lambda schema: StructuredOutput.json(schema, lenient=not strict, closed=value.get("strict") is True),
        value["schema"],
        "schema",
    )


def _read_structured_outputs(value: Mapping[str, Any]) -> StructuredOutput:
    """Return the structured output that vLLM's `structured_outputs` asks for. Raises InvalidRequest."""
    options = ("lenient", *VLLM_OPTIONS.values())
    for name in options:
        require_type(name, False if value.get(name) is None else value[name], bool, "true or false")
    names = [name for name, part in value.items() if name not in options and part is not None]
    return _make_structured(StructuredOutput.named, value, names[0] if len(names) == 1 else None)


def _make_structured(make: Callable[[Any], StructuredOutput], value: Any, name: str | None) -> StructuredOutput:
    """Return `make(value)`. If it raises InvalidRequest, set the error's field to `name`."""
    try:
        return make(value)
    except InvalidRequest as error:
        error.field = name
        raise


# What an answer may call: `tools` and `tool_choice`.


_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def read_tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidRequest."""
    values: dict[str, Any] = {}
    if "tools" in fields:
        entries = require_type("tools", fields["tools"], list, "a list of tools")
        tools = []
        for index, tool in enumerate(entries):
            with prefix_error_field(f"tools[{index}]"):
                tools.append(_read_tool(tool))
        values["tools"] = tools
    if "tool_choice" in fields:
        values["tool_choice"] = _read_tool_choice(fields["tool_choice"])
    if "parallel_tool_calls" in fields:
        values["parallel_tool_calls"] = fields["parallel_tool_calls"]
    return values


def _read_tool(tool: object) -> Tool:
    """Convert one entry of `tools` into a Tool. Raises InvalidRequest."""
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"a tool is {tool!r:.80}, but must be an object with `type` and `function`")
    fields = pick_known_fields(sanitize_tool(tool), ("type", "function"), "a tool", ("function",))
    if isinstance(function := fields.get("function"), Mapping):
        fields["function"] = pick_known_fields(function, _FUNCTION_FIELDS, "a tool's function", _FUNCTION_FIELDS)
    try:
        return Tool.of(fields)
    except InvalidRequest as error:
        error.field = None
        raise


def _read_tool_choice(choice: object) -> object:
    """Return `tool_choice` as text: a mode, or the name of the function that an object names. Raises InvalidRequest."""
    if not isinstance(choice, Mapping):
        return choice
    function = choice.get("function")
    if (
        choice.get("type") != "function"
        or not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
    ):
        example = '{"type": "function", "function": {"name": ...}}'
        raise InvalidRequest(
            f"tool_choice is {dict(choice)!r:.80}, but must be auto, none, required or {example}", field="tool_choice"
        )
    return function["name"]
