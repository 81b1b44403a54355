"""The calls of an engine that have no answer: `embed` and `rerank`, and the same for asyncio."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from cortexmlx.core.arguments import checked_client, checked_text, is_list
from cortexmlx.core.embedding.first_tokens import at_least, first_tokens
from cortexmlx.core.embedding.pooled_requests import Asked, Got, vectors_of
from cortexmlx.core.embedding.texts import TextReader
from cortexmlx.core.event_loop import on_a_thread
from cortexmlx.core.handle import NotCopyable
from cortexmlx.errors import EmbeddingRefused
from cortexmlx.execution.boundary import Vector
from cortexmlx.kv.prefix import common_length
from cortexmlx.models.embedding import DEFAULT_INSTRUCTION, EmbeddingFiles, normalized
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.types.embeddings import EmbeddingInfo, Embeddings, Pooled, Reranking

if TYPE_CHECKING:
    from cortexmlx.core.worker import Worker
    from cortexmlx.stats import ModelInfo


class EmbeddingCalls(NotCopyable):
    """What an `Engine` can do with texts whose states or logits are asked for, and no answer."""

    info: ModelInfo
    _worker: Worker
    _tokenizer: SharedTokenizer

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        client: str = "",
    ) -> Embeddings:
        """Return the embeddings of texts, made as the model's own sentence-transformers files say. Many texts are
        computed together, without padding, and beside running answers. An interrupt cancels them.

        - `prompt`: the name of one of `info.embedding.prompts`, which is put before each text, such as "query". None:
          the model's default, which most models do not have.
        - `dimensions`: keep so many of the first numbers (Matryoshka), and normalize again if the model normalizes.
        - `truncate`: cut off the end of a text that is longer than `info.embedding.max_tokens`. False refuses it.
        - `client`: as for `submit`.

        A text of token ids is taken as it is, without special tokens or a prompt. Raises EmbeddingRefused if the model
        cannot embed, or an argument does not fit it; and what ends a request, such as EngineClosed.
        """
        self._worker.check_open()
        support = self._worker.core.model.embedding
        info, files = support.info, support.files
        if info is None or files is None:
            raise EmbeddingRefused(support.not_embedding)
        kept = _checked_dimensions(dimensions, info)
        listed = _checked_texts("texts", texts)
        bound = support.bound(info.max_tokens)
        reader = TextReader(self._tokenizer, files, info, self.info.vocab_size, prompt, truncate, bound)
        divisors, counts, truncated = list[float](), list[int](), list[bool]()

        def asked() -> Iterator[Asked]:
            for place, text in enumerate(listed):
                one = reader.read(place, text)  # type: ignore[arg-type]  # it says what is no text
                divisors.append(one.divisor)
                counts.append(one.count)
                truncated.append(one.truncated)
                yield Asked(one.tokens, one.pooled)

        got = self._vectors(asked(), client)
        return Embeddings(
            _finished([each.vector for each in got], divisors, files, kept),
            tuple(counts),
            tuple(each.cached for each in got),
            tuple(truncated),
        )

    async def aembed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        client: str = "",
    ) -> Embeddings:
        """`embed` for asyncio. A cancelled task cancels what has not been computed."""
        embed = partial(self.embed, texts, prompt=prompt, dimensions=dimensions, truncate=truncate, client=client)
        return await on_a_thread(embed, interruptible=True)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        client: str = "",
    ) -> Reranking:
        """Return how well documents answer a query, as Qwen3-Reranker judges them. The instruction and the query are
        computed once for all documents.

        - `instruction`: what counts as a good answer. None: that of the model card, for web searches.
        - `truncate`: cut off the end of a document whose prompt is too long. False refuses it.
        - `client`: as for `submit`.

        Raises EmbeddingRefused if the model is no such reranker, or an argument is wrong or too long; and what ends a
        request, such as EngineClosed.
        """
        self._worker.check_open()
        support = self._worker.core.model.embedding
        reranker = support.reranker
        if reranker is None:
            raise EmbeddingRefused(support.not_reranking)
        query = _checked_plain("query", query)
        instruction = DEFAULT_INSTRUCTION if instruction is None else _checked_plain("instruction", instruction)
        listed = [_checked_plain(f"document {i}", d) for i, d in enumerate(_checked_texts("documents", documents))]
        encode = partial(
            first_tokens, partial(self._tokenizer.encode, add_special_tokens=False), most=support.max_tokens
        )
        least = reranker.least(encode, instruction, query)
        if least >= support.max_tokens:
            raise EmbeddingRefused(
                f"instruction and query have {at_least(instruction, query)}{least} tokens with what is around them and "
                f"without a document, and {support.bound(support.max_tokens)}: shorten them"
            )
        head, counts = reranker.shared(encode, instruction, query), list[int]()

        def asked() -> Iterator[Asked]:
            for place, document in enumerate(listed):
                tokens, whole = reranker.tokens(encode, instruction, query, document, support.max_tokens)
                if whole > len(tokens) and not truncate:
                    said = at_least(instruction, query, document)
                    raise EmbeddingRefused(
                        f"document {place} has {said}{whole} tokens with the query and what is around it, and "
                        f"{support.bound(support.max_tokens)}: shorten it, or cut off its end with `truncate`"
                    )
                counts.append(len(tokens))
                shared = min(common_length(tokens, head), len(tokens) - 1)
                yield Asked(tuple(tokens), Pooled(len(tokens) - 1, False, (reranker.yes, reranker.no), shared))

        got = self._vectors(asked(), client)
        scores = tuple(_probability(float(each.vector[0]) - float(each.vector[1])) for each in got)
        return Reranking(scores, sum(counts), sum(each.cached for each in got))

    async def arerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        client: str = "",
    ) -> Reranking:
        """`rerank` for asyncio. A cancelled task cancels what has not been computed."""
        rerank = partial(self.rerank, query, documents, instruction=instruction, truncate=truncate, client=client)
        return await on_a_thread(rerank, interruptible=True)

    def _vectors(self, asked: Iterator[Asked], client: str) -> list[Got]:
        named = checked_client(client) or None
        ahead = 2 * self._worker.core.config.prefill_budget
        with closing(vectors_of(asked, self._worker.submit, self, named, ahead)) as vectors:  # type: ignore[type-var]
            return list(vectors)


def _finished(sums: list[Vector], divisors: list[float], files: EmbeddingFiles, kept: int) -> Vector:
    """Return the vectors `[n, kept]` that the model's layers make of the sums of states."""
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
        vectors = normalized(vectors[:, :kept]) if files.normalized else vectors[:, :kept]
    return np.ascontiguousarray(vectors)


def _probability(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds)) if log_odds >= 0 else 1 - 1 / (1 + math.exp(log_odds))


def _checked_dimensions(dimensions: int | None, info: EmbeddingInfo) -> int:
    if dimensions is None:
        return info.dimensions
    whole = isinstance(dimensions, Integral) and not isinstance(dimensions, bool)
    if not whole or not 1 <= dimensions <= info.dimensions:
        raise EmbeddingRefused(
            f"dimensions is {dimensions!r:.80}, but must be in 1..{info.dimensions}, the numbers of a whole vector"
        )
    return int(dimensions)


def _checked_texts(name: str, texts: object) -> list[object]:
    if isinstance(texts, str) or not is_list(texts):
        raise EmbeddingRefused(f"{name} are a list of texts, not {texts!r:.80}: put a single one into a list")
    return list(texts)


def _checked_plain(name: str, text: object) -> str:
    if not isinstance(text, str):
        raise EmbeddingRefused(f"{name} is {text!r:.80}, but must be a text")
    return str(checked_text(name, text)).encode("utf-8", "replace").decode()
