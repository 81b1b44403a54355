"""MLX's tiled attention as it is counted: it does what its host code would have it do."""

from __future__ import annotations

import pytest

from cortexmlx.metal.lab.cost.mlx_attention import QUERY_ROWS, MlxShape, key_rows, steel


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
