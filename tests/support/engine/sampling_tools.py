"""What the tests of sampling share: random logits, rows, and a test of whether counts follow a distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.sampling_params import SamplingParams

Floats = npt.NDArray[np.float64]


@contextmanager
def mlx_lm_uncompiled() -> Iterator[None]:
    """mlx-lm compiles its filters anew for every top-p and shape: on a CPU a second each, and a C++ compiler."""
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0.0, spread, (rows, vocab)).astype(np.float32)


def row(params: SamplingParams, seed: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> SamplingRow:
    return SamplingRow(params, seed, prompt, output)


def chi_square(counts: Counter[int], expected: Floats, draws: int) -> float:
    """How many standard deviations the statistic lies from its mean; rare tokens are put together."""
    common = np.flatnonzero(expected * draws >= 5.0)
    seen = np.array([counts[t] for t in common], np.float64)
    wanted = expected[common] * draws
    if draws - wanted.sum() >= 5.0:
        seen, wanted = np.append(seen, draws - seen.sum()), np.append(wanted, draws - wanted.sum())
    freedom = max(1, len(wanted) - 1)
    return float((((seen - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom))
