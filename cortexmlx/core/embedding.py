"""Embedder: embeddings of texts, and how well documents answer a query. Both are requests without an answer."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from math import sqrt
from numbers import Integral
from typing import Any

import numpy as np

from cortexmlx.core.answers import NAN_ADVICE
from cortexmlx.core.arguments import checked_client, checked_text, is_list
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.text import StopConditions
from cortexmlx.core.worker import Submission, Worker
from cortexmlx.errors import EmbeddingRefused
from cortexmlx.execution.boundary import Vector
from cortexmlx.kv.prefix import common_prefix_length
from cortexmlx.models.embedding import DEFAULT_INSTRUCTION, EmbeddingSettings, normalize
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.types.embeddings import EmbeddingInfo, Embeddings, PoolingSpec, Reranking
from cortexmlx.types.request import FinishReason, QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams


class Embedder:
    """Embeds texts and reranks documents for an `Engine`: runs prompts for hidden states or logits, not for answers."""

    def __init__(self, worker: Worker, tokenizer: SharedTokenizer, vocab_size: int) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def embed(
        self,
        owner: object,
        texts: Sequence[str | Sequence[int]],
        prompt: str | None,
        dimensions: int | None,
        truncate: bool,
        client: str,
    ) -> Embeddings:
        """Return the embeddings of texts: see `Engine.embed`. The requests keep `owner` alive."""
        self._worker.check_open()
        support = self._worker.core.model.embedding
        info, files = support.info, support.files
        if info is None or files is None:
            raise EmbeddingRefused(support.not_embedding)
        dimension_count = _checked_dimensions(dimensions, info)
        text_list = _checked_texts("texts", texts)
        limit_reason = support.limit_reason(info.max_tokens)
        reader = EmbeddingTokenizer(self._tokenizer, files, info, self._vocab_size, prompt, truncate, limit_reason)
        divisors, counts, truncated = list[float](), list[int](), list[bool]()

        def make_prompts() -> Iterator[PoolingPrompt]:
            for index, text in enumerate(text_list):
                embedding_input = reader.tokenize(index, text)  # type: ignore[arg-type]  # it says what is no text
                divisors.append(embedding_input.divisor)
                counts.append(embedding_input.count)
                truncated.append(embedding_input.is_truncated)
                yield PoolingPrompt(embedding_input.tokens, embedding_input.pooling_spec)

        results = self._run_prompts(owner, make_prompts(), client)
        return Embeddings(
            _finish_embeddings([each.vector for each in results], divisors, files, dimension_count),
            tuple(counts),
            tuple(each.cached for each in results),
            tuple(truncated),
        )

    def rerank(
        self,
        owner: object,
        query: str,
        documents: Sequence[str],
        instruction: str | None,
        truncate: bool,
        client: str,
    ) -> Reranking:
        """Return how well documents answer a query: see `Engine.rerank`. The requests keep `owner` alive."""
        self._worker.check_open()
        support = self._worker.core.model.embedding
        reranker = support.reranker
        if reranker is None:
            raise EmbeddingRefused(support.not_reranking)
        query = _checked_utf8("query", query)
        instruction = DEFAULT_INSTRUCTION if instruction is None else _checked_utf8("instruction", instruction)
        document_list = [
            _checked_utf8(f"document {i}", d) for i, d in enumerate(_checked_texts("documents", documents))
        ]
        encode = partial(
            first_tokens, partial(self._tokenizer.encode, add_special_tokens=False), max_tokens=support.max_tokens
        )
        fixed_token_count = reranker.count_fixed_tokens(encode, instruction, query)
        if fixed_token_count >= support.max_tokens:
            raise EmbeddingRefused(
                f"instruction and query have {at_least_prefix(instruction, query)}{fixed_token_count} tokens with what "
                f"is around them and without a document, and {support.limit_reason(support.max_tokens)}: shorten them"
            )
        head, counts = reranker.encode_shared_prefix(encode, instruction, query), list[int]()

        def make_prompts() -> Iterator[PoolingPrompt]:
            for index, document in enumerate(document_list):
                tokens, full_token_count = reranker.encode_document(
                    encode, instruction, query, document, support.max_tokens
                )
                if full_token_count > len(tokens) and not truncate:
                    at_least_text = at_least_prefix(instruction, query, document)
                    raise EmbeddingRefused(
                        f"document {index} has {at_least_text}{full_token_count} tokens with the query and what is "
                        f"around it, and {support.limit_reason(support.max_tokens)}: shorten it, or cut off its end "
                        "with `truncate`"
                    )
                counts.append(len(tokens))
                shared = min(common_prefix_length(tokens, head), len(tokens) - 1)
                yield PoolingPrompt(
                    tuple(tokens), PoolingSpec(len(tokens) - 1, False, (reranker.yes, reranker.no), shared)
                )

        results = self._run_prompts(owner, make_prompts(), client)
        scores = tuple(_sigmoid(float(each.vector[0]) - float(each.vector[1])) for each in results)
        return Reranking(scores, sum(counts), sum(each.cached for each in results))

    def _run_prompts(self, owner: object, prompts: Iterator[PoolingPrompt], client: str) -> list[PoolingResult]:
        """Run the prompts and return their results, in order."""
        client_name = checked_client(client) or None
        tokens_ahead = 2 * self._worker.core.scheduler.config.max_prefill_budget
        with closing(run_pooling(prompts, self._worker.submit, owner, client_name, tokens_ahead)) as vectors:  # type: ignore[type-var]
            return list(vectors)


def _finish_embeddings(
    sums: list[Vector], divisors: list[float], files: EmbeddingSettings, dimension_count: int
) -> Vector:
    """Return embeddings `[n, dimension_count]`: means of hidden states, through dense layers, and normalized."""
    if not sums:
        return np.zeros((0, dimension_count), np.float32)
    if sums[0].shape != (files.width,):
        raise EmbeddingRefused(
            f"the model's states have {sums[0].size} numbers, and its 1_Pooling is made for {files.width}: take the "
            "files of one model"
        )
    vectors = (np.stack(sums) / np.array(divisors)[:, None]).astype(np.float32)
    for layer in files.layers:
        vectors = layer(vectors)
    if dimension_count < vectors.shape[1]:
        vectors = normalize(vectors[:, :dimension_count]) if files.normalized else vectors[:, :dimension_count]
    return np.ascontiguousarray(vectors)


def _sigmoid(log_odds: float) -> float:
    """Return the probability that these log-odds stand for."""
    return 1 / (1 + math.exp(-log_odds)) if log_odds >= 0 else 1 - 1 / (1 + math.exp(log_odds))


def _checked_dimensions(dimensions: int | None, info: EmbeddingInfo) -> int:
    """Return how many dimensions to keep; None: all of the model's. Raises EmbeddingRefused if out of range."""
    if dimensions is None:
        return info.dimensions
    is_integer = isinstance(dimensions, Integral) and not isinstance(dimensions, bool)
    if not is_integer or not 1 <= dimensions <= info.dimensions:
        raise EmbeddingRefused(
            f"dimensions is {dimensions!r:.80}, but must be in 1..{info.dimensions}, the numbers of a whole vector"
        )
    return int(dimensions)


