"""Embeddings and scores of documents, as callers get them, and what a model says of its embeddings. Plain data, without
mlx.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The embeddings of `n` texts, in the order of the texts."""

    vectors: npt.NDArray[np.float32]
    """`[n, dimensions] float32`. Do not write to it."""
    prompt_tokens: tuple[int, ...]
    """Tokens of each text, special tokens and the prompt before it included."""
    cached_tokens: tuple[int, ...]
    """Those of them that were found in the prefix cache and not computed again."""
    truncated: tuple[bool, ...]
    """Whether the end of each text was cut off to fit."""


@dataclass(frozen=True)
class EmbeddingInfo:
    """How a model makes embeddings, as its own sentence-transformers files say."""

    dimensions: int
    """Numbers of a whole vector. `embed(dimensions=)` may ask for fewer."""
    max_tokens: int
    """Tokens that a text may have, special tokens and the prompt before it included."""
    pooling: str
    """Which states of the tokens make the vector: "lasttoken", "mean", and so on, as in `1_Pooling/config.json`."""
    normalized: bool
    """Whether vectors have length 1."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """The texts that `embed(prompt=)` puts before each text, by name."""
    default_prompt: str | None = None
    """The name of the prompt that is used if none is asked for."""


@dataclass(frozen=True)
class Reranking:
    """How well each document answers a query, by the model's scores."""

    scores: tuple[float, ...]
    """Of each document, between 0 and 1, in the order of the documents."""
    prompt_tokens: int
    """Tokens of all documents' prompts together, each with the instruction and the query."""
    cached_tokens: int
    """Those of them that were found in the prefix cache and not computed again."""


@dataclass(frozen=True)
class PoolingSpec:
    """What to compute from a prompt's hidden states, for a request that has no answer and ends with its prompt."""

    first: int
    """The position of the first token whose state counts. Those from it to the end of the prompt are summed up."""
    position_weighted: bool = False
    """Whether each state is multiplied by its position, counted from 1."""
    logits: tuple[int, ...] = ()
    """Tokens whose logits after the last token are asked for, instead of states."""
    shared: int = 0
    """Tokens at the beginning of the prompt that other requests begin with, such as an instruction. They alone stay
    cached.
    """
