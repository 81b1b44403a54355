"""An engine whose embeddings and scores are made up: of each text's own characters, so that a test knows them. All else
is the engine that it stands before.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np

from cortexmlx import EmbeddingInfo, EmbeddingRefused, Embeddings, Reranking

INFO = EmbeddingInfo(16, 64, "lasttoken", True, {"query": "Query: ", "document": ""})


def vector_of(text: str | Sequence[int], prompt: str | None = None, dimensions: int | None = None) -> np.ndarray:
    """The made up vector of a text."""
    seed = crc32(f"{prompt}|{text!r}".encode("utf-8", "surrogatepass"))
    vector = np.random.default_rng(seed).normal(size=INFO.dimensions)[:dimensions]
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def score_of(query: str, document: str) -> float:
    """The made up score of a document."""
    return crc32(f"{query}|{document}".encode()) / 2**32


class MadeUpNumbers:
    """An engine. `asked` has the texts of each call, and `held`, if it is cleared, holds all calls up."""

    def __init__(self, engine: Any, *, most: int = INFO.max_tokens) -> None:
        self._engine = engine
        self._most = most
        self.info = replace(engine.info, embedding=INFO)
        self.asked: list[tuple[Any, ...]] = []
        self.clients: list[str] = []
        self.held = threading.Event()
        self.held.set()
        self.cancelled = threading.Event()
        self.waiting = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __enter__(self) -> MadeUpNumbers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.__exit__(None, None, None)

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        client: str = "",
    ) -> Embeddings:
        """As the engine's."""
        self.held.wait()
        self.asked.append(tuple(texts))
        self.clients.append(client)
        lengths = [len(text) for text in texts]
        if not truncate and max(lengths) > self._most:
            raise EmbeddingRefused(f"text {np.argmax(lengths)} has {max(lengths)} tokens, but may have {self._most}")
        vectors = np.stack([vector_of(text[: self._most], prompt, dimensions) for text in texts])
        counts = tuple(min(length, self._most) for length in lengths)
        return Embeddings(vectors, counts, (0,) * len(texts), tuple(length > self._most for length in lengths))

    async def aembed(self, texts: Sequence[str | Sequence[int]], **options: Any) -> Embeddings:
        """As the engine's."""
        await self._wait()
        return self.embed(texts, **options)

    async def arerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        client: str = "",
    ) -> Reranking:
        """As the engine's."""
        await self._wait()
        self.asked.append((query, instruction, *documents))
        scores = tuple(score_of(query, document) for document in documents)
        return Reranking(scores, sum(map(len, documents)), 0)

    async def _wait(self) -> None:
        self.waiting.set()
        try:
            while not self.held.is_set():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
