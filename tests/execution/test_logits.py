"""The row-wise functions on logits against mlx-lm, plain sorting and statistics."""

from __future__ import annotations

import math
from collections import Counter

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_top_p

from cortexmlx.execution.logits import draw, nucleus_threshold, token_uniforms, top_tokens
from support.effort import examples
from support.engine.sampling_tools import chi_square, mlx_lm_uncompiled, random_logits


def nucleus_of(logits: npt.NDArray[np.float32], top_p: float) -> npt.NDArray[np.bool_]:
    weights = np.exp(logits.astype(np.float64) - logits.max()).astype(np.float32)
    threshold = nucleus_threshold(mx.array(weights)[None], mx.array([[top_p]], mx.float32))
    return weights >= np.array(threshold)[0, 0]


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 0.3, 2.0, 6.0, 30.0]),
    coarse=st.booleans(),
    top_p=st.floats(1e-6, 0.9999),
)
@example(seed=0, vocab=3000, spread=0.0, coarse=True, top_p=0.5)
@example(seed=0, vocab=3000, spread=0.01, coarse=False, top_p=0.999)
@settings(max_examples=examples(80), deadline=None)
def test_the_nucleus_is_that_of_mlx_lm(seed: int, vocab: int, spread: float, coarse: bool, top_p: float) -> None:
    logits = random_logits(1, vocab, seed, spread)[0]
    if coarse:  # as bfloat16 logits are: many ties
        logits = np.round(logits * 4) / 4
    logprobs = mx.array(logits)[None] - mx.logsumexp(mx.array(logits))
    with mlx_lm_uncompiled():
        judged = np.isfinite(np.array(apply_top_p(logprobs, top_p))[0])
    ours = nucleus_of(logits, top_p)
    # Where they differ, the mass above the token equals top_p within the rounding of a float32 sum.
    exact = np.exp(logits.astype(np.float64) - logits.max())
    exact /= exact.sum()
    for token in np.flatnonzero(ours != judged):
        assert abs(exact[logits > logits[token]].sum() - top_p) < 1e-5


def test_rounding_of_long_sums_does_not_let_the_whole_vocabulary_into_the_nucleus() -> None:
    """Added one by one in float32, 25,000 times 0.3 falls short of its sum by more than the share left to the rest."""
    weights = np.full((1, 50_000), 1e-12, np.float32)
    weights[:, ::2] = 0.3
    threshold = nucleus_threshold(mx.array(weights), mx.array([[0.99999]], mx.float32))
    assert weights.min() < threshold.item() <= weights.max()


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(2, 2000),
    coarse=st.booleans(),
    count=st.integers(1, 100),
)
@example(seed=1, vocab=2000, coarse=True, count=100)
def test_top_tokens_are_the_largest_and_ties_go_to_the_lower_id(
    seed: int, vocab: int, coarse: bool, count: int
) -> None:
    values = random_logits(3, vocab, seed)
    if coarse:
        values = np.round(values)
    values[1] = -np.inf
    count = min(count, vocab)
    best, ids = top_tokens(mx.array(values), count)
    for r in range(3):
        wanted = sorted(range(vocab), key=lambda t, r=r: (-values[r, t], t))[:count]
        assert ids[r].tolist() == wanted
        assert np.array_equal(np.array(best)[r], values[r, wanted])


def test_draw_never_returns_an_index_of_weight_zero_and_respects_the_ends() -> None:
    weights = np.zeros((4, 1000), np.float32)
    weights[:, [63, 64, 999]] = [0.25, 0.5, 0.25]
    last = 1.0 - 2.0**-23
    ends = mx.array([[0.0, 0.0], [0.25, 0.0], [0.74999, last], [last, last]], mx.float32)
    assert draw(mx.array(weights), ends).tolist() == [63, 64, 64, 999]


def test_a_sum_that_descends_by_rounding_draws_nothing_of_weight_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a parallel scan on a GPU may round: here the sum is a little larger over every other element."""
    exact = mx.cumsum
    wave = mx.array(np.tile(np.array([1.0, 1.0 + 1e-6], np.float32), 32))
    monkeypatch.setattr(mx, "cumsum", lambda a, axis: exact(a, axis=axis) * wave[: a.shape[axis]])
    weights = np.zeros((2000, 64), np.float32)
    weights[:, ::2] = 1.0
    points = np.linspace(0, 1 - 2.0**-23, 2000, dtype=np.float32)
    edges = np.stack([np.zeros(2000, np.float32), np.round(points * 32) / 32], axis=1) * np.float32(1 - 2.0**-23)
    assert all(index % 2 == 0 for index in draw(mx.array(weights), mx.array(edges)).tolist())


def test_uniforms_are_uniform_and_differ_between_neighbouring_seeds_and_indices() -> None:
    seeds, index = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    values = token_uniforms(seeds.ravel(), index.ravel())
    assert values.dtype == np.float32 and values.min() >= 0.0 and values.max() < 1.0
    n = len(values)
    assert len(np.unique(values, axis=0)) == n
    for column in values.T.astype(np.float64):
        counts = Counter((column * 100).astype(int).tolist())
        assert abs(chi_square(counts, np.full(100, 0.01), n)) < 4.0
        grid = column.reshape(300, 300)
        for shifted in (np.roll(grid, 1, 0), np.roll(grid, 1, 1)):
            assert abs(np.corrcoef(grid.ravel(), shifted.ravel())[0, 1]) < 4 / math.sqrt(n)
    assert abs(np.corrcoef(values.T)[0, 1]) < 4 / math.sqrt(n)
