"""`/v1/completions`: the reader, the body of a reply, and the chunks of a stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import BodyFields, prefix_error_field
from cortexmlx.protocols.openai import chat_completions, parameters
from cortexmlx.protocols.openai.chat_completions import ChoiceChunks, ChoiceDelta
from cortexmlx.protocols.openai.logprobs import CompletionLogprobs
from cortexmlx.protocols.request import (
    Body,
    PromptInput,
    ReplyInfo,
    Request,
    RequestDefaults,
    is_token_list,
    read_prompt,
    with_notes,
)
from cortexmlx.types.request import Completion, FinishReason

URL = "/v1/completions"
FIELDS = BodyFields(
    f"a {URL} body",
    parameters.SHARED_FIELDS | parameters.STREAM_FIELDS | parameters.CHOICE_FIELDS | {"prompt", "echo"},
    parameters.NO_EFFECT,
    {**parameters.UNSERVED, **parameters.UNSERVED_TOOL_FIELDS},
)
KIND = "text_completion"

_MAX_PROMPTS = 2048


@with_notes
def read(body: Mapping[str, Any], defaults: RequestDefaults) -> Request:
    """Parse the JSON body of a `/v1/completions` call into a Request. Its prompts skip the chat template."""
    fields = FIELDS.exclude(defaults.unserved).validate(body)
    echo = parameters.read_flag(fields, "echo")
    values = parameters.read_sampling(fields)
    if echo and values.get("logprobs") is not None:
        values.setdefault("prompt_logprobs", values["logprobs"])
    params = parameters.build_sampling_params(defaults.params, values, fields)
    stream = parameters.read_stream_fields(fields, params)
    prompts = _read_prompts(fields.get("prompt"))
    variables = parameters.template_variables(fields, defaults, uses_template=False)
    ids = parameters.read_flag(fields, "return_token_ids")
    return Request(prompts, params, variables, raw=True, echo=echo, body=body, token_ids=ids, **stream)


def write(request: Request, answers: Sequence[Sequence[Completion]], info: ReplyInfo) -> Body:
    """Return the JSON body of a completion. Its choices are the answers to all prompts, in order."""
    pairs = [
        (prompt, answer)
        for prompt, prompt_answers in zip(request.prompts, answers, strict=True)
        for answer in prompt_answers
    ]
    choice_bodies = [{"index": index, **_choice_body(request, *pair, info)} for index, pair in enumerate(pairs)]
    return {
        **chat_completions.reply_body(KIND, info, choice_bodies),
        "usage": chat_completions.usage_body(answers, info),
    }


class CompletionChunks(ChoiceChunks):
    """Converts the engine's events into the chunks of a streamed `/v1/completions` reply."""

    KIND = KIND

    def __init__(self, request: Request, info: ReplyInfo) -> None:
        super().__init__(request, info)
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(lambda: CompletionLogprobs(info.token_bytes))

    def _opening_fields(self, number: int) -> Iterator[Body]:
        if self._request.echo:
            text = _prompt_text(self._request.prompts[number // self._request.params.n], self._info)
            self._logprobs[number].add_text(text)
            yield {"text": text, "logprobs": None}

    def _delta_fields(
        self, number: int, choice_delta: ChoiceDelta, reason: FinishReason | None
    ) -> Iterator[tuple[Body, FinishReason | None]]:
        logprobs = self._logprobs[number]
        logprobs.add_tokens((token.token_id for token in choice_delta.logprobs), choice_delta.logprobs)
        logprobs.add_text(choice_delta.text)
        logprob_lists = logprobs.pop_lists(is_complete=reason is not None)
        if choice_delta.text or logprob_lists["tokens"] or reason is not None:
            yield {"text": choice_delta.text, "logprobs": logprob_lists if logprob_lists["tokens"] else None}, reason

    def _total_usage(self, answers: Sequence[Sequence[Completion]]) -> Body:
        return chat_completions.usage_body(answers, self._info)


def _read_prompts(prompt: Any) -> tuple[PromptInput, ...]:
    """Return the prompts of the field `prompt`: one text, one list of token ids, or a list of either."""
    with prefix_error_field("prompt"):
        if isinstance(prompt, list) and prompt and not is_token_list(prompt):
            if len(prompt) > _MAX_PROMPTS:
                raise InvalidRequest(f"`prompt` is a list of {len(prompt)}, but must have {_MAX_PROMPTS} at most")
            return tuple(_read_listed_prompt(each, index) for index, each in enumerate(prompt))
        return (read_prompt(prompt, "`prompt`"),)


def _read_listed_prompt(prompt: Any, index: int) -> PromptInput:
    """Return one prompt of a list. `index` is its index, for errors."""
    with prefix_error_field(f"[{index}]"):
        return read_prompt(prompt, "each of the list in `prompt`")


def _choice_body(request: Request, prompt: PromptInput, answer: Completion, info: ReplyInfo) -> Body:
    text = (_prompt_text(prompt, info) if request.echo else "") + answer.text
    logprobs = None
    if answer.logprobs is not None:
        lists = CompletionLogprobs(info.token_bytes)
        if request.echo and answer.prompt_logprobs is not None:
            lists.add_tokens(answer.prompt_logprobs.tokens, answer.prompt_logprobs)
        lists.add_tokens((token.token_id for token in answer.logprobs), answer.logprobs)
        lists.add_text(text)
        logprobs = lists.pop_lists(is_complete=True)
    body = {
        "text": text,
        **chat_completions.prompt_logprobs_field(request, answer, info),
        **chat_completions.notes_field(request, answer),
    }
    body |= chat_completions.token_ids_field(request, answer.token_ids)
    return {**body, "logprobs": logprobs, "finish_reason": answer.finish_reason.value}


def _prompt_text(prompt: Any, info: ReplyInfo) -> str:
    """Return the text of a prompt, which an answer with `echo` begins with."""
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(info.token_bytes, prompt)).decode("utf-8", "replace")