def _checked_texts(name: str, texts: object) -> list[object]:
    """Return the texts as a list. Raises EmbeddingRefused for a single text, or for anything that is no list."""
    if isinstance(texts, str) or not is_list(texts):
        raise EmbeddingRefused(f"{name} are a list of texts, not {texts!r:.80}: put a single one into a list")
    return list(texts)


def _checked_utf8(name: str, text: object) -> str:
    """Return a text as a plain `str` of valid characters. Raises EmbeddingRefused if it is no text."""
    if not isinstance(text, str):
        raise EmbeddingRefused(f"{name} is {text!r:.80}, but must be a text")
    return str(checked_text(name, text)).encode("utf-8", "replace").decode()


# Submits requests without answers, some ahead of the one that is waited for, and collects their vectors in order.


_PARAMS = SamplingParams(max_tokens=1)
_STOPS = StopConditions.from_params(_PARAMS, (), None)

_MAX_AHEAD = 512
"""Requests that are submitted and not yet returned at most."""


@dataclass(frozen=True)
class PoolingPrompt:
    """A prompt's tokens, and what to compute from their hidden states."""

    tokens: tuple[int, ...]
    pooling_spec: PoolingSpec


@dataclass(frozen=True)
class PoolingResult:
    """The result of a prompt: its logits or summed hidden states, and how many of its tokens were cached."""

    vector: Vector
    cached: int


