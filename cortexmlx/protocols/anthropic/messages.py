"""`/v1/messages`: the reader, tools, the body of a reply, and the events of a stream."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.protocols.anthropic.conversation import read_conversation
from cortexmlx.protocols.anthropic.errors import error_body
from cortexmlx.protocols.fields import Fields, Unserved, check_fields, checked, inside
from cortexmlx.protocols.history import known_fields, mend_tool
from cortexmlx.protocols.openai import chat_completions as choices
from cortexmlx.protocols.openai import parameters
from cortexmlx.protocols.request import Body, Defaults, ReplyInfo, Request, with_notes
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

UNSERVED: Mapping[str, Unserved] = {
    "compaction": Unserved("conversations are not summarized here: ask for a summary in a message"),
    "container": Unserved(_STATELESS),
    "mcp_servers": Unserved("the server calls no tools: offer them as `tools`, and call them yourself", ([],)),
    "thread": Unserved(_STATELESS),
}

TOOL_FIELDS = frozenset({"tools", "tool_choice"})
"""The fields of a body that offer tools."""

FIELDS = Fields(
    f"a {URL} body",
    frozenset({"max_tokens", "messages", "output_config", "output_format", "stop_sequences", "stream", "system"})
    | {"temperature", "thinking", "top_k", "top_p"}
    | TOOL_FIELDS,
    NO_EFFECT,
    UNSERVED,
)

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""What templates call the degrees of effort. They know no more than three."""


def read(body: Mapping[str, Any], defaults: Defaults) -> Request:
    """Return the request in a body. Raises InvalidRequest."""
    if body.get("max_tokens") is None:
        raise InvalidRequest("`max_tokens` is missing", field="max_tokens")
    return _read(body, defaults)


def read_prompt(body: Mapping[str, Any], defaults: Defaults) -> Request:
    """Return the request in a body whose prompt is to be counted. It needs no `max_tokens`. Raises InvalidRequest."""
    return _read(body, defaults)


@with_notes
def _read(body: Mapping[str, Any], defaults: Defaults) -> Request:
    said = FIELDS.without(defaults.unserved).given(body)
    values: dict[str, Any] = {"n": 1, "best_of": None, "logprobs": None, "prompt_logprobs": None}
    values |= {name: said[name] for name in ("max_tokens", "temperature", "top_p", "top_k") if name in said}
    if "stop_sequences" in said:
        values["stop"] = checked("stop_sequences", said["stop_sequences"], list, "a list of texts")
    thinking, variables, hints = _thinking(said, defaults.template_vars)
    form, effort = _output(said)
    params = parameters.sampling_params(defaults.params, values | thinking | form | tool_values(said), said)
    if params.temperature > 1 and "temperature" in said:
        message = f"temperature is {params.temperature:g}, but must be a number in [0, 1]"
        raise InvalidRequest(message, field="temperature")
    stream = parameters.flag(said, "stream")
    messages = read_conversation(said, defaults.seal)
    return Request((messages,), params, variables, stream=stream, body=body, hints=hints | effort)


def _thinking(said: Mapping[str, Any], usual: TemplateVars) -> tuple[dict[str, Any], TemplateVars, dict[str, object]]:
    """Return the sampling parameters, the template's variables and the hints that `thinking` sets.

    Clients send it whatever the model is, so a model that does not think ignores it. "adaptive" leaves the choice to
    whoever runs the server, and else to the model.
    """
    if "thinking" not in said:
        return {}, usual, {}
    thinking = checked("thinking", said["thinking"], dict, "an object with a `type`")
    with inside("thinking"):
        given = {name: value for name, value in thinking.items() if value is not None}
        check_fields(given, ("type", "budget_tokens", "display"), "`thinking`")
        kind = given.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise InvalidRequest(f"type is {kind!r:.80}, but must be enabled, disabled or adaptive", field="type")
        if given.get("display", "summarized") not in ("summarized", "omitted"):
            message = f"display is {given['display']!r:.80}, but must be summarized or omitted"
            raise InvalidRequest(message, field="display")
        budget = given.get("budget_tokens")
        if (budget is not None) is not (kind == "enabled"):
            raise InvalidRequest("`budget_tokens` belongs to the type 'enabled'", field="budget_tokens")
        if kind == "adaptive":
            return {}, usual, {} if THINKING in usual else {THINKING: True}
        if budget is not None and (type(budget) is not int or not 0 < budget < 2**31):
            message = f"budget_tokens is {budget!r:.80}, but must be an integer above 0"
            raise InvalidRequest(message, field="budget_tokens")
    others = {name: value for name, value in usual.items() if name != THINKING}
    return {"max_thinking_tokens": budget or 0}, others, {THINKING: kind == "enabled"}


