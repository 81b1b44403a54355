"""`/v1/messages`: the reader, tools, the body of a reply, and the events of a stream."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.protocols.anthropic.conversation import read_conversation
from cortexmlx.protocols.anthropic.errors import error_body
from cortexmlx.protocols.fields import (
    BodyFields,
    UnservedField,
    prefix_error_field,
    reject_unknown_fields,
    require_type,
)
from cortexmlx.protocols.history import pick_known_fields, sanitize_tool
from cortexmlx.protocols.openai import chat_completions as choices
from cortexmlx.protocols.openai import parameters
from cortexmlx.protocols.request import Body, ReplyInfo, Request, RequestDefaults, with_notes
from cortexmlx.structured.tools import CallDelta, Tool, ToolCall
from cortexmlx.types.messages import EFFORT, THINKING, TemplateVars
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import Completion, FinishReason, TokenEvent

URL = "/v1/messages"
COUNT_URL = f"{URL}/count_tokens"

NO_EFFECT = frozenset(
    {
        "anthropic_beta",
        "anthropic_version",
        "billing_policy",
        "cache_control",
        "context_management",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "metadata",
        "model",
        "service_tier",
        "speed",
        "user_profile_id",
    }
)
"""Fields that change no answer: every prefix is cached, no request is declined, and a conversation is read as it was
sent, so nothing of it is cleared.
"""

_STATELESS = "no conversations and no files are kept here: send the whole conversation as `messages`"

UNSERVED: Mapping[str, UnservedField] = {
    "compaction": UnservedField("conversations are not summarized here: ask for a summary in a message"),
    "container": UnservedField(_STATELESS),
    "mcp_servers": UnservedField("the server calls no tools: offer them as `tools`, and call them yourself", ([],)),
    "thread": UnservedField(_STATELESS),
}

TOOL_FIELDS = frozenset({"tools", "tool_choice"})
"""The fields of a body that offer tools."""

FIELDS = BodyFields(
    f"a {URL} body",
    frozenset({"max_tokens", "messages", "output_config", "output_format", "stop_sequences", "stream", "system"})
    | {"temperature", "thinking", "top_k", "top_p"}
    | TOOL_FIELDS,
    NO_EFFECT,
    UNSERVED,
)

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""What templates call the degrees of effort. They know no more than three."""


def read(body: Mapping[str, Any], defaults: RequestDefaults) -> Request:
    """Parse the JSON body of a `/v1/messages` call into a Request. Raises InvalidRequest."""
    if body.get("max_tokens") is None:
        raise InvalidRequest("`max_tokens` is missing", field="max_tokens")
    return _read_body(body, defaults)


def read_for_counting(body: Mapping[str, Any], defaults: RequestDefaults) -> Request:
    """Parse the body of a `count_tokens` call, which needs no `max_tokens`, into a Request. Raises InvalidRequest."""
    return _read_body(body, defaults)


@with_notes
def _read_body(body: Mapping[str, Any], defaults: RequestDefaults) -> Request:
    """Parse a body, with or without `max_tokens`, into a Request."""
    fields = FIELDS.exclude(defaults.unserved).validate(body)
    values: dict[str, Any] = {"n": 1, "best_of": None, "logprobs": None, "prompt_logprobs": None}
    values |= {name: fields[name] for name in ("max_tokens", "temperature", "top_p", "top_k") if name in fields}
    if "stop_sequences" in fields:
        values["stop"] = require_type("stop_sequences", fields["stop_sequences"], list, "a list of texts")
    thinking, variables, hints = _read_thinking(fields, defaults.template_vars)
    form, effort = _read_output_config(fields)
    params = parameters.build_sampling_params(defaults.params, values | thinking | form | read_tools(fields), fields)
    if params.temperature > 1 and "temperature" in fields:
        message = f"temperature is {params.temperature:g}, but must be a number in [0, 1]"
        raise InvalidRequest(message, field="temperature")
    stream = parameters.read_flag(fields, "stream")
    messages = read_conversation(fields, defaults.seal, defaults.image_parts())
    return Request((messages,), params, variables, stream=stream, body=body, hints=hints | effort)