def run_pooling(
    prompts: Iterable[PoolingPrompt],
    submit: Callable[[Iterable[Submission], list[RequestHandle]], None],
    owner: object,
    client: str | None,
    tokens_ahead: int,
) -> Iterator[PoolingResult]:
    """Run prompts for their pooled hidden states or logits, and yield the results in order. `submit` is
    `Worker.submit`. The requests keep `owner` alive.

    Requests of about `tokens_ahead` tokens are computed ahead of the one that is returned next. Whatever ends the
    iteration early cancels the rest. Raises what iterating over `prompts` raises, and what ends a request.
    """
    pending: deque[tuple[RequestHandle, int]] = deque()
    prompt_iterator, has_more, submitted_tokens = iter(prompts), True, 0
    try:
        while True:
            group: list[Submission] = []
            sizes: list[int] = []
            while has_more and submitted_tokens < tokens_ahead and len(pending) + len(group) < _MAX_AHEAD:
                prompt = next(prompt_iterator, None)
                if prompt is None:
                    has_more = False
                    break
                group.append(_make_submission(prompt, owner, client))
                sizes.append(len(prompt.tokens))
                submitted_tokens += sizes[-1]
            _submit_group(group, sizes, submit, pending)
            if not pending:
                return
            handle, size = pending[0]
            completion = handle.result()
            pending.popleft()
            submitted_tokens -= size
            vector = handle.pooled
            if completion.finish_reason is FinishReason.CANCELLED or vector is None:
                raise EmbeddingRefused("the request was cancelled before its text was computed: ask again")
            if not np.isfinite(vector).all():
                raise EmbeddingRefused(f"the model's states are NaN or infinite. {NAN_ADVICE}")
            yield PoolingResult(vector, completion.usage.cached_tokens)
    finally:
        for handle, _ in pending:
            handle.cancel()


def _submit_group(
    group: list[Submission],
    sizes: list[int],
    submit: Callable[[Iterable[Submission], list[RequestHandle]], None],
    pending: deque[tuple[RequestHandle, int]],
) -> None:
    """Submit a group of requests, and append their handles and sizes to `pending`."""
    handles: list[RequestHandle] = []
    try:
        if group:
            submit(group, handles)
    finally:  # what an interrupt finds submitted can be cancelled
        pending.extend(zip(handles, sizes, strict=False))


def _make_submission(prompt: PoolingPrompt, owner: object, client: str | None) -> Submission:
    """Return the submission of a prompt: a background request without an answer."""
    request = QueuedRequest(
        prompt.tokens,
        _PARAMS,
        submit_time=time.perf_counter(),
        client=client,
        background=True,
        cache=prompt.pooling_spec.shared > 0,
        pooling=prompt.pooling_spec,
    )
    return Submission(request, _STOPS, owner=owner)


# Texts to be embedded, as tokens: with the prompt before each and special tokens around it, cut where that is wanted.
#
# It follows sentence-transformers: prompt and text are one text, without blanks around it, and a text that is too long
# loses its end, but not its special tokens.


