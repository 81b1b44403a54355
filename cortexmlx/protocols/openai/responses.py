"""`/v1/responses`: the reader, and the body of a reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import plain_message
from cortexmlx.protocols.fields import Fields, Unserved, check_fields, checked, inside
from cortexmlx.protocols.openai import choices, forms, parameters, tools
from cortexmlx.protocols.openai.logprobs import chat_logprobs
from cortexmlx.protocols.openai.messages import read_arguments, read_messages
from cortexmlx.protocols.reply import Body, ReplyInfo
from cortexmlx.protocols.request import Defaults, Request, checked_text
from cortexmlx.request import Completion, FinishReason, Message

URL = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
"""The only value that `include` may have."""

_STATELESS = "nothing is remembered of other requests: send all messages"
_WHOLE = "the answers of a batch are whole"
OWN_UNSERVED = {
    "background": Unserved(_WHOLE, (False,)),
    "background_options": Unserved(_WHOLE),
    "context_management": Unserved(_STATELESS, ([],)),
    "conversation": Unserved(_STATELESS),
    "image": Unserved("the model writes text only"),
    "max_tool_calls": Unserved("an answer has one call, or as many as the model makes: use `parallel_tool_calls`"),
    "previous_response_id": Unserved(_STATELESS),
    "prompt": Unserved("there are no prompts that are kept elsewhere"),
    "truncation": Unserved("a prompt that does not fit is an error", ("disabled",)),
}
"""The unserved fields that other protocols do not have."""

FIELDS = Fields(
    f"a {URL} body",
    parameters.SAMPLING - {"n", "best_of", "logprobs", "prompt_logprobs", "max_tokens"}
    | set(parameters.TEMPLATE)
    | {"input", "instructions", "max_output_tokens", "top_logprobs", "include", "reasoning", "text"}
    | parameters.STREAM
    | tools.FIELDS,
    parameters.NO_EFFECT,
    {**parameters.UNSERVED, **OWN_UNSERVED},
)

_ITEM = ("type", "role", "content", "id", "status", "phase")


def read(body: Mapping[str, Any], defaults: Defaults) -> Request:
    """Return the request in a body. Raises InvalidRequest."""
    own = FIELDS.without(defaults.unserved)
    accepted = own.accepted(body)
    if "metadata" in accepted:
        _check_metadata(accepted["metadata"])
    said = own.known(accepted)
    values = parameters.sampling_values(said)
    values["logprobs"] = parameters.alternatives(
        said, _included(said), f'"include": ["{LOGPROBS}"]', defaults.params.logprobs
    )
    values |= _form(said) | tools.tool_values(said, flat=True)
    if "max_output_tokens" in said:
        values["max_tokens"] = said["max_output_tokens"]
    params = parameters.sampling_params(defaults.params, values, said)
    stream = parameters.stream_of(said, params)
    messages = _input(said)
    variables = parameters.template_variables(said, defaults.template_vars, effort=_effort(said))
    return Request((messages,), params, variables, body=body, **stream)


def write(request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the body of a reply: the model's thoughts if it had any, one message of text, and its calls. An answer
    that has calls and no text has no message. One that reached its limit of tokens is `incomplete`.
    """
    [[answer]] = answers
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
    return {
        **unanswered(request, info, status),
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        **choices.notes(answer),
        "output": [
            *_thoughts(answer, status, info),
            *([message] if answer.text or not answer.tool_calls else []),
            *_calls(answer, info),
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
    return {
        "id": f"resp_{info.id}",
        "object": "response",
        "created_at": info.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": request.body.get("instructions"),
        "max_output_tokens": request.params.max_tokens,
        "metadata": request.body.get("metadata") or {},
        "model": info.model,
        "output": [],
        "parallel_tool_calls": request.params.parallel_tool_calls,
        "temperature": request.params.temperature,
        "text": {"format": (request.body.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": request.body.get("tool_choice") or "auto",
        "tools": request.body.get("tools") or [],
        "top_p": request.params.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _thoughts(answer: Completion, status: str, info: ReplyInfo) -> list[Body]:
    if not answer.thinking:
        return []
    content = [{"type": "reasoning_text", "text": answer.thinking}]
    return [{"id": f"rs_{info.id}", "type": "reasoning", "status": status, "summary": [], "content": content}]


def _calls(answer: Completion, info: ReplyInfo) -> list[Body]:
    return [
        {
            "id": f"fc_{info.id}_{number}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for number, call in enumerate(answer.tool_calls)
    ]


def _check_metadata(metadata: Any) -> None:
    """Raise InvalidRequest for metadata that the body of a response cannot hold. A response repeats its request's
    metadata.
    """
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        message = f"metadata is {metadata!r:.80}, but must be an object whose values are texts"
        raise InvalidRequest(message, field="metadata")


def _included(said: Mapping[str, Any]) -> bool:
    """Whether `include` asks for log-probabilities."""
    include = checked("include", said.get("include", []), list, "a list")
    for place, name in enumerate(include):
        if name != LOGPROBS:
            message = f"include has {name!r}, but only {LOGPROBS!r} is served"
            raise InvalidRequest(message, field=f"include[{place}]")
    return bool(include)


def _form(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return `structured` as `text` sets it, or nothing if `text` does not set it."""
    text = checked("text", said.get("text", {}), dict, "an object")
    with inside("text"):
        check_fields(text, ("format", "verbosity"), "`text`")
        if text.get("verbosity") is not None:
            parameters.UNSERVED["verbosity"].check("verbosity", text["verbosity"])
        if text.get("format") is None:
            return {}
        asked = checked("format", text["format"], dict, "an object")
        with inside("format"):
            return {"structured": forms.text_format(asked)}


def _effort(said: Mapping[str, Any]) -> object:
    reasoning = checked("reasoning", said.get("reasoning", {}), dict, "an object")
    with inside("reasoning"):
        check_fields([name for name in reasoning if reasoning[name] is not None], ("effort",), "`reasoning`")
    return reasoning.get("effort")


def _input(said: Mapping[str, Any]) -> list[Message]:
    """Return the messages of `input`, after the `instructions`."""
    asked, instructions = said.get("input"), said.get("instructions")
    with inside("input"):
        if isinstance(asked, str):
            asked = [{"role": "user", "content": checked_text(asked)}]
        if not isinstance(asked, list) or not asked or not all(isinstance(item, dict) for item in asked):
            raise InvalidRequest("`input` must be a text or a list of messages")
    with inside("instructions"):
        if not isinstance(instructions, str | None):
            raise InvalidRequest(f"`instructions` must be a text, not {type(instructions).__name__}")
        first: list[Message] = [{"role": "system", "content": checked_text(instructions)}] if instructions else []
    messages = _messages(asked)
    return [*first, *read_messages(list(messages.values()), [f"input[{place}]" for place in messages])]


def _messages(items: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the messages among the items, by their places. An assistant's message gets the thoughts before it, and the
    calls after it.
    """
    messages: dict[int, dict[str, Any]] = {}
    thoughts: dict[int, str] = {}
    for place, item in enumerate(items):
        with inside(f"input[{place}]"):
            if item.get("type") == "reasoning":
                thoughts[place] = _thought(item)
                continue
            message = _call_item(item) or _item(item)
        if thoughts and message["role"] != "assistant":
            break
        last = next(reversed(messages), None)
        if message.get("tool_calls") and last is not None and messages[last]["role"] == "assistant" and not thoughts:
            calls = [*messages[last].get("tool_calls", ()), *message["tool_calls"]]
            messages[last] = {**messages[last], "tool_calls": calls}
            continue
        messages[place] = {**message, "reasoning_content": "".join(thoughts.values())} if thoughts else message
        thoughts = {}
    if thoughts:
        why = "an item of `input` of type 'reasoning' is served only before an assistant's message"
        raise InvalidRequest(why, field=f"input[{min(thoughts)}]")
    return messages


def _thought(item: dict[str, Any]) -> str:
    parts = item.get("content")
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts] if isinstance(parts, list) else []
    thought = "".join(text for text in texts if isinstance(text, str))
    if not thought or None in texts or item.get("summary"):
        raise InvalidRequest("an item of `input` of type 'reasoning' is served only with its text as `content` alone")
    return thought


def _call_item(item: dict[str, Any]) -> dict[str, Any] | None:
    """Return the message of a call, or of its output; None for another item."""
    kind = item.get("type")
    if kind == "function_call":
        check_fields(item, ("type", "id", "status", "call_id", "name", "arguments"), "a call")
        id, name, arguments = (
            checked(part, item.get(part), str, "a text") for part in ("call_id", "name", "arguments")
        )
        with inside("arguments"):
            function = {"name": name, "arguments": read_arguments(name, arguments)}
        called = {"id": id, "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [called]}
    if kind == "function_call_output":
        check_fields(item, ("type", "id", "status", "call_id", "output"), "an output")
        id = checked("call_id", item.get("call_id"), str, "a text")
        with inside("output"):
            output = plain_message({"content": item.get("output")})["content"]
        return {"role": "tool", "tool_call_id": id, "content": checked("output", output, str, "a text")}
    return None


def _item(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        message = f"an item of `input` of type {item['type']!r} is not served, only messages, calls and their outputs"
        raise InvalidRequest(message, field="type")
    check_fields(item, _ITEM, "a message")
    return {name: item.get(name) for name in ("role", "content")}