def _read_thinking(
    fields: Mapping[str, Any], default_vars: TemplateVars
) -> tuple[dict[str, Any], TemplateVars, dict[str, object]]:
    """Return the sampling parameters, the template's variables and the template hints that the field `thinking` sets.

    Clients send it whatever the model is, so a model that does not think ignores it. "adaptive" leaves the choice to
    whoever runs the server, and else to the model.
    """
    if "thinking" not in fields:
        return {}, default_vars, {}
    thinking = require_type("thinking", fields["thinking"], dict, "an object with a `type`")
    with prefix_error_field("thinking"):
        thinking_fields = {name: value for name, value in thinking.items() if value is not None}
        reject_unknown_fields(thinking_fields, ("type", "budget_tokens", "display"), "`thinking`")
        kind = thinking_fields.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise InvalidRequest(f"type is {kind!r:.80}, but must be enabled, disabled or adaptive", field="type")
        if thinking_fields.get("display", "summarized") not in ("summarized", "omitted"):
            message = f"display is {thinking_fields['display']!r:.80}, but must be summarized or omitted"
            raise InvalidRequest(message, field="display")
        budget = thinking_fields.get("budget_tokens")
        if (budget is not None) is not (kind == "enabled"):
            raise InvalidRequest("`budget_tokens` belongs to the type 'enabled'", field="budget_tokens")
        if kind == "adaptive":
            return {}, default_vars, {} if THINKING in default_vars else {THINKING: True}
        if budget is not None and (type(budget) is not int or not 0 < budget < 2**31):
            message = f"budget_tokens is {budget!r:.80}, but must be an integer above 0"
            raise InvalidRequest(message, field="budget_tokens")
    other_vars = {name: value for name, value in default_vars.items() if name != THINKING}
    return {"max_thinking_tokens": budget or 0}, other_vars, {THINKING: kind == "enabled"}


def _read_output_config(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, object]]:
    """Return `output_config`'s sampling parameters and template hints. `output_format` is the old name of `format`."""
    config = require_type("output_config", fields.get("output_config", {}), dict, "an object")
    with prefix_error_field("output_config"):
        config_fields = {name: value for name, value in config.items() if value is not None}
        reject_unknown_fields(config_fields, ("effort", "format", "task_budget"), "`output_config`")
        effort = config_fields.get("effort", "high")
        if not isinstance(effort, str) or effort not in _EFFORTS:
            raise InvalidRequest(f"effort is {effort!r:.80}, but must be one of {', '.join(_EFFORTS)}", field="effort")
        form = _read_format("format", config_fields)
    return form or _read_format("output_format", fields), {
        EFFORT: _EFFORTS[effort]
    } if "effort" in config_fields else {}


