"""`/v1/messages`: the reader, and the body of a reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.anthropic import tools
from cortexmlx.protocols.anthropic.conversation import read_conversation
from cortexmlx.protocols.fields import Fields, Unserved, check_fields, checked, inside
from cortexmlx.protocols.openai import choices, forms, parameters
from cortexmlx.protocols.request import Body, Defaults, ReplyInfo, Request, with_notes
from cortexmlx.types.messages import EFFORT, THINKING, TemplateVars
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import Completion, FinishReason

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

FIELDS = Fields(
    f"a {URL} body",
    frozenset({"max_tokens", "messages", "output_config", "output_format", "stop_sequences", "stream", "system"})
    | {"temperature", "thinking", "top_k", "top_p"}
    | tools.FIELDS,
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
    params = parameters.sampling_params(defaults.params, values | thinking | form | tools.tool_values(said), said)
    if params.temperature > 1 and "temperature" in said:
        message = f"temperature is {params.temperature:g}, but must be a number in [0, 1]"
        raise InvalidRequest(message, field="temperature")
    stream = parameters.flag(said, "stream")
    messages = read_conversation(said, defaults.seal)
    return Request((messages,), params, variables, stream=stream, body=body, hints=hints | effort)


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
        {"type": "tool_use", "id": call.id, "name": call.name, "input": tools.input_of(call)}
        for call in answer.tool_calls
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
        return {"structured": forms.json_schema({"schema": asked.get("schema")})}
