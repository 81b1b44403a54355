"""A proof that two tokens are near: the sampler chooses either when the reference's logits change by `NOISE` at most.

The logits are mlx-lm's own, of one pass over the whole text. What is proven is that rounding alone may decide between
the two tokens, for any sampling parameters: the best logit, the border of a nucleus, the number of a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.execution.boundary import TokenMask
from cortexmlx.execution.sampling import BatchSampler
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.sampling_params import SamplingParams
from support.engine.judge import NOISE

SIZES = (1e-5, 1e-4, NOISE)
_RANDOM = 200


def tie_size(
    model: Any,
    text: Sequence[int],
    row: SamplingRow,
    mask: Any,
    candidates: tuple[int, int],
) -> float | None:
    """The smallest of `SIZES` by which logits must change so that each of two tokens may be chosen after `text`; None
    if `NOISE` does not suffice. `row.output` are the tokens of the answer before, `mask` those that may be chosen.
    """
    logits = np.array(model(mx.array([list(text)]))[0, -1].astype(mx.float32))
    for size in SIZES:
        changed = logits + size * _changes(len(logits), candidates)
        sampler = BatchSampler([row] * len(changed), logits.shape[0])
        allowed = None
        if mask is not None:
            allowed = TokenMask(np.arange(len(changed), dtype=np.int32), np.stack([mask] * len(changed)))
        index = np.full(len(changed), len(row.output), np.int32)
        chosen = set(sampler(mx.array(changed.astype(np.float32)), index, None, allowed).tokens.tolist())
        if chosen >= set(candidates):
            return size
    return None


def plain_row(params: SamplingParams, seed: int, prompt: Sequence[int], output: Sequence[int]) -> SamplingRow:
    """How a token of an answer is chosen, without the caller's functions."""
    return SamplingRow(params, seed, tuple(prompt), list(output))


def _changes(vocab: int, candidates: tuple[int, int]) -> np.ndarray:
    """Changes of logits by at most 1, `[n, vocab]`: for each token, all up to it against all others, and the reverse;
    a candidate against all others; and random ones.
    """
    ids = np.arange(vocab)
    up_to = np.where(ids[None] <= ids[:, None], 1.0, -1.0)
    one = np.where(ids[None] == np.array(candidates)[:, None], 1.0, -1.0)
    luck = np.random.default_rng(0).uniform(-1, 1, (_RANDOM, vocab))
    return np.concatenate([np.zeros((1, vocab)), up_to, -up_to, one, -one, luck])