def _read_format(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `structured` parameter that a format with a JSON schema sets, or nothing if there is no format."""
    if name not in fields:
        return {}
    format_fields = require_type(name, fields[name], dict, "an object with a `schema`")
    with prefix_error_field(name):
        reject_unknown_fields(format_fields, ("type", "schema"), f"`{name}`")
        if format_fields.get("type") != "json_schema":
            raise InvalidRequest(f"type is {format_fields.get('type')!r:.80}, but must be json_schema", field="type")
        return {"structured": parameters.read_json_schema({"schema": format_fields.get("schema")})}


# Tools: `tools`, `tool_choice`, and the calls in replies.


_TOOL_PARTS = ("type", "name", "description", "input_schema", "strict")
HINTS = ("cache_control", "defer_loading", "eager_input_streaming", "input_examples", "toolset_name")
"""Parts of a tool that change no answer here. A tool whose loading is deferred is offered at once."""

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_LARGEST_FLOAT = 1.7976931348623157e308


def read_tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that `tools` and `tool_choice` of a body set. Raises InvalidRequest."""
    values: dict[str, Any] = {}
    tools: list[Tool] = []
    for index, tool in enumerate(require_type("tools", fields.get("tools", []), list, "a list of tools")):
        with prefix_error_field(f"tools[{index}]"):
            tools.append(_read_tool(tool))
    if tools:
        values["tools"] = tools
    if "tool_choice" in fields:
        choice = require_type("tool_choice", fields["tool_choice"], dict, "an object with a `type`")
        with prefix_error_field("tool_choice"):
            values |= _read_tool_choice(choice, [tool.name for tool in tools])
    return values


def tool_input(call: ToolCall) -> Any:
    """Return a call's arguments as a JSON value, infinities clamped. Raises CortexError if nested too deeply."""
    try:
        return _clamp_infinities(call.values if call.arguments else {})
    except RecursionError:
        raise CortexError(f"the input of the tool {call.name!r} is nested too deeply: ask without tools") from None


def _clamp_infinities(value: Any) -> Any:
    """Replace infinite numbers in a JSON value by the largest float, and NaN by null."""
    if isinstance(value, dict):
        return {name: _clamp_infinities(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_clamp_infinities(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(_LARGEST_FLOAT, value)
    return value


def _read_tool(tool: object) -> Tool:
    """Convert one entry of `tools` into a Tool. Raises InvalidRequest."""
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"a tool is {tool!r:.80}, but must be an object with `name` and `input_schema`")
    fields = pick_known_fields(sanitize_tool(tool), (*_TOOL_PARTS, *HINTS, "allowed_callers"), "a tool", _TOOL_PARTS)
    kind = fields.get("type", "custom")
    if kind != "custom":
        raise InvalidRequest(
            f"the type {kind!r:.80} is not served: tools that run elsewhere, or whose schema only other models know, "
            "are not there. Leave it out, or describe it with an `input_schema`",
            field="type",
        )
    callers = fields.pop("allowed_callers", ["direct"])
    if not isinstance(callers, list) or "direct" not in callers:
        message = f"allowed_callers is {callers!r:.80}, but must have 'direct': nothing else calls tools here"
        raise InvalidRequest(message, field="allowed_callers")
    schema = fields.get("input_schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"input_schema is {schema!r:.80}, but must be a JSON schema", field="input_schema")
    try:
        return Tool.named(fields.get("name"), fields.get("description", ""), schema, fields.get("strict", False))
    except InvalidRequest as error:
        error.field = None
        raise


def _read_tool_choice(choice: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the sampling parameters that `tool_choice` sets. `names` are those of the offered tools."""
    reject_unknown_fields(choice, ("type", "name", "disable_parallel_tool_use"), "`tool_choice`")
    values: dict[str, Any] = {}
    if (single := choice.get("disable_parallel_tool_use")) is not None:
        values["parallel_tool_calls"] = not require_type("disable_parallel_tool_use", single, bool, "true or false")
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool":
        if name not in names:
            raise InvalidRequest(f"name is {name!r:.80}, but must be that of one of the `tools`", field="name")
        return {**values, "tool_choice": name}
    if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
        raise InvalidRequest(f"type is {kind!r:.80}, but must be auto, any, tool or none", field="type")
    if name is not None:
        raise InvalidRequest("`name` needs the type 'tool'", field="name")
    if kind == "any" and not names:
        raise InvalidRequest("type is 'any', but there are no `tools`", field="type")
    return {**values, "tool_choice": _TOOL_CHOICES[kind]}


# The body of a reply.


def write(request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the JSON body of a reply, with blocks for thoughts, text and tool calls; one empty text if it has none."""
    [[answer]] = answers
    content: list[Body] = []
    if answer.thinking:
        content.append(thinking_block(request, info, answer.thinking))
    if answer.text or not (answer.tool_calls or content):
        content.append({"type": "text", "text": answer.text})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": tool_input(call)} for call in answer.tool_calls
    ]
    body = empty_message(info, answer_usage(answer, info))
    return {**body, "content": content, **stop_fields(request, answer), **choices.notes_field(request, answer)}


def empty_message(info: ReplyInfo, usage: Body) -> Body:
    """Return the body of a reply that has no content yet, for the start of a stream."""
    return {
        "id": f"msg_{info.id}",
        "type": "message",
        "role": "assistant",
        "model": info.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def stop_fields(request: Request, answer: Completion) -> Body:
    """Return the fields `stop_reason` and `stop_sequence` of an answer that has ended."""
    sequence = answer.stop_string if answer.finish_reason is FinishReason.STOP else None
    return {"stop_reason": _stop_reason(request, answer, sequence), "stop_sequence": sequence}


def thinking_block(request: Request, info: ReplyInfo, text: str) -> Body:
    """Return a `thinking` block with signature. If the request omits thinking, only the signature holds the text."""
    if omits_thinking(request):
        return {"type": "thinking", "thinking": "", "signature": "" if info.seal is None else info.seal.wrap(text)}
    return {"type": "thinking", "thinking": text, "signature": "" if info.seal is None else info.seal.sign(text)}


def omits_thinking(request: Request) -> bool:
    """Whether the request asks for thinking blocks without their text (`display: omitted`)."""
    return (request.body.get("thinking") or {}).get("display") == "omitted"


def answer_usage(answer: Completion, info: ReplyInfo) -> Body:
    """Return the `usage` of a finished answer: the tokens of its prompt, of the whole answer, and of its thoughts."""
    usage = answer.usage
    tokens = usage_body(usage.prompt_tokens, 0 if info.repeatable else usage.cached_tokens, usage.completion_tokens)
    return {**tokens, "output_tokens_details": {"thinking_tokens": usage.thinking_tokens}}


def prompt_usage(progress: Progress | None) -> Body:
    """Return the `usage` before the answer begins: the prompt's tokens, as far as they are known."""
    return usage_body(0, 0, 0) if progress is None else usage_body(progress.total, progress.cached, 0)


def usage_body(prompt: int, cached: int, answer: int) -> Body:
    """Return a `usage` object with these numbers of tokens."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer,
    }


def _stop_reason(request: Request, answer: Completion, sequence: str | None) -> str:
    """Return Anthropic's `stop_reason` of an answer. `sequence` is the stop string that ended it, or None."""
    if answer.finish_reason is FinishReason.TOOL_CALLS:
        return "tool_use"
    if answer.finish_reason is not FinishReason.LENGTH:
        return "end_turn" if sequence is None else "stop_sequence"
    max_tokens = request.params.max_tokens
    context_full = max_tokens is None or answer.usage.completion_tokens < max_tokens
    return "model_context_window_exceeded" if context_full else "max_tokens"


# The events of a streamed message: its blocks one after the other, and at the end why it ended.


@dataclass
class _OpenBlock:
    """The content block that a stream is writing. `text` is collected for thoughts only, to sign them."""

    kind: str
    call_index: int = 0
    text: str = ""


class MessageEvents:
    """Converts the engine's events into server-sent events of one streamed message: JSON objects with a `type`."""

    def __init__(self, request: Request, info: ReplyInfo) -> None:
        self._request = request
        self._info = info
        self._started = False
        self._open_block: _OpenBlock | None = None
        self._block_index = 0
        self._text_length = 0
        self._thinking_length = 0
        self._call_count = 0

    def convert(self, event: TokenEvent, prompt: int = 0) -> list[Body]:
        """Return the stream's events for one event of the engine. The first of all is `message_start`."""
        if event.error is not None:
            return [error_body(event.error)]
        return [*self._start_message(event), *self._convert(event)]

    def _convert(self, event: TokenEvent) -> Iterator[Body]:
        """Yield the events for new text, thoughts or calls, and those that end the message."""
        if event.completion is not None:
            yield from self._finish(event.completion)
        else:
            yield from self._delta_events(event.thinking, event.text, event.tool_calls)

    def _start_message(self, event: TokenEvent) -> Iterator[Body]:
        """Start the message, the first time only: yield `message_start`."""
        if not self._started:
            self._started = True
            usage = prompt_usage(event.progress or self._info.progress())
            yield {"type": "message_start", "message": empty_message(self._info, usage)}

    def _delta_events(self, thinking: str, text: str, calls: Sequence[CallDelta]) -> Iterator[Body]:
        """Yield the events for more thoughts, text and pieces of tool calls."""
        self._thinking_length += len(thinking)
        self._text_length += len(text)
        if thinking:
            yield from self._switch_block("thinking", {"thinking": "", "signature": ""})
            assert self._open_block is not None
            self._open_block.text += thinking
            if not omits_thinking(self._request):
                yield self._delta_event({"type": "thinking_delta", "thinking": thinking})
        if text:
            yield from self._switch_block("text", {"text": ""})
            yield self._delta_event({"type": "text_delta", "text": text})
        for delta in calls:
            self._call_count = max(self._call_count, delta.index + 1)
            yield from self._switch_block("tool_use", {"id": delta.id, "name": delta.name, "input": {}}, delta.index)
            if delta.arguments:
                yield self._delta_event({"type": "input_json_delta", "partial_json": delta.arguments})

    def _switch_block(self, kind: str, block_fields: Body, call: int = 0) -> Iterator[Body]:
        """Yield the events that close the open block and start another, unless the open one has this type and call."""
        if self._open_block is not None and (self._open_block.kind, self._open_block.call_index) == (kind, call):
            return
        yield from self._close_block()
        self._open_block = _OpenBlock(kind, call)
        yield {
            "type": "content_block_start",
            "index": self._block_index,
            "content_block": {"type": kind, **block_fields},
        }

    def _close_block(self) -> Iterator[Body]:
        """Close the open block: yield the events that end it. Thoughts are signed."""
        if self._open_block is None:
            return
        if self._open_block.kind == "thinking":
            signature = thinking_block(self._request, self._info, self._open_block.text)["signature"]
            yield self._delta_event({"type": "signature_delta", "signature": signature})
        yield {"type": "content_block_stop", "index": self._block_index}
        self._open_block = None
        self._block_index += 1

    def _finish(self, completion: Completion) -> Iterator[Body]:
        """Yield what was not streamed yet, the stop reason with the usage, and `message_stop`."""
        calls = choices.remaining_call_deltas(completion.tool_calls, self._call_count)
        yield from self._delta_events(
            completion.thinking[self._thinking_length :], completion.text[self._text_length :], calls
        )
        if not self._block_index and self._open_block is None:
            yield from self._switch_block("text", {"text": ""})
        yield from self._close_block()
        delta = stop_fields(self._request, completion)
        usage, notes = answer_usage(completion, self._info), choices.notes_field(self._request, completion)
        yield {"type": "message_delta", "delta": delta, "usage": usage, **notes}
        yield {"type": "message_stop"}

    def _delta_event(self, delta: Body) -> Body:
        """Return a `content_block_delta` event of the open block."""
        return {"type": "content_block_delta", "index": self._block_index, "delta": delta}
