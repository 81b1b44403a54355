"""`/v1/chat/completions`: the reader, the body of a reply, and the chunks of a stream; and the numbered choices, which
`/v1/completions` has too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import PEER_THINKING, BodyFields, require_type
from cortexmlx.protocols.openai import parameters
from cortexmlx.protocols.openai.errors import error_body
from cortexmlx.protocols.openai.logprobs import chat_logprobs, id_logprobs
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.request import Body, ReplyInfo, Request, RequestDefaults, with_notes
from cortexmlx.structured.tools import CallDelta, ToolCall
from cortexmlx.types.logprobs import TokenLogprob
from cortexmlx.types.request import Completion, FinishReason, TokenEvent

URL = "/v1/chat/completions"
FIELDS = BodyFields(
    f"a {URL} body",
    parameters.SHARED_FIELDS
    | parameters.STREAM_FIELDS
    | parameters.CHOICE_FIELDS
    | parameters.TOOL_FIELDS
    | {"messages", "top_logprobs", *PEER_THINKING},
    parameters.NO_EFFECT,
    parameters.UNSERVED,
)


@with_notes
def read(body: Mapping[str, Any], defaults: RequestDefaults) -> Request:
    """Parse the JSON body of a `/v1/chat/completions` call into a Request. Raises InvalidRequest."""
    fields = FIELDS.exclude(defaults.unserved).validate(body)
    thinking, variables = parameters.read_thinking(fields)
    values = thinking | parameters.read_sampling(fields) | parameters.read_tools(fields)
    must_be = "true or false: the number is `top_logprobs`"
    wants_logprobs = require_type("logprobs", fields.get("logprobs", False), bool, must_be)
    values["logprobs"] = parameters.read_top_logprobs(
        fields, wants_logprobs, '"logprobs": true', defaults.params.logprobs
    )
    params = parameters.build_sampling_params(defaults.params, values, fields)
    stream = parameters.read_stream_fields(fields, params)
    if "messages" not in fields:
        raise InvalidRequest("`messages` is missing", field="messages")
    messages = read_messages(fields["messages"], images=defaults.image_parts())
    template_vars = parameters.template_variables(fields, defaults, extra_vars=variables)
    ids = parameters.read_flag(fields, "return_token_ids")
    return Request((messages,), params, template_vars, body=body, token_ids=ids, **stream)


def write(request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the JSON body of a chat completion. `answers` has the only prompt's answers, which become its choices."""
    choice_bodies = [
        {
            "index": index,
            "message": {"role": "assistant", **_message_content(answer), **reasoning_field(answer)},
            **prompt_logprobs_field(request, answer, info),
            **notes_field(request, answer),
            **token_ids_field(request, answer.token_ids),
            "logprobs": None if answer.logprobs is None else _logprobs_body(answer.logprobs, info),
            "finish_reason": answer.finish_reason.value,
        }
        for index, answer in enumerate(answers[0])
    ]
    return {**reply_body("chat.completion", info, choice_bodies), "usage": _chat_usage(answers, info)}


def _message_content(answer: Completion) -> Body:
    """Return a message's `content` and `tool_calls`. Beside calls, an empty text is null, as in the OpenAI API."""
    if not answer.tool_calls:
        return {"content": answer.text}
    return {"content": answer.text or None, "tool_calls": tool_call_bodies(answer.tool_calls)}


def reasoning_field(answer: Completion) -> Body:
    """Return the field `reasoning_content` with the model's thoughts, or no field if there are none."""
    return {"reasoning_content": answer.thinking} if answer.thinking else {}


def _logprobs_body(logprobs: Sequence[TokenLogprob], info: ReplyInfo) -> Body:
    """Return the `logprobs` object of a chat choice."""
    return {"content": chat_logprobs(logprobs, info.token_bytes)}


