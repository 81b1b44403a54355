"""The kernel that norms, rotates and writes the tail, against float64 and against MLX's own operations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.metal.kernels import KernelFactory
from cortexmlx.metal.lab import sim
from cortexmlx.metal.tail_write import (
    HeadNorm,
    NewTokens,
    RopeParameters,
    TailWriteKernel,
    TailWriteVariant,
    pack_positions,
    refusal,
)

TOLERANCE = {"float32": 2e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Of numbers up to 4: each is rounded after the norm and after the rotation, by 2 ** -11 or 2 ** -8 of it. An angle of
517 is rounded to float32, as MLX does: by 3e-5."""
PLAIN = RopeParameters(64, False, 10000.0)


@dataclass(frozen=True)
class Case:
    turning: RopeParameters = PLAIN
    dtype: str = "float32"
    norms: tuple[bool, bool] = (True, True)
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (3, 2)
    rows: int = 3
    columns: int = 16


CASES = (
    Case(),
    Case(replace(PLAIN, scale=0.25), norms=(False, False), heads=(8, 1), columns=64, rows=9),
    Case(RopeParameters(24, True, 500000.0), "bfloat16", dims=(40, 64)),
    Case(RopeParameters(128, False, None), "float16", (False, True), (128, 128), heads=(2, 2), rows=1),
)


def tokens_of(case: Case) -> NewTokens:
    random = np.random.default_rng(5)
    dtype = getattr(mx, case.dtype)

    def draw(*shape: int) -> mx.array:
        return mx.array(np.clip(random.standard_normal(shape), -2.5, 2.5).astype(np.float32)).astype(dtype)

    (key_dim, value_dim), (query_heads, kv_heads) = case.dims, case.heads
    size = 512 if case.dtype == "float16" and case.norms[1] else 1  # whose squares no half holds
    half = case.turning.dims // 2
    llama3 = 10000.0 ** (np.arange(half) / half) * np.where(np.arange(half) > half // 2, 8.0, 1.0)
    llama3[-1] = np.inf  # a pair that does not turn
    norms = [
        HeadNorm(draw(key_dim) + 1, eps) if norm else None for norm, eps in zip(case.norms, (1e-5, 1e-2), strict=True)
    ]
    return NewTokens(
        draw(case.rows, query_heads, key_dim),
        draw(case.rows, kv_heads, key_dim) * size,
        draw(case.rows, kv_heads, value_dim),
        norms[0],
        norms[1],
        case.turning,
        None if case.turning.base is not None else mx.array(llama3.astype(np.float32)),
    )


def in_float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def exact(given: mx.array, norm: HeadNorm | None, new: NewTokens, positions: np.ndarray) -> np.ndarray:
    x, turning = in_float64(given), new.rope
    if norm is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps) * in_float64(norm.weight)
    half = turning.dims // 2
    base = turning.base or 1.0
    frequencies = base ** (np.arange(half) / half) if new.frequencies is None else in_float64(new.frequencies)
    angle = (positions[:, None] * turning.scale / frequencies)[:, None]
    first, second = (
        (slice(0, turning.dims, 2), slice(1, turning.dims, 2))
        if turning.traditional
        else (slice(0, half), slice(half, turning.dims))
    )
    out = x.copy()
    out[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
    out[..., second] = x[..., first] * np.sin(angle) + x[..., second] * np.cos(angle)
    return out


def by_mlx(given: mx.array, norm: HeadNorm | None, new: NewTokens, positions: np.ndarray) -> mx.array:
    x = given if norm is None else mx.fast.rms_norm(given, norm.weight, norm.eps)
    turning = new.rope
    return mx.fast.rope(
        x[:, :, None],
        turning.dims,
        traditional=turning.traditional,
        base=turning.base,
        scale=turning.scale,
        offset=mx.array(positions),
        freqs=new.frequencies,
    )[:, :, 0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.turning.dims} of {case.dims[0]}, {case.dtype}")
def test_it_norms_rotates_and_writes_one_column(factory: KernelFactory, case: Case) -> None:
    new, kernel = tokens_of(case), TailWriteKernel(factory)
    positions = np.array([0, 1, 517, 3, 40, 41, 42, 43, 44][: case.rows], np.int32)
    wanted = [exact(new.queries, new.query_norm, new, positions), exact(new.keys, new.key_norm, new, positions)]
    theirs = [by_mlx(new.queries, new.query_norm, new, positions), by_mlx(new.keys, new.key_norm, new, positions)]
    tail = None
    for column in (0, 1, 6):
        places = mx.array(pack_positions(case.columns, column, positions))
        with sim.options(poison=True, fast_errors=True):
            turned, *after = kernel(new, tail, case.columns, places)
        got = [in_float64(turned)[:, :, 0], in_float64(after[0])[:, :, column]]
        for mine, right, other in zip(got, wanted, theirs, strict=True):
            assert np.abs(mine - right).max() < TOLERANCE[case.dtype]
            assert np.abs(mine - in_float64(other)).max() < 1.5 * TOLERANCE[case.dtype]
        assert np.array_equal(in_float64(after[1])[:, :, column], in_float64(new.values))
        for array, was in zip(after, tail or [mx.zeros_like(a) for a in after], strict=True):
            others = [c for c in range(case.columns) if c != column]
            assert np.array_equal(in_float64(array)[:, :, others], in_float64(was)[:, :, others])
        tail = tuple(after)


def test_what_the_kernel_does_not_serve_has_a_reason() -> None:
    served = TailWriteVariant("float16", 64, 64, PLAIN, query_norm=True, key_norm=True)
    assert refusal(served) is None
    assert "float64" not in (refusal(replace(served, dtype="float64")) or "") and refusal(replace(served, dtype="int8"))
    assert "multiple of 4" in (refusal(replace(served, value_dim=66)) or "")
    assert "small inputs" in (refusal(replace(served, key_dim=4, rope=replace(PLAIN, dims=4))) or "")
    for dims in (0, 63, 66):
        assert "pairs" in (refusal(replace(served, rope=replace(PLAIN, dims=dims))) or "")
