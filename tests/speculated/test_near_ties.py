"""The proof of a tie proves nothing where there is none."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.execution.logits import uniforms
from cortexmlx.types.sampling_params import SamplingParams
from support.speculation.near_ties import plain_row, tie_size

VOCAB = 70


def size_of(logits: Any, candidates: tuple[int, int], mask: Any = None, **params: Any) -> float | None:
    row = plain_row(SamplingParams(**params), 5, [1], [2, 3])
    return tie_size(lambda tokens: mx.array(logits)[None, None], [1, 2, 3], row, mask, candidates)


@pytest.mark.parametrize(("gap", "size"), [(0.0, 1e-5), (1e-4, 1e-4), (3e-3, 2e-3), (5e-3, None), (1.0, None)])
def test_of_the_best_logits(gap: float, size: float | None) -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[7], logits[9] = 4.0, 4.0 - gap
    assert size_of(logits, (7, 9)) == size and size_of(logits, (7, 8)) is None


def test_of_a_seeds_number() -> None:
    """It lies within the part of token 0, near its end or not."""
    number = float(uniforms(np.array([5], np.uint64), np.array([2]))[0, 1])
    for share, size in ((number + 1e-6, 1e-4), ((number + 1) / 2, None)):
        logits = np.full(VOCAB, -50.0, np.float32)
        logits[:2] = np.log([share, 1 - share])
        assert size_of(logits, (0, 1), temperature=1.0) == size


def test_of_masked_tokens() -> None:
    logits = np.zeros(VOCAB, np.float32)
    mask = np.zeros(3, np.uint32)
    mask[0] = 0b110
    assert size_of(logits, (1, 2), mask) == 1e-5 and size_of(logits, (1, 3), mask) is None
