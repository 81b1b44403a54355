"""The figures by which `rules.py` chooses between the vector and the matrix kernel, beside those of the compiled
kernels.

A figure is the cycles in which a scheduler of an M1 issues what one token of a KV head needs. It compares two kernels
that read the same bytes. It is no time: it knows no memory, no latency and no occupancy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cortexmlx.metal.lab.cost.compiled import RECORD_AGAIN, CompiledKernel, UnusableRecord, packaged_record
from cortexmlx.metal.rules import GEOMETRIES, Variant, refusal
from cortexmlx.metal.shape import Kernel

DIMS = (64, 80, 96, 112, 128, 192, 256)
GROUPS = (1, 2, 4, 8, 16)
"""Query heads per KV head. 3 heads cost what 4 do, and 5 to 7 what 8 do: both kernels compute incomplete tiles like
full ones.
"""

ISSUE_CYCLES = {"shuffle": 2.0, "reduce": 14.5, "matrix": 20.9, "convert": 2.0}
"""Cycles per instruction of a simdgroup, by the compiler's classes, as measured on an M1 by
philipturner/metal-benchmarks. Every other instruction counts 1.
"""


def shapes(*dtypes: str) -> Iterator[Variant]:
    """Return the shapes of the table."""
    return (Variant(t, t, dim, dim, 32, group) for t in dtypes for dim in DIMS for group in GROUPS)


def candidates(variant: Variant) -> list[Variant]:
    """Return the variant for every kernel that serves it. The chosen kernel is the first."""
    others = (replace(variant, forced_kernel=kernel) for kernel in GEOMETRIES if kernel is not variant.kernel)
    return [variant, *(other for other in others if refusal(other) is None)]


def compiled(variant: Variant) -> CompiledKernel | None:
    """Return the record of a variant's decode kernel, the same with and without sinks; None if there is none."""
    return packaged_record().find(variant.geometry.name, replace(variant, sinks=False).label)


def per_token(variant: Variant) -> dict[str, float]:
    """Return instructions per token and KV head, of all simdgroups, by compiler class. The record must have them."""
    geometry, found = variant.geometry, compiled(variant)
    if found is None:
        raise UnusableRecord(f"{variant.label} is not in the record: {RECORD_AGAIN}")
    heads = min(geometry.tile, variant.group) * geometry.tiles * geometry.parts
    return {kind: heads * number for kind, number in found.per_token_head.items()}


def issue_cycles(variant: Variant) -> float:
    """Return the cycles in which the instructions of `per_token` are issued."""
    return sum(ISSUE_CYCLES.get(kind, 1.0) * number for kind, number in per_token(variant).items())


def table() -> Iterator[str]:
    """Yield the table's lines: issue cycles per token and KV head of vector and matrix kernel. * marks the chosen."""
    yield f"{'':<14}" + "".join(f"{group:>8} per KV head" for group in GROUPS)
    yield f"{'':<14}" + f"{'vector  matrix':>20}" * len(GROUPS)
    for variants in zip(*[shapes("float16", "bfloat16", "float32")] * len(GROUPS), strict=True):
        cells = "".join(f"{_cell(variant, Kernel.VECTOR)}{_cell(variant, Kernel.MATRIX)}" for variant in variants)
        yield f"{variants[0].dtype:<10}{variants[0].key_dim:>4}{cells}"


def _cell(variant: Variant, kernel: Kernel) -> str:
    for candidate in candidates(variant):
        if candidate.kernel is kernel and compiled(candidate):
            return f"{issue_cycles(candidate):>9.0f}{'*' if variant.kernel is kernel else ' '}"
    return f"{'-':>9} "
