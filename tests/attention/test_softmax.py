"""Softmax in powers of two against float64: scaled queries, products, a cap, a mask, weights and what is left over."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention.paged import AttentionParams
from cortexmlx.attention.softmax import Softmax, normalize

HEADS, GROUP, COLUMNS, DIM = 2, 3, 40, 8
TOLERANCE = {"float32": 3e-6, "float16": 3e-3, "bfloat16": 2.5e-2}
"""Of results of order 1. Below float32 the queries' products with the keys are rounded, and the weights once more."""


def both_ways(dtype: str, sinks: bool, cap: float | None, size: float) -> tuple[Any, Any]:
    """The weighted sum `[HEADS, GROUP, DIM]` by the class and by its definition in float64."""
    random = np.random.default_rng(int(size * 10))
    kind = getattr(mx, dtype)
    q = mx.array(random.normal(size=(HEADS, GROUP, DIM)) * size).astype(kind)
    keys, values = (mx.array(random.normal(size=(HEADS, COLUMNS, DIM))).astype(kind) for _ in range(2))
    extra = mx.array(random.normal(size=HEADS * GROUP) * size).astype(kind) if sinks else None
    seen = random.random((HEADS, GROUP, COLUMNS)) < 0.7
    seen[..., 0] = True

    softmax = Softmax(AttentionParams(0.25, extra, cap), kind, {})
    products = softmax.scores_from_products(softmax.scale_queries(q) @ keys.swapaxes(-1, -2))
    masked = mx.where(mx.array(seen), products, mx.array(-mx.inf, products.dtype))
    weights, total = softmax.weights(masked, (HEADS, GROUP, 1))
    assert weights.dtype == kind
    found = np.array(normalize(weights @ values, total).astype(mx.float32), float)

    q, keys, values = (np.array(a.astype(mx.float32), float) for a in (q, keys, values))
    logits = q @ keys.swapaxes(-1, -2) * 0.25
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    logits = np.where(seen, logits, -np.inf)
    columns = logits
    if extra is not None:
        columns = np.concatenate([logits, np.array(extra.astype(mx.float32), float).reshape(HEADS, GROUP, 1)], -1)
    exponentials = np.exp(columns - columns.max(-1, keepdims=True))
    wanted = exponentials[..., :COLUMNS] / exponentials.sum(-1, keepdims=True) @ values
    return found, wanted


@pytest.mark.parametrize("size", [1.0, 6.0])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_is_the_softmax(dtype: str, sinks: bool, cap: float | None, size: float) -> None:
    found, wanted = both_ways(dtype, sinks, cap, size)
    assert np.abs(found - wanted).max() < TOLERANCE[dtype] * size


@pytest.mark.parametrize("level", [-3e4, 0.0, 3e4])
def test_scores_of_any_level_keep_their_weights(level: float) -> None:
    """A maximum that began at 0, or sums without one, would lose or overflow them."""
    softmax = Softmax(AttentionParams(1.0), mx.float32, {})
    scores = mx.array([[[level, level + 1.0, -mx.inf, level]]])
    weights, total = softmax.weights(scores, (1, 1, 1))
    assert total is not None
    assert np.array(weights / total).reshape(-1) == pytest.approx([0.25, 0.5, 0.0, 0.25], abs=1e-6)


def test_columns_of_ones_are_made_once_for_a_step() -> None:
    ones: dict[int, mx.array] = {}
    for columns in (3, 5, 3):
        Softmax(AttentionParams(1.0), mx.float32, ones).weights(mx.zeros((1, 1, columns)), (1, 1, 1))
    assert sorted(ones) == [3, 5] and ones[3].shape == (3, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_slopes_are_added_in_float32_whatever_the_queries_are(dtype: str) -> None:
    """In bfloat16 a distance of 1001 would be 1000, and its bias off by a whole unit."""
    softmax = Softmax(AttentionParams(1.0, slopes=mx.array([1.0, 0.5])), getattr(mx, dtype), {})
    distance = mx.array([-1001.0, -1000.0, -999.0])
    scores = softmax.add_alibi(
        softmax.scores_from_products(mx.zeros((1, 2, 3), getattr(mx, dtype))), (1, 2, 1), lambda: distance
    )
    weights, total = softmax.weights(scores, (1, 2, 1))
    found = np.array(normalize(weights, total).astype(mx.float32))[0]
    wanted = np.exp([[-2.0, -1.0, 0.0], [-1.0, -0.5, 0.0]])
    assert np.abs(found - wanted / wanted.sum(-1, keepdims=True)).max() < TOLERANCE[dtype]


def test_what_no_model_of_mlx_lm_has_need_not_round_like_one() -> None:
    extra, slopes = mx.zeros(1), mx.zeros(1)
    for sinks, cap in ((None, None), (extra, None), (None, 2.0)):
        assert not Softmax(AttentionParams(1.0, sinks, cap), mx.float32, {}).beyond_mlx_lm
    assert Softmax(AttentionParams(1.0, extra, 2.0), mx.float32, {}).beyond_mlx_lm
    assert Softmax(AttentionParams(1.0, slopes=slopes), mx.float32, {}).beyond_mlx_lm
