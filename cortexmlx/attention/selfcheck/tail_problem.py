"""A small problem for the kernel that writes the tail, and its answer in float64 by NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.metal.tail_write import NewTokens, Norm, TailWrite, places_of

_POSITIONS = np.array([0, 5, 77], np.int32)
_COLUMNS, _COLUMN = 16, 6
_QUERY_HEADS, _KV_HEADS = 3, 2
_EPS = 1e-5

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TailProblem:
    """The kernel's inputs, and `wanted`: what it returns, in float64."""

    new: NewTokens
    tail: tuple[mx.array, ...]
    columns: int
    places: mx.array
    wanted: tuple[Numbers, ...]


def make_tail_problem(variant: TailWrite) -> TailProblem:
    """Return rows at several positions, whose tails have a token in every other column."""
    random = np.random.default_rng(11)
    rows, turning = len(_POSITIONS), variant.turning
    half = turning.dims // 2

    def draw(*shape: int) -> tuple[mx.array, Numbers]:
        numbers = random.integers(-16, 17, shape) / 32  # every dtype holds them
        return mx.array(numbers.astype(np.float32)).astype(getattr(mx, variant.dtype)), numbers

    (queries, q), (keys, k), (values, v) = (
        draw(rows, heads, dim)
        for heads, dim in (
            (_QUERY_HEADS, variant.key_dim),
            (_KV_HEADS, variant.key_dim),
            (_KV_HEADS, variant.value_dim),
        )
    )
    weight, w = draw(variant.key_dim)
    old_keys, new_keys = draw(rows, _KV_HEADS, _COLUMNS, variant.key_dim)
    old_values, new_values = draw(rows, _KV_HEADS, _COLUMNS, variant.value_dim)
    frequencies = (turning.base or 10000.0) ** (np.arange(half) / half)
    angle = (_POSITIONS[:, None] * turning.scale / frequencies)[:, None]

    def turned(x: Numbers, norm: bool) -> Numbers:
        if norm:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + _EPS) * w
        pairs = np.arange(turning.dims).reshape((half, 2) if turning.traditional else (2, half))
        first, second = pairs.T if turning.traditional else pairs
        out = x.copy()
        out[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
        out[..., second] = x[..., first] * np.sin(angle) + x[..., second] * np.cos(angle)
        return out

    new_keys[:, :, _COLUMN], new_values[:, :, _COLUMN] = turned(k, variant.key_norm), v
    norm = Norm(weight, _EPS)
    new = NewTokens(
        queries,
        keys,
        values,
        norm if variant.query_norm else None,
        norm if variant.key_norm else None,
        turning,
        None if turning.base is not None else mx.array(frequencies.astype(np.float32)),
    )
    places = mx.array(places_of(_COLUMNS, _COLUMN, _POSITIONS))
    wanted = (turned(q, variant.query_norm)[:, :, None], new_keys, new_values)
    return TailProblem(new, (old_keys, old_values), _COLUMNS, places, wanted)
