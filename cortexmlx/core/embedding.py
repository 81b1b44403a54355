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
    """Embeds texts and reranks documents for an `Engine`: runs prompts for their hidden states or logits, without an
    answer.
    """

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
        kept = _checked_dimensions(dimensions, info)
        listed = _checked_texts("texts", texts)
        bound = support.limit_reason(info.max_tokens)
        reader = EmbeddingTokenizer(self._tokenizer, files, info, self._vocab_size, prompt, truncate, bound)
        divisors, counts, truncated = list[float](), list[int](), list[bool]()

        def asked() -> Iterator[PoolingPrompt]:
            for place, text in enumerate(listed):
                one = reader.tokenize(place, text)  # type: ignore[arg-type]  # it says what is no text
                divisors.append(one.divisor)
                counts.append(one.count)
                truncated.append(one.truncated)
                yield PoolingPrompt(one.tokens, one.pooled)

        got = self._run_prompts(owner, asked(), client)
        return Embeddings(
            _finish_embeddings([each.vector for each in got], divisors, files, kept),
            tuple(counts),
            tuple(each.cached for each in got),
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
        listed = [_checked_utf8(f"document {i}", d) for i, d in enumerate(_checked_texts("documents", documents))]
        encode = partial(
            first_tokens, partial(self._tokenizer.encode, add_special_tokens=False), most=support.max_tokens
        )
        least = reranker.count_fixed_tokens(encode, instruction, query)
        if least >= support.max_tokens:
            raise EmbeddingRefused(
                f"instruction and query have {at_least_prefix(instruction, query)}{least} tokens with what is around "
                "them and "
                f"without a document, and {support.limit_reason(support.max_tokens)}: shorten them"
            )
        head, counts = reranker.encode_shared_prefix(encode, instruction, query), list[int]()

        def asked() -> Iterator[PoolingPrompt]:
            for place, document in enumerate(listed):
                tokens, whole = reranker.encode_document(encode, instruction, query, document, support.max_tokens)
                if whole > len(tokens) and not truncate:
                    said = at_least_prefix(instruction, query, document)
                    raise EmbeddingRefused(
                        f"document {place} has {said}{whole} tokens with the query and what is around it, and "
                        f"{support.limit_reason(support.max_tokens)}: shorten it, or cut off its end with `truncate`"
                    )
                counts.append(len(tokens))
                shared = min(common_prefix_length(tokens, head), len(tokens) - 1)
                yield PoolingPrompt(
                    tuple(tokens), PoolingSpec(len(tokens) - 1, False, (reranker.yes, reranker.no), shared)
                )

        got = self._run_prompts(owner, asked(), client)
        scores = tuple(_sigmoid(float(each.vector[0]) - float(each.vector[1])) for each in got)
        return Reranking(scores, sum(counts), sum(each.cached for each in got))

    def _run_prompts(self, owner: object, asked: Iterator[PoolingPrompt], client: str) -> list[PoolingResult]:
        """Run the prompts and return their results, in order."""
        named = checked_client(client) or None
        ahead = 2 * self._worker.core.config.prefill_budget
        with closing(run_pooling(asked, self._worker.submit, owner, named, ahead)) as vectors:  # type: ignore[type-var]
            return list(vectors)


def _finish_embeddings(sums: list[Vector], divisors: list[float], files: EmbeddingSettings, kept: int) -> Vector:
    """Return the embeddings `[n, kept]` of texts from the sums of their hidden states: mean, dense layers,
    normalization.
    """
    if not sums:
        return np.zeros((0, kept), np.float32)
    if sums[0].shape != (files.width,):
        raise EmbeddingRefused(
            f"the model's states have {sums[0].size} numbers, and its 1_Pooling is made for {files.width}: take the "
            "files of one model"
        )
    vectors = (np.stack(sums) / np.array(divisors)[:, None]).astype(np.float32)
    for layer in files.layers:
        vectors = layer(vectors)
    if kept < vectors.shape[1]:
        vectors = normalize(vectors[:, :kept]) if files.normalized else vectors[:, :kept]
    return np.ascontiguousarray(vectors)


def _sigmoid(log_odds: float) -> float:
    """Return the probability that these log-odds stand for."""
    return 1 / (1 + math.exp(-log_odds)) if log_odds >= 0 else 1 - 1 / (1 + math.exp(log_odds))


def _checked_dimensions(dimensions: int | None, info: EmbeddingInfo) -> int:
    """Return how many dimensions to keep; None: all of the model's. Raises EmbeddingRefused for anything out of
    range.
    """
    if dimensions is None:
        return info.dimensions
    whole = isinstance(dimensions, Integral) and not isinstance(dimensions, bool)
    if not whole or not 1 <= dimensions <= info.dimensions:
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

_MOST_AHEAD = 512
"""Requests that are submitted and not yet returned at most."""


@dataclass(frozen=True)
class PoolingPrompt:
    """A prompt's tokens, and what to compute from their hidden states."""

    tokens: tuple[int, ...]
    pooled: PoolingSpec


@dataclass(frozen=True)
class PoolingResult:
    """The result of a prompt: the sum of its hidden states or its logits, and how many of its tokens were cached."""

    vector: Vector
    cached: int


def run_pooling(
    asked: Iterable[PoolingPrompt],
    submit: Callable[[Iterable[Submission], list[RequestHandle]], None],
    owner: object,
    client: str | None,
    tokens_ahead: int,
) -> Iterator[PoolingResult]:
    """Run prompts for their pooled hidden states or logits, and yield the results in order. `submit` is that of
    `Worker`; the requests keep `owner` alive.

    Requests of about `tokens_ahead` tokens are computed ahead of the one that is returned next. Whatever ends the
    iteration early cancels the rest. Raises what `asked` raises, and what ends a request.
    """
    waiting: deque[tuple[RequestHandle, int]] = deque()
    rest, more, ahead = iter(asked), True, 0
    try:
        while True:
            group: list[Submission] = []
            sizes: list[int] = []
            while more and ahead < tokens_ahead and len(waiting) + len(group) < _MOST_AHEAD:
                one = next(rest, None)
                if one is None:
                    more = False
                    break
                group.append(_make_submission(one, owner, client))
                sizes.append(len(one.tokens))
                ahead += sizes[-1]
            _submit_group(group, sizes, submit, waiting)
            if not waiting:
                return
            handle, size = waiting[0]
            done = handle.result()
            waiting.popleft()
            ahead -= size
            vector = handle.pooled
            if done.finish_reason is FinishReason.CANCELLED or vector is None:
                raise EmbeddingRefused("the request was cancelled before its text was computed: ask again")
            if not np.isfinite(vector).all():
                raise EmbeddingRefused(f"the model's states are NaN or infinite. {NAN_ADVICE}")
            yield PoolingResult(vector, done.usage.cached_tokens)
    finally:
        for handle, _ in waiting:
            handle.cancel()


def _submit_group(
    group: list[Submission],
    sizes: list[int],
    submit: Callable[[Iterable[Submission], list[RequestHandle]], None],
    waiting: deque[tuple[RequestHandle, int]],
) -> None:
    """Submit a group of requests, and append their handles and sizes to `waiting`."""
    handles: list[RequestHandle] = []
    try:
        if group:
            submit(group, handles)
    finally:  # what an interrupt finds submitted can be cancelled
        waiting.extend(zip(handles, sizes, strict=False))


def _make_submission(one: PoolingPrompt, owner: object, client: str | None) -> Submission:
    """Return the submission of a prompt: a background request without an answer."""
    request = QueuedRequest(
        one.tokens,
        _PARAMS,
        submitted=time.perf_counter(),
        client=client,
        background=True,
        cache=one.pooled.shared > 0,
        pooled=one.pooled,
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
    pooled: PoolingSpec
    divisor: float
    """By what the sum of the states is divided."""
    count: int
    """Tokens of the text, also those after the last state that counts."""
    truncated: bool


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
        bound: str,
    ) -> None:
        """`prompt` is a name of the model's prompts; None: its default. With `truncate`, the end of a text that is too
        long is cut off. `bound` says what bounds texts, for errors. Raises EmbeddingRefused for an unknown prompt.
        """
        self._tokenizer = tokenizer
        self._files = files
        self._most = info.max_tokens
        self._vocab_size = vocab_size
        self._asked = prompt
        self._truncate = truncate
        self._bound = bound
        name = info.default_prompt if prompt is None else prompt
        if name is not None and name not in info.prompts:
            known = ", ".join(map(repr, sorted(info.prompts))) or "none"
            raise EmbeddingRefused(f"the model has no prompt {name!r:.80}: its files name {known}")
        self._prompt = "" if name is None else self._apply_case(info.prompts[name])
        self._begin, self._end = _special_tokens(tokenizer)
        self._head = [*self._begin, *self._encode(self._prompt.lstrip())] if self._prompt else []
        self._unpooled = 0  # tokens at the beginning of each text whose states do not count
        if self._prompt and not files.include_prompt:
            self._unpooled = len(self._begin) + len(self._encode(self._prompt.strip()))

    def tokenize(self, place: int, text: str | Sequence[int]) -> EmbeddingInput:
        """Return a text as tokens; `place` is its index, for errors. Token ids are taken as they are. Raises
        EmbeddingRefused if it is no text, is empty, or is too long.
        """
        if isinstance(text, str):
            whole = self._apply_case(self._prompt + text.encode("utf-8", "replace").decode()).strip()
            body, said = first_tokens(self._encode, whole, self._most), at_least_prefix(whole)
        else:
            body, said = self._checked_ids(place, text), ""
        begin, end = (self._begin, self._end) if isinstance(text, str) else ((), ())
        count = len(begin) + len(body) + len(end)
        if not count:
            raise EmbeddingRefused(f"text {place} is empty, and has no vector")
        truncated = count > self._most
        if truncated and not self._truncate:
            raise EmbeddingRefused(
                f"text {place} has {said}{count} tokens, and {self._bound}: shorten it, or cut off its end with "
                "`truncate`"
            )
        tokens = [*begin, *body[: max(self._most - len(begin) - len(end), 0)], *end][: self._most]
        return self._make_input(place, tokens, truncated, self._unpooled if isinstance(text, str) else 0)

    def _make_input(self, place: int, tokens: list[int], truncated: bool, first: int) -> EmbeddingInput:
        """Return the input of a text whose hidden states are pooled from its token `first` on."""
        count, files = len(tokens), self._files
        if first >= count:
            raise EmbeddingRefused(f"text {place} has no tokens beside its prompt, and the prompt is not pooled")
        divisor = 1.0
        if files.pooling == "lasttoken":
            first = count - 1
        elif files.pooling == "cls":
            tokens = tokens[: first + 1]
        elif files.pooling == "weightedmean":
            divisor = (first + 1 + count) * (count - first) / 2
        else:
            divisor = count - first if files.pooling == "mean" else sqrt(count - first)
        weighted = files.pooling == "weightedmean"
        shared = min(
            common_prefix_length(tokens, self._head), first
        )  # the states from there on must be computed anyway
        return EmbeddingInput(tuple(tokens), PoolingSpec(first, weighted, (), shared), divisor, count, truncated)

    def _apply_case(self, text: str) -> str:
        """Return the text in lower case if the model's files ask for it, else unchanged."""
        return text.lower() if self._files.lowercase else text

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens around it."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _checked_ids(self, place: int, text: Any) -> list[int]:
        """Return the token ids of a text that is given as such. Raises EmbeddingRefused for anything else, or if a
        prompt was asked for.
        """
        ids: list[Any] = list(text) if is_list(text) else [None]
        for each in ids:
            whole = isinstance(each, Integral) and not isinstance(each, bool)
            if not whole or not 0 <= int(each) < self._vocab_size:
                raise EmbeddingRefused(
                    f"text {place} is no text, and no list of token ids below {self._vocab_size}: {text!r:.80}"
                )
        if self._asked is not None:
            raise EmbeddingRefused(
                f"text {place} is token ids, which are taken as they are: no prompt is put before it"
            )
        return [int(each) for each in ids]


def _special_tokens(tokenizer: SharedTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that the tokenizer puts before a text, and those that it puts after it."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    for begin in range(len(whole) - len(bare) + 1):
        if whole[begin : begin + len(bare)] == bare:
            return tuple(whole[:begin]), tuple(whole[begin + len(bare) :])
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


def first_tokens(encode: Encode, text: str, most: int) -> list[int]:
    """Return the tokens of `text` if it has at most `most`, or is not LONG. Otherwise return more than `most` tokens,
    with which the text begins.
    """
    size, tries = max(LONG, _CHARACTERS * (most + 1)), 0
    while size < len(text):
        long = encode(_cut_at_word_end(text, size))
        if len(long) > most:
            short = encode(_cut_at_word_end(text, size * 3 // 4 - 1))
            tries += 1
            if tries == _TRIES or short[: most + 1] == long[: most + 1]:
                return long[: most + 1]
        size *= 2
    return encode(text)


def at_least_prefix(*texts: str) -> str:
    """Return "at least ", for an error, if `first_tokens` may not have counted all tokens of these texts; otherwise
    "".
    """
    return "at least " if sum(map(len, texts)) > LONG // 2 else ""


def _cut_at_word_end(text: str, most: int) -> str:
    """Return the beginning of a text, of at most `most` characters, cut at a word's end if there is one nearby."""
    ends = [match.end() for match in _WORD_END.finditer(text, most * 15 // 16, most)]
    return text[: ends[-1] if ends else most]
