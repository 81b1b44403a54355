"""`/v1/chat/completions`: the reader, the body of a reply, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import THINKING, Fields, checked
from cortexmlx.protocols.openai import choices, parameters, tools
from cortexmlx.protocols.openai.logprobs import chat_logprobs
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.request import Body, Defaults, ReplyInfo, Request, with_notes
from cortexmlx.types.logprobs import TokenLogprob
from cortexmlx.types.request import Completion, FinishReason

URL = "/v1/chat/completions"
FIELDS = Fields(
    f"a {URL} body",
    parameters.SHARED | parameters.STREAM | parameters.CHOICES | tools.FIELDS | {"messages", "top_logprobs", *THINKING},
    parameters.NO_EFFECT,
    parameters.UNSERVED,
)


@with_notes
def read(body: Mapping[str, Any], defaults: Defaults) -> Request:
    """Return the request in a body. Raises InvalidRequest."""
    said = FIELDS.without(defaults.unserved).given(body)
    thinking, variables = parameters.thinking_of(said)
    values = thinking | parameters.sampling_values(said) | tools.tool_values(said)
    number = "true or false: the number is `top_logprobs`"
    asked = checked("logprobs", said.get("logprobs", False), bool, number)
    values["logprobs"] = parameters.alternatives(said, asked, '"logprobs": true', defaults.params.logprobs)
    params = parameters.sampling_params(defaults.params, values, said)
    stream = parameters.stream_of(said, params)
    if "messages" not in said:
        raise InvalidRequest("`messages` is missing", field="messages")
    messages = read_messages(said["messages"])
    asked_for = parameters.template_variables(said, defaults, more=variables)
    ids = parameters.flag(said, "return_token_ids")
    return Request((messages,), params, asked_for, body=body, token_ids=ids, **stream)


def write(request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the body of a reply. `answers` has the answers to the only prompt."""
    written = [
        {
            "index": index,
            "message": {"role": "assistant", **_content(answer), **thoughts(answer)},
            **choices.scored_prompt(request, answer, info),
            **choices.notes(request, answer),
            **choices.token_ids(request, answer.token_ids),
            "logprobs": None if answer.logprobs is None else _logprobs(answer.logprobs, info),
            "finish_reason": answer.finish_reason.value,
        }
        for index, answer in enumerate(answers[0])
    ]
    return {**choices.reply_body("chat.completion", info, written), "usage": _usage(answers, info)}


class Chunks(choices.Chunks):
    """The chunks of a streamed reply. The first chunk of each choice has the role."""

    KIND = "chat.completion.chunk"

    def _first(self, number: int) -> Iterator[Body]:
        yield {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def _said(
        self, number: int, piece: choices.Piece, reason: FinishReason | None
    ) -> Iterator[tuple[Body, FinishReason | None]]:
        if piece:
            delta: Body = {"reasoning_content": piece.thinking} if piece.thinking else {}
            if piece.text or not (piece.thinking or piece.calls):
                delta["content"] = piece.text
            if piece.calls:
                delta["tool_calls"] = tools.delta_bodies(piece.calls)
            logprobs = _logprobs(piece.logprobs, self._info) if piece.logprobs else None
            yield {"delta": delta, "logprobs": logprobs}, None
        if reason is not None:
            yield {"delta": {}, "logprobs": None}, reason

    def _usage(self, answers: Sequence[Sequence[Completion]]) -> Body:
        return _usage(answers, self._info)


def _content(answer: Completion) -> Body:
    """Return the text and the calls of a message. Beside calls, no text is null, as in the OpenAI API."""
    if not answer.tool_calls:
        return {"content": answer.text}
    return {"content": answer.text or None, "tool_calls": tools.call_bodies(answer.tool_calls)}


def thoughts(answer: Completion) -> Body:
    """Return vLLM's field with what the model thought before its answer, or no field if it thought nothing."""
    return {"reasoning_content": answer.thinking} if answer.thinking else {}


def _logprobs(told: Sequence[TokenLogprob], info: ReplyInfo) -> Body:
    return {"content": chat_logprobs(told, info.token_bytes)}


def _usage(answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    return {**choices.usage_body(answers, info), **choices.completion_details(answers, info)}
