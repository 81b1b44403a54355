"""The body of a response, before there is an answer and after."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cortexmlx.protocols.openai.logprobs import chat_logprobs
from cortexmlx.protocols.reply import Body, ReplyInfo
from cortexmlx.protocols.request import Request
from cortexmlx.protocols.responses.details import Details, details_of
from cortexmlx.protocols.responses.offered import INPUT, Callee, shown_choice
from cortexmlx.structured.tools import loaded
from cortexmlx.types.request import Completion, FinishReason


def write(request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the body of a reply: the model's thoughts if it had any, one message of text, and its calls. An answer
    that has calls and no text has no message. One that reached its limit of tokens is `incomplete`.
    """
    [[answer]] = answers
    body = whole_body(request, answer, info)
    keep(request, body, info)
    return body


def keep(request: Request, body: Body, info: ReplyInfo) -> None:
    """Let a whole body be kept, before its end is sent: the client may continue it at once."""
    if info.keep is not None:
        info.keep(request, body)


def whole_body(request: Request, answer: Completion, info: ReplyInfo) -> Body:
    """Return the body of an answer that has ended."""
    details = details_of(request)
    whole = answer.finish_reason is not FinishReason.LENGTH
    status = "completed" if whole else "incomplete"
    text: Body = {"type": "output_text", "text": answer.text, "annotations": []}
    if answer.logprobs is not None:
        text["logprobs"] = chat_logprobs(answer.logprobs, info.token_bytes)
    message = {
        "id": f"msg_{info.id}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [text],
    }
    notes = [*request.notes, *answer.notes, *details.offered.notes]
    return {
        **unanswered(request, info, status),
        "completed_at": info.created + round(answer.timings.total) if whole and not info.repeatable else None,
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        **({"notes": notes} if notes else {}),
        "output": [
            *_thoughts(answer, details, info),
            *([message] if answer.text or not answer.tool_calls else []),
            *_calls(answer, details, info),
        ],
        "usage": {
            "input_tokens": answer.usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": 0 if info.repeatable else answer.usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": answer.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.usage.thinking_tokens},
            "total_tokens": answer.usage.total_tokens,
        },
    }


def unanswered(request: Request, info: ReplyInfo, status: str) -> Body:
    """Return the body of a reply before there is an answer: what the request asked for, without output and usage."""
    said, params, details = request.body, request.params, details_of(request)
    reasoning = said.get("reasoning") or {}
    return {
        "id": f"resp_{info.id}",
        "object": "response",
        "created_at": info.created,
        "completed_at": None,
        "status": status,
        "background": False,
        "error": None,
        "frequency_penalty": params.frequency_penalty,
        "incomplete_details": None,
        "instructions": said.get("instructions"),
        "max_output_tokens": params.max_tokens,
        "max_tool_calls": _of_kind(said, "max_tool_calls", int),
        "metadata": said.get("metadata") or {},
        "model": info.model,
        "output": [],
        "parallel_tool_calls": params.parallel_tool_calls,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": said.get("previous_response_id"),
        "prompt_cache_key": _of_kind(said, "prompt_cache_key", str),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": _of_kind(said, "safety_identifier", str),
        "service_tier": "default",
        "store": details.store,
        "temperature": params.temperature,
        "text": _text(said.get("text") or {}),
        "tool_choice": shown_choice(said.get("tool_choice")),
        "tools": list(details.offered.shown),
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": _of_kind(said, "user", str),
    }


def call_item(id: str, callee: Callee, status: str, call_id: str, arguments: str) -> Body:
    """Return the item of a call under the name that the client gave the tool. `id` is without its prefix."""
    named = {"name": callee.name, **({} if callee.namespace is None else {"namespace": callee.namespace})}
    if callee.custom:
        given = {"input": custom_input(arguments)}
        return {"id": f"ctc_{id}", "type": "custom_tool_call", "status": status, "call_id": call_id, **named, **given}
    said = {"arguments": arguments}
    return {"id": f"fc_{id}", "type": "function_call", "status": status, "call_id": call_id, **named, **said}


def custom_input(arguments: str) -> str:
    """Return the text that a custom tool is called with. The model wrote it as the only argument of a function."""
    try:
        text = loaded(arguments)[INPUT]
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else json.dumps(text)


def sealed_thoughts(thoughts: str, details: Details, info: ReplyInfo) -> Body:
    """Return the field with sealed thoughts, if it was asked for."""
    if not details.sealed or info.seal is None:
        return {}
    return {"encrypted_content": info.seal.wrap(thoughts)}


def _thoughts(answer: Completion, details: Details, info: ReplyInfo) -> list[Body]:
    if not answer.thinking:
        return []
    cut = answer.finish_reason is FinishReason.LENGTH and not answer.text and not answer.tool_calls
    status = "incomplete" if cut else "completed"
    content = [{"type": "reasoning_text", "text": answer.thinking}]
    item = {"id": f"rs_{info.id}", "type": "reasoning", "status": status, "summary": [], "content": content}
    return [{**item, **sealed_thoughts(answer.thinking, details, info)}]


def _calls(answer: Completion, details: Details, info: ReplyInfo) -> list[Body]:
    return [
        call_item(f"{info.id}_{number}", details.offered.callee(call.name), "completed", call.id, call.arguments)
        for number, call in enumerate(answer.tool_calls)
    ]


def _text(text: Mapping[str, Any]) -> Body:
    form = text.get("format") or {"type": "text"}
    if form["type"] == "json_schema":
        form = {"description": None, **form, "strict": form.get("strict") is not False}
    verbosity = {} if text.get("verbosity") is None else {"verbosity": text["verbosity"]}
    return {"format": form, **verbosity}


def _of_kind(said: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field without effect, or None if it is not what the API has there."""
    return said.get(name) if type(said.get(name)) is kind else None
