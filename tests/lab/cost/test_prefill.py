"""What prefill costs: products follow from the tiles, and the kernel is used where it needs fewer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.cost.prefill import END, FIRST, PrefillCost, count, fused, ours, squares, table, unfused
from cortexmlx.metal.prefill import PrefillVariant, reason_for_our_kernel

SOURCE = """
  threadgroup float kept[32];
  const uint lane = thread_index_in_simdgroup;
  float sum = 0.0f;
  for (int t = 0; t < 8; t++) {
    sum += float(((const device half4*)keys)[t * 32 + lane].x);
  }
  kept[lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<float, 8, 8> a = make_filled_simdgroup_matrix<float, 8, 8>(1.0f), sums = a;
  simdgroup_multiply_accumulate(sums, a, a, sums);
  out[lane] = kept[31 - lane] * factor[0] + sums.thread_elements()[0];
"""


def variant(dim: int) -> PrefillVariant:
    return PrefillVariant("float16", "float16", dim, dim, 32, 4)


def test_a_launch_is_counted_as_its_text_says() -> None:
    """Eight rows of 256 bytes, the store of the result (the factor is a single number), a product and a barrier."""
    kernel = sim.metal_kernel(name="counted", input_names=["keys", "factor"], output_names=["out"], source=SOURCE)
    with sim.recording() as recorded:
        kernel(
            inputs=[mx.ones((8, 128), dtype=mx.float16), mx.array([2.0])],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(32,)],
            output_dtypes=[mx.float32],
        )
    found = count("counted", recorded.last, ["keys"], 4.0, 256)
    assert found == PrefillCost("counted", 1 / 4, (8 + 1) / 4, 2 * 32 * 4 / 4, 1 / 4)


def test_squares_are_the_scores_that_are_seen() -> None:
    token = np.arange(END)
    for window in (None, 128):
        back = token[FIRST:, None] - token
        seen = (back >= 0) & (back < (window or END))
        assert squares(4, window) == 4 * seen.sum() / 64


def test_products_are_those_of_the_slices_that_a_tile_sees() -> None:
    v, window = variant(64), 128
    assert (v.tile, v.slice_tokens) == (16, 32)
    computed = 0
    for first in range(FIRST, END, 8):  # a simdgroup's queries, of 4 heads
        oldest = max(0, first + 1 - window) // v.slice_tokens
        computed += 4 * ((first + 7) // v.slice_tokens - oldest + 1) * v.slice_tokens // 8
    cost = ours(v, window)
    assert cost.products == pytest.approx(computed * 16 / squares(4, window))
    assert cost.group_bytes > 0 and cost.barriers > 0 and cost.loads > 0


@pytest.mark.parametrize(("dim", "window"), [(64, 128), pytest.param(128, 128, marks=pytest.mark.slow)])
def test_mlx_computes_what_a_window_hides_and_ours_does_not(dim: int, window: int) -> None:
    mine, theirs = ours(variant(dim), window), fused("float16", dim, 4, window)
    assert theirs.products > 1.5 * mine.products and theirs.loads > mine.loads
    assert reason_for_our_kernel(variant(dim), AttentionWindow(window), matrix_units=False) is not None


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_without_a_window_both_compute_the_same_products(dim: int) -> None:
    assert ours(variant(dim)).products == fused("float16", dim, 4).products
    assert reason_for_our_kernel(variant(dim), AttentionWindow(), matrix_units=False) is None


def test_unfused_attention_computes_the_squares_that_nobody_sees_too() -> None:
    """128 queries by 512 keys, of which they see the first 385 to all 512. Behind the window: by 255; they see 128."""
    assert unfused(64) == pytest.approx(16 * 128 * 512 / sum(range(385, 513)))
    assert unfused(64, 128) == pytest.approx(16 * 255 / 128)


@pytest.mark.slow
def test_the_table_has_a_line_for_each_kernel() -> None:
    lines = list(table())
    assert sum("paged_prefill" in line for line in lines) == 6
    assert sum("steel_attention" in line for line in lines) == 4 and sum("unfused" in line for line in lines) == 2
