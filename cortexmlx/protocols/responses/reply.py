"""The replies of `/v1/responses`: the body before and after the answer, and the events of a stream."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cortexmlx.protocols.openai.chat_completions import remaining_call_deltas
from cortexmlx.protocols.openai.errors import error_body
from cortexmlx.protocols.openai.logprobs import chat_logprobs
from cortexmlx.protocols.request import Body, ReplyInfo, Request
from cortexmlx.protocols.responses.offered import INPUT_ARGUMENT, ClientTool, reply_tool_choice
from cortexmlx.protocols.responses.reader import ResponseDetails, response_details
from cortexmlx.structured.tools import CallDelta, load_json
from cortexmlx.types.logprobs import TokenLogprob
from cortexmlx.types.request import Completion, FinishReason, TokenEvent


def write(request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the JSON body of a finished response: reasoning if the model thought, one message of text (none if there
    are calls and no text), and the calls. A response at its token limit is `incomplete`.
    """
    [[answer]] = answers
    body = finished_body(request, answer, info)
    store_reply(request, body, info)
    return body


def store_reply(request: Request, body: Body, info: ReplyInfo) -> None:
    """Store a finished response before the client has all of it, so that the client may continue it at once."""
    if info.keep is not None:
        info.keep(request, body)


def finished_body(request: Request, answer: Completion, info: ReplyInfo) -> Body:
    """Return the body of a response whose answer has ended."""
    details = response_details(request)
    is_complete = answer.finish_reason is not FinishReason.LENGTH
    status = "completed" if is_complete else "incomplete"
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
    notes = [*request.notes, *answer.notes, *details.offered_tools.notes]
    return {
        **unfinished_body(request, info, status),
        "completed_at": info.created + round(answer.timings.total) if is_complete and not info.repeatable else None,
        "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
        **({"notes": notes} if notes else {}),
        "output": [
            *_reasoning_items(answer, details, info),
            *([message] if answer.text or not answer.tool_calls else []),
            *_call_items(answer, details, info),
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


def unfinished_body(request: Request, info: ReplyInfo, status: str) -> Body:
    """Return the body of a response without output and usage: it repeats what the request asked for."""
    request_body, params, details = request.body, request.params, response_details(request)
    reasoning = request_body.get("reasoning") or {}
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
        "instructions": request_body.get("instructions"),
        "max_output_tokens": params.max_tokens,
        "max_tool_calls": _field_of_type(request_body, "max_tool_calls", int),
        "metadata": request_body.get("metadata") or {},
        "model": info.model,
        "output": [],
        "parallel_tool_calls": params.parallel_tool_calls,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": request_body.get("previous_response_id"),
        "prompt_cache_key": _field_of_type(request_body, "prompt_cache_key", str),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": _field_of_type(request_body, "safety_identifier", str),
        "service_tier": "default",
        "store": details.store,
        "temperature": params.temperature,
        "text": _text_settings(request_body.get("text") or {}),
        "tool_choice": reply_tool_choice(request_body.get("tool_choice")),
        "tools": list(details.offered_tools.reply_tools),
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": _field_of_type(request_body, "user", str),
    }


def call_item(id: str, callee: ClientTool, status: str, call_id: str, arguments: str) -> Body:
    """Return the output item of a tool call under the client's name of the tool. `id` is without its prefix."""
    name_fields = {"name": callee.name, **({} if callee.namespace is None else {"namespace": callee.namespace})}
    if callee.custom:
        input_field = {"input": custom_tool_input(arguments)}
        return {
            "id": f"ctc_{id}",
            "type": "custom_tool_call",
            "status": status,
            "call_id": call_id,
            **name_fields,
            **input_field,
        }
    arguments_field = {"arguments": arguments}
    return {
        "id": f"fc_{id}",
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        **name_fields,
        **arguments_field,
    }


def custom_tool_input(arguments: str) -> str:
    """Return the text for a custom tool, which the model wrote as the only argument of a function."""
    try:
        text = load_json(arguments)[INPUT_ARGUMENT]
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else json.dumps(text)


def encrypted_content_field(thoughts: str, details: ResponseDetails, info: ReplyInfo) -> Body:
    """Return the field `encrypted_content` with sealed thoughts, or no field if it was not asked for."""
    if not details.seal_thoughts or info.seal is None:
        return {}
    return {"encrypted_content": info.seal.wrap(thoughts)}


def _reasoning_items(answer: Completion, details: ResponseDetails, info: ReplyInfo) -> list[Body]:
    """Return the `reasoning` item of an answer as a list, empty if the model did not think."""
    if not answer.thinking:
        return []
    is_truncated = answer.finish_reason is FinishReason.LENGTH and not answer.text
    is_truncated = is_truncated and answer.raw_text.endswith(answer.thinking)  # neither a closing tag nor a call
    status = "incomplete" if is_truncated else "completed"
    content = [{"type": "reasoning_text", "text": answer.thinking}]
    item = {"id": f"rs_{info.id}", "type": "reasoning", "status": status, "summary": [], "content": content}
    return [{**item, **encrypted_content_field(answer.thinking, details, info)}]


def _call_items(answer: Completion, details: ResponseDetails, info: ReplyInfo) -> list[Body]:
    return [
        call_item(
            f"{info.id}_{number}", details.offered_tools.client_tool(call.name), "completed", call.id, call.arguments
        )
        for number, call in enumerate(answer.tool_calls)
    ]


def _text_settings(text: Mapping[str, Any]) -> Body:
    """Return the field `text` as a reply repeats it: the format with its defaults, and the verbosity."""
    form = text.get("format") or {"type": "text"}
    if form["type"] == "json_schema":
        form = {"description": None, **form, "strict": form.get("strict") is not False}
    verbosity = {} if text.get("verbosity") is None else {"verbosity": text["verbosity"]}
    return {"format": form, **verbosity}


def _field_of_type(request_body: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return the field `name` of a request's body, which the reply only repeats; None if its type is not `kind`."""
    return request_body.get(name) if type(request_body.get(name)) is kind else None


# The events of a streamed response: what is added to which item of its output, and the response itself at the end.


@dataclass
class _OutputItem:
    """An output item that a stream has begun. `text` is what was streamed of it so far."""

    output_index: int
    id: str
    kind: str
    text: str = ""
    call_id: str = ""
    client_tool: ClientTool = field(default_factory=lambda: ClientTool(""))
    is_ended: bool = False

    def body(self, status: str) -> Body:
        """Return the item as JSON with this status and the text so far."""
        if self.kind == "function_call":
            return call_item(self.id_suffix, self.client_tool, status, self.call_id, self.text)
        body: Body = {"id": self.id, "type": self.kind, "status": status}
        content = [] if status == "in_progress" else [self.content_part(self.text)]
        if self.kind == "reasoning":
            return {**body, "summary": [], "content": content}
        return {**body, "role": "assistant", "content": content}

    @property
    def id_suffix(self) -> str:
        """The id without its prefix."""
        return self.id.partition("_")[2]

    def content_part(self, text: str) -> Body:
        """Return the only content part of the item, with this text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


_EVENT_NAMES = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
"""What the events of an item's text are called."""


class ResponseEvents:
    """Converts the engine's events into server-sent events of one streamed response: JSON objects with a `type`."""

    def __init__(self, request: Request, info: ReplyInfo) -> None:
        self._request = request
        self._info = info
        self._details = response_details(request)
        self._numbers = itertools.count()
        self._items: dict[str, _OutputItem] = {}
        self._has_started = False
        self._logprobs: list[TokenLogprob] = []
        """Of tokens before the message, such as thoughts: they are sent with its first text."""

    def convert(self, event: TokenEvent, prompt: int = 0) -> list[Body]:
        """Return the stream's events for one event of the engine. An error becomes `response.failed`."""
        return [{**body, "sequence_number": next(self._numbers)} for body in self._convert(event)]

    def _convert(self, event: TokenEvent) -> Iterator[Body]:
        """Yield the events, without their sequence numbers, for one event of the engine."""
        if not self._has_started and event.progress is None:
            self._has_started = True
            started_body = unfinished_body(self._request, self._info, "in_progress")
            for kind in ("created", "in_progress"):
                yield {"type": f"response.{kind}", "response": started_body}
        if event.error is not None:
            error = error_body(event.error)["error"]
            error_fields = {"code": error["code"] or "server_error", "message": error["message"]}
            body = {**unfinished_body(self._request, self._info, "failed"), "error": error_fields}
            yield {"type": "response.failed", "response": body}
        elif event.completion is not None:
            yield from self._finish(event.completion)
        elif event.progress is None:
            logprobs = () if event.logprob is None else (event.logprob,)
            yield from self._delta_events(event.thinking, event.text, event.tool_calls, logprobs)

    def _delta_events(
        self,
        thinking: str,
        text: str,
        calls: tuple[CallDelta, ...] | list[CallDelta],
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Iterator[Body]:
        """Yield the events for more thoughts, text and pieces of tool calls."""
        if thinking:
            yield from self._add_text("reasoning", f"rs_{self._info.id}", thinking)
        self._logprobs += logprobs
        if text or (logprobs and f"msg_{self._info.id}" in self._items):
            yield from self._close_items("reasoning")
            yield from self._add_message_text(text)
        for delta in calls:
            yield from self._close_items("reasoning")
            yield from self._add_text("function_call", f"fc_{self._info.id}_{delta.index}", delta.arguments, call=delta)

    def _add_message_text(self, text: str) -> Iterator[Body]:
        """Append text and the log-probabilities that have come to the message."""
        logprobs_field = {"logprobs": chat_logprobs(self._logprobs, self._info.token_bytes)}
        needs_delta = text or self._logprobs
        self._logprobs = []
        yield from self._add_text("message", f"msg_{self._info.id}", text, logprobs_field if needs_delta else None)

    def _add_text(
        self, kind: str, id: str, text: str, extra_fields: Body | None = None, call: CallDelta | None = None
    ) -> Iterator[Body]:
        """Append text to an output item, which is begun if it is new, and yield the events for that."""
        item = self._items.get(id)
        if item is None:
            item = self._items[id] = _OutputItem(len(self._items), id, kind)
            if call is not None:
                item.call_id, item.client_tool = call.id, self._details.offered_tools.client_tool(call.name)
                item.id = item.body("in_progress")["id"]
            yield {
                "type": "response.output_item.added",
                "output_index": item.output_index,
                "item": item.body("in_progress"),
            }
            if call is None:
                yield self._item_event(item, "response.content_part.added", part=item.content_part(""))
        item.text += text
        if (text or extra_fields) and not item.client_tool.custom:
            yield self._item_event(item, f"response.{_EVENT_NAMES[kind]}.delta", delta=text, **(extra_fields or {}))

    def _close_items(self, *kinds: str, statuses: Mapping[str, str] | None = None) -> Iterator[Body]:
        """Close the open items of these types: yield the events that end them. `statuses`: by id, if not completed."""
        for item in list(self._items.values()):
            if item.kind not in kinds or item.is_ended:
                continue
            if item.client_tool.custom:
                yield from self._custom_input_events(item)
            elif item.kind == "function_call":
                event_type = "response.function_call_arguments.done"
                yield self._item_event(item, event_type, name=item.client_tool.name, arguments=item.text)
            else:
                logprobs_field: Body = {"logprobs": []} if item.kind == "message" else {}
                yield self._item_event(
                    item, f"response.{_EVENT_NAMES[item.kind]}.done", text=item.text, **logprobs_field
                )
                yield self._item_event(item, "response.content_part.done", part=item.content_part(item.text))
            body = item.body((statuses or {}).get(item.id, "completed"))
            if item.kind == "reasoning":
                body |= encrypted_content_field(item.text, self._details, self._info)
            yield {"type": "response.output_item.done", "output_index": item.output_index, "item": body}
            item.is_ended = True

    def _custom_input_events(self, item: _OutputItem) -> Iterator[Body]:
        """Yield the input of a custom tool's call, in one piece: the model writes it inside JSON."""
        text = custom_tool_input(item.text)
        yield self._item_event(item, "response.custom_tool_call_input.delta", delta=text)
        yield self._item_event(item, "response.custom_tool_call_input.done", input=text)

    def _finish(self, completion: Completion) -> Iterator[Body]:
        """Yield what was not streamed yet, and the whole response."""
        body = finished_body(self._request, completion, self._info)
        streamed_texts = {
            kind: next((i.text for i in self._items.values() if i.kind == kind), "") for kind in _EVENT_NAMES
        }
        streamed_call_count = sum(item.kind == "function_call" for item in self._items.values())
        remaining_text = completion.text[len(streamed_texts["message"]) :]
        yield from self._delta_events(
            completion.thinking[len(streamed_texts["reasoning"]) :],
            remaining_text,
            remaining_call_deltas(completion.tool_calls, streamed_call_count),
        )
        if not self._items or (not completion.tool_calls and f"msg_{self._info.id}" not in self._items):
            yield from self._add_message_text("")
        statuses = {item["id"]: item["status"] for item in body["output"]}
        self._items = {id: item for id, item in self._items.items() if item.id in statuses}
        yield from self._close_items("reasoning", "message", "function_call", statuses=statuses)
        output_indices = {item.id: item.output_index for item in self._items.values()}
        body["output"].sort(key=lambda item: output_indices.get(item["id"], len(output_indices)))
        store_reply(self._request, body, self._info)
        yield {"type": f"response.{body['status']}", "response": body}

    def _item_event(self, item: _OutputItem, kind: str, **extra_fields: Any) -> Body:
        index_field = {} if item.kind == "function_call" else {"content_index": 0}
        return {"type": kind, "item_id": item.id, "output_index": item.output_index, **index_field, **extra_fields}
