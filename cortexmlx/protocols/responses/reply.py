"""The body of a response, before there is an answer and after."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cortexmlx.protocols.openai.chat_completions import whole
from cortexmlx.protocols.openai.errors import error_body
from cortexmlx.protocols.openai.logprobs import chat_logprobs
from cortexmlx.protocols.request import Body, ReplyInfo, Request
from cortexmlx.protocols.responses.offered import INPUT, Callee, shown_choice
from cortexmlx.protocols.responses.reader import Details, details_of
from cortexmlx.structured.tools import CallDelta, loaded
from cortexmlx.types.logprobs import TokenLogprob
from cortexmlx.types.request import Completion, FinishReason, TokenEvent


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


# The events of a streamed response: what is added to which item of its output, and the response itself at the end.


@dataclass
class _Item:
    """An item of the output that has begun. `text` is what was said of it so far."""

    place: int
    id: str
    kind: str
    text: str = ""
    call_id: str = ""
    callee: Callee = field(default_factory=lambda: Callee(""))
    ended: bool = False

    def body(self, status: str) -> Body:
        """Return the item with what was said of it."""
        if self.kind == "function_call":
            return call_item(self.number, self.callee, status, self.call_id, self.text)
        body: Body = {"id": self.id, "type": self.kind, "status": status}
        content = [] if status == "in_progress" else [self.part(self.text)]
        if self.kind == "reasoning":
            return {**body, "summary": [], "content": content}
        return {**body, "role": "assistant", "content": content}

    @property
    def number(self) -> str:
        """The id without its prefix."""
        return self.id.partition("_")[2]

    def part(self, text: str) -> Body:
        """Return the item's only part of content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


_SAID = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
"""What the events of an item's text are called."""


class ResponseEvents:
    """The events of one streamed response, from the engine's events. Each is a body with a `type`."""

    def __init__(self, request: Request, info: ReplyInfo) -> None:
        self._request = request
        self._info = info
        self._details = details_of(request)
        self._number = 0
        self._items: dict[str, _Item] = {}
        self._begun = False

    def of(self, event: TokenEvent, prompt: int = 0) -> list[Body]:
        """Return the events of one event of the engine. The error of a failed request becomes `response.failed`."""
        return [self._numbered(body) for body in self._of(event)]

    def _of(self, event: TokenEvent) -> Iterator[Body]:
        if not self._begun and event.progress is None:
            self._begun = True
            begun = unanswered(self._request, self._info, "in_progress")
            for kind in ("created", "in_progress"):
                yield {"type": f"response.{kind}", "response": begun}
        if event.error is not None:
            error = error_body(event.error)["error"]
            failed = {"code": error["code"] or "server_error", "message": error["message"]}
            body = {**unanswered(self._request, self._info, "failed"), "error": failed}
            yield {"type": "response.failed", "response": body}
        elif event.completion is not None:
            yield from self._end(event.completion)
        elif event.progress is None:
            logprobs = () if event.logprob is None else (event.logprob,)
            yield from self._grow(event.thinking, event.text, event.tool_calls, logprobs)

    def _grow(
        self,
        thinking: str,
        text: str,
        calls: tuple[CallDelta, ...] | list[CallDelta],
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Iterator[Body]:
        if thinking:
            yield from self._say("reasoning", f"rs_{self._info.id}", thinking)
        if text or logprobs:
            yield from self._close("reasoning")
            told = {"logprobs": chat_logprobs(logprobs, self._info.token_bytes)}
            yield from self._say("message", f"msg_{self._info.id}", text, told)
        for delta in calls:
            yield from self._close("reasoning")
            yield from self._say("function_call", f"fc_{self._info.id}_{delta.index}", delta.arguments, call=delta)

    def _say(
        self, kind: str, id: str, text: str, more: Body | None = None, call: CallDelta | None = None
    ) -> Iterator[Body]:
        """Yield the events of more text of an item, which begins with it."""
        item = self._items.get(id)
        if item is None:
            item = self._items[id] = _Item(len(self._items), id, kind)
            if call is not None:
                item.call_id, item.callee = call.id, self._details.offered.callee(call.name)
                item.id = item.body("in_progress")["id"]
            yield {"type": "response.output_item.added", "output_index": item.place, "item": item.body("in_progress")}
            if call is None:
                yield self._at(item, "response.content_part.added", part=item.part(""))
        item.text += text
        if (text or more) and not item.callee.custom:
            yield self._at(item, f"response.{_SAID[kind]}.delta", delta=text, **(more or {}))

    def _close(self, *kinds: str, status: str = "completed") -> Iterator[Body]:
        """Yield the ends of the items of these kinds that have not ended."""
        for item in list(self._items.values()):
            if item.kind not in kinds or item.ended:
                continue
            if item.callee.custom:
                yield from self._custom(item)
            elif item.kind == "function_call":
                done = "response.function_call_arguments.done"
                yield self._at(item, done, name=item.callee.name, arguments=item.text)
            else:
                told: Body = {"logprobs": []} if item.kind == "message" else {}
                yield self._at(item, f"response.{_SAID[item.kind]}.done", text=item.text, **told)
                yield self._at(item, "response.content_part.done", part=item.part(item.text))
            body = item.body("completed" if item.kind == "function_call" else status)
            if item.kind == "reasoning":
                body |= sealed_thoughts(item.text, self._details, self._info)
            yield {"type": "response.output_item.done", "output_index": item.place, "item": body}
            item.ended = True

    def _custom(self, item: _Item) -> Iterator[Body]:
        """Yield the input of a custom tool. The model writes it as JSON, so it is told in one piece."""
        text = custom_input(item.text)
        yield self._at(item, "response.custom_tool_call_input.delta", delta=text)
        yield self._at(item, "response.custom_tool_call_input.done", input=text)

    def _end(self, completion: Completion) -> Iterator[Body]:
        """Yield what no event has said yet, and the whole response."""
        body = whole_body(self._request, completion, self._info)
        said = {kind: next((i.text for i in self._items.values() if i.kind == kind), "") for kind in _SAID}
        told = sum(item.kind == "function_call" for item in self._items.values())
        rest = completion.text[len(said["message"]) :]
        yield from self._grow(completion.thinking[len(said["reasoning"]) :], rest, whole(completion.tool_calls, told))
        if not self._items or (not completion.tool_calls and f"msg_{self._info.id}" not in self._items):
            yield from self._say("message", f"msg_{self._info.id}", "")
        complete = {f"fc_{self._info.id}_{number}" for number in range(len(completion.tool_calls))}
        self._items = {id: item for id, item in self._items.items() if item.kind != "function_call" or id in complete}
        yield from self._close("reasoning", "message", "function_call", status=body["status"])
        places = {item.id: item.place for item in self._items.values()}
        body["output"].sort(key=lambda item: places.get(item["id"], len(places)))
        keep(self._request, body, self._info)
        yield {"type": f"response.{body['status']}", "response": body}

    def _at(self, item: _Item, kind: str, **more: Any) -> Body:
        place = {} if item.kind == "function_call" else {"content_index": 0}
        return {"type": kind, "item_id": item.id, "output_index": item.place, **place, **more}

    def _numbered(self, body: Body) -> Body:
        self._number += 1
        return {**body, "sequence_number": self._number - 1}
