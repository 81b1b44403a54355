"""MLX's attention kernels do what MLX's authors and its host code say: the judge of what is counted beside ours."""

from __future__ import annotations

import pytest

from cortexmlx.metal.lab.cost.mlx_attention import (
    QUERY_ROWS,
    MlxShape,
    has_two_pass_gqa,
    key_rows,
    one_pass,
    steel,
    two_pass,
    two_pass_gqa,
)
from cortexmlx.metal.lab.sim.report import LaunchReport


def loaded(report: LaunchReport) -> int:
    """Bytes of keys and values that were loaded."""
    return sum(report.buffers[f"buffer({index})"].bytes_read for index in (1, 2))


def test_a_simdgroup_for_each_query_head_loads_everything_for_each_query_head() -> None:
    group = 4
    shape = MlxShape("float16", 64, group, 96, kv_heads=2)
    assert shape.live_bytes == 2 * 2 * 96 * 64 * 2
    for report in (one_pass(shape), two_pass(shape, 8)):
        assert loaded(report) == group * shape.live_bytes
    assert two_pass(shape, 8).simd_ops["reduce"] == 2 * group * 96


def test_the_shared_kernel_loads_everything_once_for_each_tile_of_heads() -> None:
    dim, held = 128, 4
    if not has_two_pass_gqa():
        pytest.skip("the installed MLX has no sdpa_vector_2pass_1_gqa")
    shape = MlxShape("float16", dim, 8, 128)
    report = two_pass_gqa(shape, 2, held)
    assert loaded(report) == 8 // held * shape.live_bytes
    assert report.simd_ops["reduce"] == 8 * 128


@pytest.mark.parametrize("masked", [False, True])
def test_a_causal_launch_skips_the_future_and_a_masked_one_does_not(masked: bool) -> None:
    heads, dim, first, end = 2, 64, 64, 128
    report = steel(MlxShape("float16", dim, heads, end), first, masked=masked)
    tiles = 0
    for row in range(first, end, QUERY_ROWS):
        tiles += -(-(end if masked else row + QUERY_ROWS) // key_rows(dim))
    squares = heads * tiles * QUERY_ROWS * key_rows(dim) / 64
    assert report.simd_instructions["matrix_multiply"] == squares * 2 * dim / 8
    assert report.findings == ()
