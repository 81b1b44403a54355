"""What prefill costs: products follow from the tiles, and the kernel is used where it needs fewer cycles."""

from __future__ import annotations

import numpy as np
import pytest

from cortexmlx.kv.attention_window import AttentionWindow
from cortexmlx.metal.cost.cycles import Kind, cycles
from cortexmlx.metal.cost.prefill import END, FIRST, ours, squares, steel, table
from cortexmlx.metal.prefill import PrefillVariant, why_ours


def variant(dim: int) -> PrefillVariant:
    return PrefillVariant("float16", "float16", dim, dim, 32, 4)


def test_squares_are_the_scores_that_are_seen() -> None:
    token = np.arange(END)
    for window in (None, 128):
        back = token[FIRST:, None] - token
        seen = (back >= 0) & (back < (window or END))
        assert squares(4, window) == 4 * seen.sum() / 64


def test_products_are_those_of_the_slices_that_a_tile_sees() -> None:
    v, window = variant(64), 128
    assert (v.tile, v.slice) == (16, 32)
    computed = 0
    for first in range(FIRST, END, 8):  # a simdgroup's queries, of 4 heads
        oldest = max(0, first + 1 - window) // v.slice
        computed += 4 * ((first + 7) // v.slice - oldest + 1) * v.slice // 8
    cost = ours(v, window)
    assert cost.work[Kind.MATRIX_HALF] == pytest.approx(computed * 16 / squares(4, window))
    assert cost.work[Kind.SHUFFLE_FIXED] * cost.squares == pytest.approx(6 * (computed / 4 + 4 * (END - FIRST) / 8))
    assert cost.counted.loaded > cost.counted.live_bytes / 64, "keys and values, once for a tile of 64 queries"


@pytest.mark.parametrize(("dim", "window"), [(64, 128), pytest.param(128, 128, marks=pytest.mark.slow)])
def test_mlx_computes_what_a_window_hides_and_ours_does_not(dim: int, window: int) -> None:
    mine, theirs = ours(variant(dim), window), steel("float16", dim, 4, window)
    assert theirs.work[Kind.MATRIX_HALF] > 1.5 * mine.work[Kind.MATRIX_HALF]
    assert cycles(theirs.work) > 1.5 * cycles(mine.work)
    assert why_ours(variant(dim), AttentionWindow(window), matrix_units=False) is not None


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_without_a_window_both_spend_about_the_same(dim: int) -> None:
    mine, theirs = ours(variant(dim)), steel("float16", dim, 4)
    assert mine.work[Kind.MATRIX_HALF] == theirs.work[Kind.MATRIX_HALF]
    assert 0.85 < cycles(mine.work) / cycles(theirs.work) < 1.0
    assert why_ours(variant(dim), AttentionWindow(), matrix_units=False) is None


@pytest.mark.slow
def test_the_table_has_a_line_for_each_kernel() -> None:
    lines = list(table())
    assert sum("paged_prefill" in line for line in lines) == 6
    assert sum("steel_attention" in line for line in lines) == 4 and sum("unfused" in line for line in lines) == 2