def _chat_usage(answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the `usage` of a chat completion, with the details of its completion tokens."""
    return {**usage_body(answers, info), **completion_token_details(answers, info)}


# Parts of replies with numbered choices.


def reply_body(kind: str, info: ReplyInfo, choices: Sequence[Body]) -> Body:
    """Return the body of a reply or a chunk with these choices. `kind` is the value of its field `object`."""
    return {
        "id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{info.id}",
        "object": kind,
        "created": info.created,
        "model": info.model,
        "choices": list(choices),
    }


def prompt_logprobs_field(request: Request, answer: Completion, info: ReplyInfo) -> Body:
    """Return vLLM's `prompt_logprobs` for a prompt's first choice. With `echo`, they are in its `logprobs` instead."""
    if answer.prompt_logprobs is None or request.echo or answer.index:
        return {}
    return {"prompt_logprobs": id_logprobs(answer.prompt_logprobs, info.token_bytes)}


def notes_field(request: Request, answer: Completion) -> Body:
    """Return our own field `notes`: what of the body was changed, and what of a lenient schema was not enforced."""
    notes = [*request.notes, *answer.notes]
    return {"notes": notes} if notes else {}


def token_ids_field(request: Request, ids: Sequence[int]) -> Body:
    """Return vLLM's field `token_ids`, or no field if the request does not ask for it."""
    return {"token_ids": list(ids)} if request.token_ids else {}


def completion_token_details(answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return `completion_tokens_details`: how many tokens were thoughts, and how many were drafted and accepted.

    The OpenAI API has fields for the tokens of a `prediction`. The rejected ones of them are tokens of the completion
    there, and cost money. Drafts of the engine's own are not: they have fields of our own.
    """
    usages = [answer.usage for prompt_answers in answers for answer in prompt_answers]
    details = {"reasoning_tokens": sum(usage.thinking_tokens for usage in usages)}
    if not info.repeatable:
        details["drafted_tokens"] = sum(usage.drafted_tokens for usage in usages)
        details["accepted_tokens"] = sum(usage.accepted_tokens for usage in usages)
    return {"completion_tokens_details": details}


def usage_body(answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return `usage`, also of completions: the tokens of all prompts and answers. A prompt counts once, however many
    answers it has.
    """
    prompt_usages = [prompt_answers[0].usage for prompt_answers in answers]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompt_usages)
    completion_tokens = sum(answer.usage.completion_tokens for own in answers for answer in own)
    usage: Body = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if not info.repeatable:
        usage["prompt_tokens_details"] = {"cached_tokens": sum(usage.cached_tokens for usage in prompt_usages)}
    return usage


def tool_call_bodies(calls: Sequence[ToolCall]) -> list[Body]:
    """Return the `tool_calls` of a message."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def tool_call_deltas(deltas: Sequence[CallDelta]) -> list[Body]:
    """Return the `tool_calls` of a chunk. The first piece of a call has its id and its name."""
    return [
        {
            "index": delta.index,
            **({"id": delta.id, "type": "function"} if delta.name else {}),
            "function": {**({"name": delta.name} if delta.name else {}), "arguments": delta.arguments},
        }
        for delta in deltas
    ]


def remaining_call_deltas(calls: Sequence[ToolCall], first: int) -> tuple[CallDelta, ...]:
    """Return the calls from number `first` on, each as one complete CallDelta."""
    return tuple(CallDelta(first + n, call.id, call.name, call.arguments) for n, call in enumerate(calls[first:]))


# Streams of chunks.


@dataclass
class _ChoiceProgress:
    """How much of a choice was streamed so far: characters, tokens, tokens with log-probabilities, and calls."""

    text: int = 0
    thinking: int = 0
    ids: int = 0
    pending_ids: list[int] = field(default_factory=list)
    """The ids of tokens that no chunk has yet, since their text waits."""
    tokens: int = 0
    calls: int = 0
    is_finished: bool = False


@dataclass(frozen=True)
class ChoiceDelta:
    """What the next chunk adds to a choice: text, thoughts, log-probabilities, calls, ids. Falsy if nothing but ids."""

    text: str
    thinking: str
    logprobs: Sequence[TokenLogprob]
    calls: Sequence[CallDelta] = ()
    ids: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.logprobs or self.calls)


class ChoiceChunks(ABC):
    """Converts the engine's events into the chunks of a streamed reply. Together they have a whole reply's content.

    All choices begin in order before one of them continues. The OpenAI package fails if a choice other than the first
    begins first.
    """

    KIND: str

    def __init__(self, request: Request, info: ReplyInfo) -> None:
        self._request = request
        self._info = info
        self._choice_progress: list[_ChoiceProgress] = []
        self._answers: dict[int, tuple[Completion, ...]] = {}
        self._prompt_tokens = 0
        """Of the prompt, once they are known: the progress of an answer that has lost its row counts its own, too."""

    def convert(self, event: TokenEvent, prompt: int = 0) -> list[Body]:
        """Return the chunks for an event of this prompt: mostly one, none for progress, an error body for an error."""
        if event.error is not None:
            return [error_body(event.error)]
        if event.progress is not None:
            return []
        opening_chunks = [] if self._choice_progress else self._start_choices()
        if event.completion is not None:
            return opening_chunks + self._finish(event.completion, prompt)
        ids = () if event.token_id is None else (event.token_id,)
        logprobs = () if event.logprob is None else (event.logprob,)
        choice_delta = ChoiceDelta(event.text, event.thinking, logprobs, event.tool_calls, ids)
        number = self._choice_number(prompt, event.index)
        return opening_chunks + self._add_delta(number, choice_delta, event.finish_reason, event.notes)

    def _start_choices(self) -> list[Body]:
        """Start all choices, and return their first chunks."""
        count = len(self._request.prompts) * self._request.params.n
        self._choice_progress = [_ChoiceProgress() for _ in range(count)]
        return [
            self._chunk_body(number, first, None) for number in range(count) for first in self._opening_fields(number)
        ]

    def _add_delta(
        self, number: int, choice_delta: ChoiceDelta, reason: FinishReason | None, notes: Sequence[str]
    ) -> list[Body]:
        """Add a delta to a choice, which ends if there is a `reason`, with `notes`. Return the chunks for that."""
        progress = self._choice_progress[number]
        progress.text += len(choice_delta.text)
        progress.thinking += len(choice_delta.thinking)
        progress.tokens += len(choice_delta.logprobs)
        progress.calls = max([progress.calls, *(delta.index + 1 for delta in choice_delta.calls)])
        progress.ids += len(choice_delta.ids)
        progress.pending_ids += choice_delta.ids
        progress.is_finished = reason is not None
        chunks = [
            self._chunk_body(number, *fields_and_reason)
            for fields_and_reason in self._delta_fields(number, choice_delta, reason)
        ]
        if reason is not None and (all_notes := [*self._request.notes, *notes]):
            chunks[-1]["choices"][0]["notes"] = all_notes
        if chunks:
            chunks[0]["choices"][0] |= token_ids_field(self._request, progress.pending_ids)
            progress.pending_ids.clear()
        return chunks

    def _finish(self, completion: Completion, prompt: int) -> list[Body]:
        """Return chunks with the part of each answer that was not streamed yet. With `best_of` that is the whole
        answer, because the best answers are chosen at the end. After the answers to all prompts comes the usage, if
        the request asks for it.
        """
        chunks, self._answers[prompt] = [], (completion, *completion.others)
        for answer in self._answers[prompt]:
            number = self._choice_number(prompt, answer.index)
            progress = self._choice_progress[number]
            if not progress.is_finished:
                text, thinking = answer.text[progress.text :], answer.thinking[progress.thinking :]
                calls = remaining_call_deltas(answer.tool_calls, progress.calls)
                ids = answer.token_ids[progress.ids :]
                rest = ChoiceDelta(text, thinking, (answer.logprobs or ())[progress.tokens :], calls, ids)
                chunks += self._add_delta(number, rest, answer.finish_reason, answer.notes)
        if self._request.include_usage and len(self._answers) == len(self._request.prompts):
            usage = self._total_usage([self._answers[each] for each in range(len(self._answers))])
            chunks.append({**reply_body(self.KIND, self._info, []), "usage": usage})
        return chunks

    def _choice_number(self, prompt: int, index: int) -> int:
        """Return a choice's number in the reply, from its prompt's number and its index among the prompt's answers."""
        return prompt * self._request.params.n + index

    def _chunk_body(self, number: int, fields: Body, reason: FinishReason | None) -> Body:
        """Return a chunk with one choice."""
        choice = {"index": number, **fields, "finish_reason": None if reason is None else reason.value}
        usage = {"usage": self._usage_so_far() if self._request.usage_so_far else None}
        return {**reply_body(self.KIND, self._info, [choice]), **(usage if self._request.include_usage else {})}

    def _usage_so_far(self) -> Body:
        """Return the `usage` of a chunk: the tokens of the prompt and those written so far."""
        if not self._prompt_tokens and (progress := self._info.progress()) is not None:
            self._prompt_tokens = progress.total
        prompt_tokens, completion_tokens = self._prompt_tokens, sum(each.ids for each in self._choice_progress)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    @abstractmethod
    def _opening_fields(self, number: int) -> Iterator[Body]:
        """Yield the fields of the chunks that open a choice, before its answer."""

    @abstractmethod
    def _delta_fields(
        self, number: int, choice_delta: ChoiceDelta, reason: FinishReason | None
    ) -> Iterator[tuple[Body, FinishReason | None]]:
        """Yield, for each chunk, the fields that a delta adds, and the finish reason: `reason` in the last chunk."""

    @abstractmethod
    def _total_usage(self, answers: Sequence[Sequence[Completion]]) -> Body:
        """Return the usage of the whole reply."""


class ChatChunks(ChoiceChunks):
    """Converts the engine's events into chat completion chunks. The first chunk of each choice has the role."""

    KIND = "chat.completion.chunk"

    def _opening_fields(self, number: int) -> Iterator[Body]:
        yield {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def _delta_fields(
        self, number: int, choice_delta: ChoiceDelta, reason: FinishReason | None
    ) -> Iterator[tuple[Body, FinishReason | None]]:
        if choice_delta:
            delta: Body = {"reasoning_content": choice_delta.thinking} if choice_delta.thinking else {}
            if choice_delta.text or not (choice_delta.thinking or choice_delta.calls):
                delta["content"] = choice_delta.text
            if choice_delta.calls:
                delta["tool_calls"] = tool_call_deltas(choice_delta.calls)
            logprobs = _logprobs_body(choice_delta.logprobs, self._info) if choice_delta.logprobs else None
            yield {"delta": delta, "logprobs": logprobs}, None
        if reason is not None:
            yield {"delta": {}, "logprobs": None}, reason

    def _total_usage(self, answers: Sequence[Sequence[Completion]]) -> Body:
        return _chat_usage(answers, self._info)