def _output(said: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, object]]:
    """Return the sampling parameters and the hints that `output_config` sets. `output_format` is an older name of its
    `format`.
    """
    config = checked("output_config", said.get("output_config", {}), dict, "an object")
    with inside("output_config"):
        given = {name: value for name, value in config.items() if value is not None}
        check_fields(given, ("effort", "format", "task_budget"), "`output_config`")
        effort = given.get("effort", "high")
        if not isinstance(effort, str) or effort not in _EFFORTS:
            raise InvalidRequest(f"effort is {effort!r:.80}, but must be one of {', '.join(_EFFORTS)}", field="effort")
        form = _form("format", given)
    return form or _form("output_format", said), {EFFORT: _EFFORTS[effort]} if "effort" in given else {}


def _form(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    if name not in given:
        return {}
    asked = checked(name, given[name], dict, "an object with a `schema`")
    with inside(name):
        check_fields(asked, ("type", "schema"), f"`{name}`")
        if asked.get("type") != "json_schema":
            raise InvalidRequest(f"type is {asked.get('type')!r:.80}, but must be json_schema", field="type")
        return {"structured": parameters.json_schema({"schema": asked.get("schema")})}


# Tools: `tools`, `tool_choice`, and the calls in replies.


_TOOL_PARTS = ("type", "name", "description", "input_schema", "strict")
HINTS = ("cache_control", "defer_loading", "eager_input_streaming", "input_examples", "toolset_name")
"""Parts of a tool that change no answer here. A tool whose loading is deferred is offered at once."""

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_LARGEST = 1.7976931348623157e308


def tool_values(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that offer tools, as a body sets them. Raises InvalidRequest."""
    values: dict[str, Any] = {}
    tools: list[Tool] = []
    for place, tool in enumerate(checked("tools", said.get("tools", []), list, "a list of tools")):
        with inside(f"tools[{place}]"):
            tools.append(_tool(tool))
    if tools:
        values["tools"] = tools
    if "tool_choice" in said:
        choice = checked("tool_choice", said["tool_choice"], dict, "an object with a `type`")
        with inside("tool_choice"):
            values |= _tool_choice(choice, [tool.name for tool in tools])
    return values


def input_of(call: ToolCall) -> Any:
    """Return the arguments of a call as a JSON value: with the largest number that JSON readers know in place of a
    larger one. Raises CortexError if they are nested too deeply to be read.
    """
    try:
        return _finite(call.values if call.arguments else {})
    except RecursionError:
        raise CortexError(f"the input of the tool {call.name!r} is nested too deeply: ask without tools") from None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(_LARGEST, value)
    return value


def _tool(tool: object) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"a tool is {tool!r:.80}, but must be an object with `name` and `input_schema`")
    given = known_fields(mend_tool(tool), (*_TOOL_PARTS, *HINTS, "allowed_callers"), "a tool", _TOOL_PARTS)
    kind = given.get("type", "custom")
    if kind != "custom":
        raise InvalidRequest(
            f"the type {kind!r:.80} is not served: tools that run elsewhere, or whose schema only other models know, "
            "are not there. Leave it out, or describe it with an `input_schema`",
            field="type",
        )
    callers = given.pop("allowed_callers", ["direct"])
    if not isinstance(callers, list) or "direct" not in callers:
        message = f"allowed_callers is {callers!r:.80}, but must have 'direct': nothing else calls tools here"
        raise InvalidRequest(message, field="allowed_callers")
    schema = given.get("input_schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"input_schema is {schema!r:.80}, but must be a JSON schema", field="input_schema")
    try:
        return Tool.named(given.get("name"), given.get("description", ""), schema, given.get("strict", False))
    except InvalidRequest as error:
        error.field = None
        raise


def _tool_choice(choice: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    check_fields(choice, ("type", "name", "disable_parallel_tool_use"), "`tool_choice`")
    values: dict[str, Any] = {}
    if (single := choice.get("disable_parallel_tool_use")) is not None:
        values["parallel_tool_calls"] = not checked("disable_parallel_tool_use", single, bool, "true or false")
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
    """Return the body of a reply: the model's thoughts if it had any, its text, and its calls. An answer with thoughts
    or calls may have no text.
    """
    [[answer]] = answers
    content: list[Body] = []
    if answer.thinking:
        content.append(thought(request, info, answer.thinking))
    if answer.text or not (answer.tool_calls or content):
        content.append({"type": "text", "text": answer.text})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": input_of(call)} for call in answer.tool_calls
    ]
    body = begun(info, usage(answer, info))
    return {**body, "content": content, **ended(request, answer), **choices.notes(request, answer)}


def begun(info: ReplyInfo, usage: Body) -> Body:
    """Return the body of a reply without content."""
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


def ended(request: Request, answer: Completion) -> Body:
    """Return the fields that say why an answer ended."""
    sequence = answer.stop_string if answer.finish_reason is FinishReason.STOP else None
    return {"stop_reason": _stop_reason(request, answer, sequence), "stop_sequence": sequence}


def thought(request: Request, info: ReplyInfo, text: str) -> Body:
    """Return the block of thoughts. If the request leaves them out, only their signature holds them."""
    if omits(request):
        return {"type": "thinking", "thinking": "", "signature": "" if info.seal is None else info.seal.wrap(text)}
    return {"type": "thinking", "thinking": text, "signature": "" if info.seal is None else info.seal.sign(text)}


def omits(request: Request) -> bool:
    """Whether the texts of thoughts are left out."""
    return (request.body.get("thinking") or {}).get("display") == "omitted"


def usage(answer: Completion, info: ReplyInfo) -> Body:
    """Return the tokens of a prompt and its answer."""
    used = answer.usage
    tokens = counted(used.prompt_tokens, 0 if info.repeatable else used.cached_tokens, used.completion_tokens)
    return {**tokens, "output_tokens_details": {"thinking_tokens": used.thinking_tokens}}


def usage_so_far(progress: Progress | None) -> Body:
    """Return the tokens of a prompt whose answer has not begun, as far as they are known."""
    return counted(0, 0, 0) if progress is None else counted(progress.total, progress.cached, 0)


def counted(prompt: int, cached: int, answer: int) -> Body:
    """Return numbers of tokens as a usage."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer,
    }


def _stop_reason(request: Request, answer: Completion, sequence: str | None) -> str:
    if answer.finish_reason is FinishReason.TOOL_CALLS:
        return "tool_use"
    if answer.finish_reason is not FinishReason.LENGTH:
        return "end_turn" if sequence is None else "stop_sequence"
    most = request.params.max_tokens
    full = most is None or answer.usage.completion_tokens < most
    return "model_context_window_exceeded" if full else "max_tokens"


# The events of a streamed message: its blocks one after the other, and at the end why it ended.


@dataclass
class _Block:
    """The block that is open. `text` is what was said of thoughts so far."""

    kind: str
    call: int = 0
    text: str = ""


class MessageEvents:
    """The events of one streamed message, from the engine's events. Each is a body with a `type`."""

    def __init__(self, request: Request, info: ReplyInfo) -> None:
        self._request = request
        self._info = info
        self._begun = False
        self._open: _Block | None = None
        self._count = 0
        self._text = 0
        self._thinking = 0
        self._calls = 0

    def of(self, event: TokenEvent, prompt: int = 0) -> list[Body]:
        """Return the events of one event of the engine. The first of all says that the message begins."""
        if event.error is not None:
            return [error_body(event.error)]
        return [*self._begin(event), *self._of(event)]

    def _of(self, event: TokenEvent) -> Iterator[Body]:
        if event.completion is not None:
            yield from self._end(event.completion)
        else:
            yield from self._grow(event.thinking, event.text, event.tool_calls)

    def _begin(self, event: TokenEvent) -> Iterator[Body]:
        if not self._begun:
            self._begun = True
            usage = usage_so_far(event.progress or self._info.progress())
            yield {"type": "message_start", "message": begun(self._info, usage)}

    def _grow(self, thinking: str, text: str, calls: Sequence[CallDelta]) -> Iterator[Body]:
        self._thinking += len(thinking)
        self._text += len(text)
        if thinking:
            yield from self._switch("thinking", {"thinking": "", "signature": ""})
            assert self._open is not None
            self._open.text += thinking
            if not omits(self._request):
                yield self._delta({"type": "thinking_delta", "thinking": thinking})
        if text:
            yield from self._switch("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for delta in calls:
            self._calls = max(self._calls, delta.index + 1)
            yield from self._switch("tool_use", {"id": delta.id, "name": delta.name, "input": {}}, delta.index)
            if delta.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})

    def _switch(self, kind: str, begun: Body, call: int = 0) -> Iterator[Body]:
        """Yield the end of the open block and the beginning of another, if what comes does not belong to the open
        one.
        """
        if self._open is not None and (self._open.kind, self._open.call) == (kind, call):
            return
        yield from self._close()
        self._open = _Block(kind, call)
        yield {"type": "content_block_start", "index": self._count, "content_block": {"type": kind, **begun}}

    def _close(self) -> Iterator[Body]:
        if self._open is None:
            return
        if self._open.kind == "thinking":
            signature = thought(self._request, self._info, self._open.text)["signature"]
            yield self._delta({"type": "signature_delta", "signature": signature})
        yield {"type": "content_block_stop", "index": self._count}
        self._open = None
        self._count += 1

    def _end(self, completion: Completion) -> Iterator[Body]:
        """Yield what no event has said yet, and why the message ended."""
        calls = choices.whole(completion.tool_calls, self._calls)
        yield from self._grow(completion.thinking[self._thinking :], completion.text[self._text :], calls)
        if not self._count and self._open is None:
            yield from self._switch("text", {"text": ""})
        yield from self._close()
        delta = ended(self._request, completion)
        used, notes = usage(completion, self._info), choices.notes(self._request, completion)
        yield {"type": "message_delta", "delta": delta, "usage": used, **notes}
        yield {"type": "message_stop"}

    def _delta(self, delta: Body) -> Body:
        return {"type": "content_block_delta", "index": self._count, "delta": delta}
