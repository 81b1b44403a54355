"""MLX's attention kernels do what MLX's authors and its host code say: the judge of what is counted beside ours."""

from __future__ import annotations

import pytest

from cortexmlx.metal.lab.cost.mlx_attention import MlxShape, has_two_pass_gqa, one_pass, two_pass, two_pass_gqa
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
