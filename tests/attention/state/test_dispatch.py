"""A recurrent module that is called in parts computes what it computes for each row by itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from cortexmlx.attention.recurrent import RecurrentCache, SpanStep, TokenSpan, install_recurrent_hook
from cortexmlx.errors import ModelUnsupported


class Sums(nn.Module):  # type: ignore[misc]
    """`x[t]` and all before it in its row, each at its position; knows whether it is the row's beginning."""

    def __call__(self, x: mx.array, scale: mx.array, positions: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        rows, length, _ = x.shape
        before = mx.full((rows, 1, 1), 1000.0) if cache[0] is None else cache[0]
        sums = before + mx.cumsum(x, axis=1)
        cache[0] = sums[:, -1:]
        cache.advance(length)
        return sums * scale, positions[:, None] + mx.arange(length)[None]


class Pairs(nn.Module):  # type: ignore[misc]
    """What was there one token before, kept in the second slot by another module than the first."""

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        before = mx.zeros_like(x[:, :1]) if cache[1] is None else cache[1]
        cache[1] = x[:, -1:]
        return mx.concatenate([before, x[:, :-1]], axis=1)


install_recurrent_hook([Sums, Pairs])


def numbers(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, 1, 1)).astype(np.float32)


def test_parts_are_put_together_in_the_order_of_the_flat_tokens() -> None:
    """Three single tokens in two batches, out of order, and a piece that is cut twice."""
    x, positions = numbers(9), np.array([7, 0, 9, 20, 21, 22, 23, 24, 25], np.int32)
    parts = [
        TokenSpan(np.array([[0], [2]], np.int32)),
        TokenSpan(np.array([[1]], np.int32)),
        TokenSpan(np.array([[3, 4]], np.int32)),
        TokenSpan(np.array([[5, 6, 7]], np.int32), continues_previous=True),
        TokenSpan(np.array([[8]], np.int32), continues_previous=True),
    ]
    leaf = RecurrentCache(2)
    states = [[mx.array([[[10.0]], [[20.0]]]), mx.array([[[1.0]], [[2.0]]])], [None, None], [None, None]]
    leaf.begin(SpanStep(parts), [*states, [None, None], [None, None]])
    scale = mx.array([2.0])
    sums, places = Sums()(mx.array(x), scale, mx.array(positions), cache=leaf)
    pairs = Pairs()(mx.array(x), leaf)
    after, _ = leaf.end()
    flat = x[:, 0, 0]
    piece = 1000 + np.cumsum(flat[3:])
    wanted = np.array([10 + flat[0], 1000 + flat[1], 20 + flat[2], *piece], np.float32) * 2
    np.testing.assert_allclose(np.array(sums)[:, 0, 0], wanted, rtol=1e-6)
    assert np.array(places)[:, 0].tolist() == [7, 0, 9, 20, 21, 22, 23, 24, 25]
    np.testing.assert_array_equal(np.array(pairs)[:, 0, 0], np.array([1, 0, 2, 0, *flat[3:8]], np.float32))
    np.testing.assert_allclose([np.array(a[0])[-1, 0, 0] for a in after[2:]], piece[[1, 4, 5]], rtol=1e-6)
    np.testing.assert_array_equal([np.array(a[1])[-1, 0, 0] for a in after[2:]], flat[[4, 7, 8]])
    assert np.array(after[0][0]).shape == (2, 1, 1) and leaf.step is None


def test_a_step_of_one_batch_is_one_call_on_the_arrays_themselves() -> None:
    seen: list[mx.array] = []

    class Noted(nn.Module):  # type: ignore[misc]
        def __call__(self, x: mx.array, cache: Any) -> mx.array:
            seen.append(x)
            assert type(cache) is ArraysCache
            return x

    install_recurrent_hook([Noted])
    leaf, x = RecurrentCache(1), mx.array(numbers(4))
    leaf.begin(SpanStep([TokenSpan(np.arange(4, dtype=np.int32)[:, None])]), [[None]])
    assert Noted()(x, cache=leaf) is x and seen == [x]


def test_with_any_other_cache_the_original_runs() -> None:
    cache = ArraysCache(2)
    x = mx.array(numbers(5))[:, 0][None]
    sums, _ = Sums()(x, mx.array([1.0]), mx.array([0]), cache)
    np.testing.assert_allclose(np.array(sums)[0, :, 0], 1000 + np.cumsum(numbers(5)[:, 0, 0]), rtol=1e-6)
    install_recurrent_hook([Sums])
    assert not hasattr(Sums.__call__.replaced, "replaced"), "once"


def test_shifted_is_the_token_before_in_the_same_row() -> None:
    parts = [
        TokenSpan(np.array([[0]], np.int32)),
        TokenSpan(np.array([[2, 3]], np.int32)),
        TokenSpan(np.array([[4, 5]], np.int32), continues_previous=True),
        TokenSpan(np.array([[1]], np.int32)),
    ]
    leaf = RecurrentCache(1)
    leaf.begin(SpanStep(parts), [[mx.array([[50.0]])], [None], [None], [mx.array([[60.0]])]])
    new = mx.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
    assert leaf.shift_by_token(0, new)[:, 0].tolist() == [50, 60, 0, 3, 4, 5]
    assert [cache[0].tolist() for cache in leaf.caches] == [[[1]], [[4]], [[6]], [[2]]]


def test_results_that_are_not_of_tokens_are_refused() -> None:
    class Total(nn.Module):  # type: ignore[misc]
        def __call__(self, x: mx.array, cache: Any) -> mx.array:
            return x.sum()

    install_recurrent_hook([Total])
    leaf = RecurrentCache(1)
    parts = [TokenSpan(np.array([[0]], np.int32)), TokenSpan(np.array([[1, 2]], np.int32))]
    leaf.begin(SpanStep(parts), [[None], [None]])
    with pytest.raises(ModelUnsupported, match="do not belong to single tokens"):
        Total()(mx.array(numbers(3)), leaf)
