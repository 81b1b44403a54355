"""Rows that attend to a list of their blocks: float64 attention over those tokens, and the bits of a row that has no
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.kv.step import GroupStep, restrict_to_blocks
from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.rules import Variant
from support.kernels.paged_problem import (
    NONE,
    Layout,
    Options,
    Row,
    answer,
    attend,
    error,
    lay_out,
    random_rows,
    variant,
)

KERNELS = {"vector": variant(group=2), "matrix": variant(group=3, dim=64)}
TOKENS = (5, 40, 264, 300, 601, 7)
LISTS = ([0], [1, 4], [], [0, 1, 20, 30, 36, 37], [75], [0])
"""Of blocks of 8: all, an end that is partly filled or full, none but the tail, gaps, the newest block only."""


@pytest.fixture(params=list(KERNELS))
def v(request: pytest.FixtureRequest) -> Variant:
    """A variant that runs on the kernel that it is named for."""
    chosen = KERNELS[request.param]
    assert chosen.kernel.value == request.param
    return chosen


def listed(v: Variant, layout: Layout, lists: Sequence[Sequence[int]]) -> Layout:
    """The layout with the tables and lengths of the lists; blocks that are not listed are poison."""
    places = [np.array(places, np.int32) for places in lists]
    runs = (None,) * len(places)
    step = restrict_to_blocks(
        GroupStep(layout.tables, layout.arena_tokens, runs, (), AttentionWindow()),
        places,
        v.block_size,
        layout.tables.max() + 1,
    )
    wanted = {int(layout.tables[row, place]) for row, mine in enumerate(places) for place in mine}
    keys, values = layout.keys.copy(), layout.values.copy()
    for block in set(range(keys.shape[1] // v.block_size)) - wanted:
        slots = slice(block * v.block_size, (block + 1) * v.block_size)
        keys[:, slots], values[:, slots] = np.nan, np.inf
    return replace(layout, keys=keys, values=values, tables=step.tables, arena_tokens=step.lengths)


def kept(v: Variant, row: Row, places: Sequence[int], tail_tokens: int) -> Row:
    """A row that has the tokens of these blocks and of the tail, and no others."""
    arena = row.tokens - tail_tokens
    position = np.array([t for t in range(row.tokens) if t >= arena or t // v.block_size in places], int)
    return replace(row, keys=row.keys[:, position], values=row.values[:, position])


@pytest.mark.parametrize("tail_tokens", [1, 5])
def test_lists_of_every_kind_in_one_batch(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant, tail_tokens: int
) -> None:
    rows = random_rows(v, [n + tail_tokens for n in TOKENS])
    layout = listed(v, lay_out(v, rows, tail_tokens), LISTS)
    with sim.options(poison=True):
        got = attend(kernels, v, rows, layout=layout)
    short = [kept(v, row, places, tail_tokens) for row, places in zip(rows, LISTS, strict=True)]
    assert error(got, answer(v, short)) < tolerance["float32"]
    assert np.array_equal(got, attend(kernels, v, short, tail_tokens=tail_tokens)), "the bits of rows without gaps"


@pytest.mark.parametrize(
    "v",
    [
        Variant("bfloat16", "bfloat16", 128, 128, 32, 1),
        Variant("float16", "float16", 128, 128, 32, 8),
        Variant("float16", "float16", 64, 64, 128, 4),
    ],
    ids=lambda v: v.label,
)
@pytest.mark.slow
def test_the_first_and_the_newest_blocks_of_long_rows(
    kernels: DecodeKernels, tolerance: dict[str, float], v: Variant
) -> None:
    rows = random_rows(v, [1500, 700, 2049, 300])
    blocks = [-(-(row.tokens - 3) // v.block_size) for row in rows]
    lists = [sorted({0, *range(max(0, n - 9), n)}) for n in blocks]
    sinks = np.linspace(-1, 3, 2 * v.group)
    for options in (NONE, Options(softcap=5.0, sinks=sinks)):
        got = attend(kernels, v, rows, options, layout=listed(v, lay_out(v, rows, 3), lists))
        short = [kept(v, row, places, 3) for row, places in zip(rows, lists, strict=True)]
        assert error(got, answer(v, short, options)) < tolerance[v.dtype]


def test_a_list_of_all_blocks_changes_no_bit(kernels: DecodeKernels, v: Variant) -> None:
    rows = random_rows(v, [n + 2 for n in TOKENS])
    layout = lay_out(v, rows, 2)
    whole = listed(v, layout, [range(-(-n // v.block_size)) for n in TOKENS])
    assert np.array_equal(attend(kernels, v, rows, layout=whole), attend(kernels, v, rows, layout=layout))
