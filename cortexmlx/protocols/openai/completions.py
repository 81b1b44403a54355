"""`/v1/completions`: the reader, the body of a reply, and the chunks of a stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import Fields, inside
from cortexmlx.protocols.openai import chat_completions as choices
from cortexmlx.protocols.openai import parameters
from cortexmlx.protocols.openai.chat_completions import ChoiceChunks, ChoicePiece
from cortexmlx.protocols.openai.logprobs import CompletionLogprobs
from cortexmlx.protocols.request import Asked, Body, Defaults, ReplyInfo, Request, is_tokens, read_prompt, with_notes
from cortexmlx.types.request import Completion, FinishReason

URL = "/v1/completions"
FIELDS = Fields(
    f"a {URL} body",
    parameters.SHARED | parameters.STREAM | parameters.CHOICES | {"prompt", "echo"},
    parameters.NO_EFFECT,
    {**parameters.UNSERVED, **parameters.TOOLLESS},
)
KIND = "text_completion"

_MOST_PROMPTS = 2048


@with_notes
def read(body: Mapping[str, Any], defaults: Defaults) -> Request:
    """Return the request in a body. Its prompts do not go through the chat template."""
    said = FIELDS.without(defaults.unserved).given(body)
    echo = parameters.flag(said, "echo")
    values = parameters.sampling_values(said)
    if echo and values.get("logprobs") is not None:
        values.setdefault("prompt_logprobs", values["logprobs"])
    params = parameters.sampling_params(defaults.params, values, said)
    stream = parameters.stream_of(said, params)
    prompts = _prompts(said.get("prompt"))
    variables = parameters.template_variables(said, defaults, templated=False)
    ids = parameters.flag(said, "return_token_ids")
    return Request(prompts, params, variables, raw=True, echo=echo, body=body, token_ids=ids, **stream)


def write(request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the body of a reply. Its choices are the answers to all prompts, in order."""
    each = [(prompt, answer) for prompt, own in zip(request.prompts, answers, strict=True) for answer in own]
    written = [{"index": index, **_choice(request, *one, info)} for index, one in enumerate(each)]
    return {**choices.reply_body(KIND, info, written), "usage": choices.usage_body(answers, info)}


class CompletionChunks(ChoiceChunks):
    """The chunks of a streamed reply."""

    KIND = KIND

    def __init__(self, request: Request, info: ReplyInfo) -> None:
        super().__init__(request, info)
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(lambda: CompletionLogprobs(info.token_bytes))

    def _first(self, number: int) -> Iterator[Body]:
        if self._request.echo:
            text = _echo(self._request.prompts[number // self._request.params.n], self._info)
            self._logprobs[number].add_text(text)
            yield {"text": text, "logprobs": None}

    def _said(
        self, number: int, piece: ChoicePiece, reason: FinishReason | None
    ) -> Iterator[tuple[Body, FinishReason | None]]:
        logprobs = self._logprobs[number]
        logprobs.add_tokens((token.token_id for token in piece.logprobs), piece.logprobs)
        logprobs.add_text(piece.text)
        told = logprobs.take(whole=reason is not None)
        if piece.text or told["tokens"] or reason is not None:
            yield {"text": piece.text, "logprobs": told if told["tokens"] else None}, reason

    def _usage(self, answers: Sequence[Sequence[Completion]]) -> Body:
        return choices.usage_body(answers, self._info)


def _prompts(prompt: Any) -> tuple[Asked, ...]:
    with inside("prompt"):
        if isinstance(prompt, list) and prompt and not is_tokens(prompt):
            if len(prompt) > _MOST_PROMPTS:
                raise InvalidRequest(f"`prompt` is a list of {len(prompt)}, but must have {_MOST_PROMPTS} at most")
            return tuple(_one_of_many(each, place) for place, each in enumerate(prompt))
        return (read_prompt(prompt, "`prompt`"),)


def _one_of_many(prompt: Any, place: int) -> Asked:
    with inside(f"[{place}]"):
        return read_prompt(prompt, "each of the list in `prompt`")


def _choice(request: Request, prompt: Asked, answer: Completion, info: ReplyInfo) -> Body:
    text = (_echo(prompt, info) if request.echo else "") + answer.text
    logprobs = None
    if answer.logprobs is not None:
        lists = CompletionLogprobs(info.token_bytes)
        if request.echo and answer.prompt_logprobs is not None:
            lists.add_tokens(answer.prompt_logprobs.tokens, answer.prompt_logprobs)
        lists.add_tokens((token.token_id for token in answer.logprobs), answer.logprobs)
        lists.add_text(text)
        logprobs = lists.take(whole=True)
    said = {"text": text, **choices.scored_prompt(request, answer, info), **choices.notes(request, answer)}
    said |= choices.token_ids(request, answer.token_ids)
    return {**said, "logprobs": logprobs, "finish_reason": answer.finish_reason.value}


def _echo(prompt: Any, info: ReplyInfo) -> str:
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(info.token_bytes, prompt)).decode("utf-8", "replace")