@dataclass(frozen=True)
class EmbeddingInput:
    """A text as tokens, ready to be embedded."""

    tokens: tuple[int, ...]
    """Those that are computed."""
    pooling_spec: PoolingSpec
    divisor: float
    """By what the sum of the states is divided."""
    count: int
    """Tokens of the text, also those after the last state that counts."""
    is_truncated: bool


class EmbeddingTokenizer:
    """Tokenizes texts to be embedded, with the same prompt before each."""

    def __init__(
        self,
        tokenizer: SharedTokenizer,
        files: EmbeddingSettings,
        info: EmbeddingInfo,
        vocab_size: int,
        prompt: str | None,
        truncate: bool,
        limit_reason: str,
    ) -> None:
        """`prompt` names one of the model's prompts (None: the default). With `truncate`, the end of a text that is too
        long is cut off. `limit_reason` says what bounds texts, for errors. Raises EmbeddingRefused for an unknown
        prompt.
        """
        self._tokenizer = tokenizer
        self._files = files
        self._max_tokens = info.max_tokens
        self._vocab_size = vocab_size
        self._requested_prompt = prompt
        self._truncate = truncate
        self._limit_reason = limit_reason
        name = info.default_prompt if prompt is None else prompt
        if name is not None and not (isinstance(name, str) and name in info.prompts):
            known_names = ", ".join(map(repr, sorted(info.prompts))) or "none"
            raise EmbeddingRefused(f"the model has no prompt {name!r:.80}: its files name {known_names}")
        self._prompt = "" if name is None else self._apply_case(info.prompts[name])
        self._begin_tokens, self._end_tokens = _special_tokens(tokenizer)
        self._head = [*self._begin_tokens, *self._encode(self._prompt.lstrip())] if self._prompt else []
        self._unpooled_count = 0  # tokens at the beginning of each text whose states do not count
        if self._prompt and not files.include_prompt:
            self._unpooled_count = len(self._begin_tokens) + len(self._encode(self._prompt.strip()))

    def tokenize(self, index: int, text: str | Sequence[int]) -> EmbeddingInput:
        """Return a text as tokens; `index` is its index, for errors. Token ids are taken as they are. Raises
        EmbeddingRefused if it is no text, is empty, or is too long.
        """
        if isinstance(text, str):
            full_text = self._apply_case(self._prompt + text.encode("utf-8", "replace").decode()).strip()
            body, at_least_text = first_tokens(self._encode, full_text, self._max_tokens), at_least_prefix(full_text)
        else:
            body, at_least_text = self._checked_ids(index, text), ""
        begin_tokens, end_tokens = (self._begin_tokens, self._end_tokens) if isinstance(text, str) else ((), ())
        count = len(begin_tokens) + len(body) + len(end_tokens)
        if not count:
            raise EmbeddingRefused(f"text {index} is empty, and has no vector")
        is_truncated = count > self._max_tokens
        if is_truncated and not self._truncate:
            raise EmbeddingRefused(
                f"text {index} has {at_least_text}{count} tokens, and {self._limit_reason}: shorten it, or cut off its "
                "end with `truncate`"
            )
        tokens = [*begin_tokens, *body[: max(self._max_tokens - len(begin_tokens) - len(end_tokens), 0)], *end_tokens][
            : self._max_tokens
        ]
        return self._make_input(index, tokens, is_truncated, self._unpooled_count if isinstance(text, str) else 0)

    def _make_input(self, index: int, tokens: list[int], is_truncated: bool, first: int) -> EmbeddingInput:
        """Return the input of a text whose hidden states are pooled from its token `first` on."""
        count, files = len(tokens), self._files
        if first >= count:
            raise EmbeddingRefused(f"text {index} has no tokens beside its prompt, and the prompt is not pooled")
        divisor = 1.0
        if files.pooling == "lasttoken":
            first = count - 1
        elif files.pooling == "cls":
            tokens = tokens[: first + 1]
        elif files.pooling == "weightedmean":
            divisor = (first + 1 + count) * (count - first) / 2
        else:
            divisor = count - first if files.pooling == "mean" else sqrt(count - first)
        is_weighted = files.pooling == "weightedmean"
        shared = min(
            common_prefix_length(tokens, self._head), first
        )  # the states from there on must be computed anyway
        return EmbeddingInput(tuple(tokens), PoolingSpec(first, is_weighted, (), shared), divisor, count, is_truncated)

    def _apply_case(self, text: str) -> str:
        """Return the text in lower case if the model's files ask for it, else unchanged."""
        return text.lower() if self._files.lowercase else text

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens around it."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _checked_ids(self, index: int, text: Any) -> list[int]:
        """Return a text given as token ids. Raises EmbeddingRefused for anything else, or if a prompt was asked for."""
        ids: list[Any] = list(text) if is_list(text) else [None]
        for each in ids:
            is_integer = isinstance(each, Integral) and not isinstance(each, bool)
            if not is_integer or not 0 <= int(each) < self._vocab_size:
                raise EmbeddingRefused(
                    f"text {index} is no text, and no list of token ids below {self._vocab_size}: {text!r:.80}"
                )
        if self._requested_prompt is not None:
            raise EmbeddingRefused(
                f"text {index} is token ids, which are taken as they are: no prompt is put before it"
            )
        return [int(each) for each in ids]


