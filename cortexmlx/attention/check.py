"""Checking a variant of the decode kernels against the reference backend, on a problem with every kind of edge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from cortexmlx.attention import reference
from cortexmlx.attention.paged import PagedKV
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep
from cortexmlx.metal.kernels import DecodeInputs, DecodeKernels, KernelFactory
from cortexmlx.metal.rules import PARTITION, Variant, refusal
from cortexmlx.metal.work import padded_tables, work_list

_TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest difference of two results of order 1 that rounding to the dtype explains, in sums made in float32."""

_KV_HEADS = 2
_COLUMNS = 16
_TAIL_TOKENS = 5
_LENGTHS = (2 * PARTITION + 37, 31, 1, PARTITION - 3)
_WINDOW = PARTITION + 50


@dataclass(frozen=True)
class VariantCheck:
    """What came of checking a variant. `error` is the largest difference from the reference; None if it did not run."""

    variant: Variant
    error: float | None
    reason: str | None = None

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as agreement."""
        return _TOLERANCE[self.variant.dtype]

    @property
    def agrees(self) -> bool:
        """The kernels ran and gave what the reference gives."""
        return self.error is not None and self.error <= self.tolerance

    @property
    def outcome(self) -> str:
        """The result in words."""
        if self.error is None:
            return f"it does not run ({self.reason})"
        verb = "agrees with" if self.agrees else "differs from"
        return f"it {verb} the reference by {self.error:.2g} (limit {self.tolerance:.2g})"


VARIANTS: tuple[Variant, ...] = (
    *(Variant(t, t, d, d, 32, 4) for t in ("float16", "bfloat16", "float32") for d in (64, 80, 96, 112, 128, 192, 256)),
    *(Variant("float16", "float16", 128, 128, 32, g) for g in (1, 2, 3, 5, 7, 8, 16)),
    *(Variant("float16", "float16", 128, 128, b, 4) for b in (8, 16, 64, 128)),
    Variant("float16", "float16", 192, 128, 32, 4),
    Variant("bfloat16", "bfloat16", 64, 64, 32, 8, sinks=True),
    Variant("float16", "float16", 256, 256, 32, 2, softcap=True),
)
"""The variants that `cortexmlx doctor` checks: every head_dim and dtype, groups, block sizes and options once."""


def check_all(factory: KernelFactory) -> Iterator[VariantCheck]:
    """Check every variant of `VARIANTS`, one after the other, on kernels made by `factory`."""
    kernels = DecodeKernels(factory)
    return (check_variant(kernels, variant) for variant in VARIANTS)


def check_variant(kernels: DecodeKernels, variant: Variant) -> VariantCheck:
    """Run the kernels and the reference on the same problem: rows of unequal length, a tail, with a window and
    without. Whatever goes wrong is a result, not an exception.
    """
    reason = refusal(variant)
    if reason is not None:
        return VariantCheck(variant, None, reason)
    try:
        errors = [_error(kernels, variant, window) for window in (None, _WINDOW)]
    except Exception as error:
        return VariantCheck(variant, None, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    return VariantCheck(variant, float(np.max(errors)))


def _error(kernels: DecodeKernels, variant: Variant, window: int | None) -> float:
    """The largest difference. The reference computes in float32, on the numbers that the kernels read."""
    random = np.random.default_rng(7)

    def numbers(*shape: int, dtype: str) -> mx.array:
        return mx.array(random.standard_normal(shape, np.float32)).astype(getattr(mx, dtype))

    rows, heads = len(_LENGTHS), _KV_HEADS * variant.group
    step, arena = _problem(variant, window, random)
    dims = (variant.key_dim, variant.value_dim)
    keys, values = (numbers(_KV_HEADS, arena.slots, dim, dtype=variant.kv_dtype) for dim in dims)
    tail_keys, tail_values = (numbers(rows, _KV_HEADS, _COLUMNS, dim, dtype=variant.kv_dtype) for dim in dims)
    queries = numbers(rows, heads, 1, variant.key_dim, dtype=variant.dtype)
    sinks = numbers(heads, dtype="float32")
    scale, softcap = variant.key_dim**-0.5, 2.0 if variant.softcap else None

    work = work_list(step.lengths, _TAIL_TOKENS, window, PARTITION)
    tables, plan = mx.array(padded_tables(step.tables)), mx.array(work.plan)
    factors = mx.array([scale, softcap or 0.0])
    inputs = DecodeInputs(queries, keys, values, tail_keys, tail_values, tables, plan, factors, sinks)
    got = kernels(variant, work.items, inputs).astype(mx.float32)

    arena.write(0, slice(0, arena.slots), *(a.astype(mx.float32) for a in (keys, values)))
    tail = (tail_keys.astype(mx.float32), tail_values.astype(mx.float32))
    kv = PagedKV(arena, 0, step, tail, _TAIL_TOKENS, mx.float32, reference.attend)
    wanted = reference.attend(
        queries.astype(mx.float32), kv, scale=scale, sinks=sinks if variant.sinks else None, softcap=softcap
    )
    difference = float(np.array(mx.abs(got - wanted).max()))
    return float("inf") if np.isnan(difference) else difference


def _problem(variant: Variant, window: int | None, random: np.random.Generator) -> tuple[GroupStep, KVArena]:
    """Rows of `_LENGTHS` tokens whose blocks lie scattered in a float32 arena."""
    size = variant.block_size
    counts = [-(-length // size) for length in _LENGTHS]
    blocks = sum(counts)
    spec = KVSpec(_KV_HEADS, variant.key_dim, variant.value_dim, "float32", window)
    arena = KVArena([LayerGroup(spec, (0,))], blocks, size)
    tables = np.full((len(counts), max(counts)), arena.null_block, np.int32)
    scattered = iter(random.permutation(blocks))
    for row, count in enumerate(counts):
        tables[row, :count] = [next(scattered) for _ in range(count)]
    lengths = np.array(_LENGTHS, np.int32)
    return GroupStep(tables, lengths, (None,) * len(counts), (), window), arena