def _special_tokens(tokenizer: SharedTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that the tokenizer puts before a text, and those that it puts after it."""
    bare, full_tokens = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    for start in range(len(full_tokens) - len(bare) + 1):
        if full_tokens[start : start + len(bare)] == bare:
            return tuple(full_tokens[:start]), tuple(full_tokens[start + len(bare) :])
    raise EmbeddingRefused("the tokenizer writes a text in another way if it puts special tokens around it")


# The first tokens of a long text, without tokenizing all of it: that takes a minute and gigabytes for some 10 MB.
#
# Where a word ends, no token goes on, and what follows does not change the tokens before it. So the text is cut there,
# at two places, and the tokens that are wanted must be the same for both. Where they are not, as in a run of letters
# that only a longer token ends, the pieces grow.


LONG = 1 << 16
"""Characters from which on a text is not tokenized as a whole at once."""

_CHARACTERS = 8
"""Characters for each of the wanted tokens, more than words have, so that the first pieces are mostly enough."""

_TRIES = 5
"""How often the two pieces may differ. After that the longer is taken, so that no text takes memory without bound."""

_WORD_END = re.compile(r"[A-Za-z](?= [A-Za-z])")

Encode = Callable[[str], list[int]]
"""Returns the tokens of a text without special tokens around it."""


def first_tokens(encode: Encode, text: str, max_tokens: int) -> list[int]:
    """Tokenize a text. If it has more than `max_tokens` tokens, perhaps return only the first `max_tokens` + 1, which
    tell that it is too long.
    """
    size, tries = max(LONG, _CHARACTERS * (max_tokens + 1)), 0
    while size < len(text):
        long_tokens = encode(_cut_at_word_end(text, size))
        if len(long_tokens) > max_tokens:
            short_tokens = encode(_cut_at_word_end(text, size * 3 // 4 - 1))
            tries += 1
            if tries == _TRIES or short_tokens[: max_tokens + 1] == long_tokens[: max_tokens + 1]:
                return long_tokens[: max_tokens + 1]
        size *= 2
    return encode(text)


def at_least_prefix(*texts: str) -> str:
    """Return "at least ", for an error, if `first_tokens` may not have counted all tokens of `texts`; otherwise ""."""
    return "at least " if sum(map(len, texts)) > LONG // 2 else ""


def _cut_at_word_end(text: str, max_characters: int) -> str:
    """Return the beginning of a text, at most `max_characters` characters, cut at a word's end if one is nearby."""
    word_ends = [match.end() for match in _WORD_END.finditer(text, max_characters * 15 // 16, max_characters)]
    return text[: word_ends[-1] if word_ends else max_characters]
