"""What a shape says of itself, and what the kernels count as it does."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from cortexmlx.metal.kernels import kernel_text
from cortexmlx.metal.lab import sim
from cortexmlx.metal.shape import AttentionShape
from cortexmlx.metal.vector import lane_numbers

SHAPE = AttentionShape("float16", "float16", 128, 128, 32, 4)


def test_a_label_names_all_that_differs() -> None:
    changes = [
        {},
        {"dtype": "bfloat16"},
        {"kv_dtype": "bfloat16"},
        {"key_dim": 64},
        {"value_dim": 64},
        {"block_size": 16},
        {"group": 8},
        {"softcap": True},
        {"sinks": True},
        {"query_tokens": 2},
    ]
    labels = [replace(SHAPE, **change).label for change in changes]
    assert labels[0] == "float16, head_dim 128, 4 per KV head, blocks of 32"
    assert len({*labels}) == len(labels)


@pytest.mark.parametrize("dim", [8, 12, 64, 80, 96, 100, 112, 128, 192, 256])
def test_the_kernels_count_a_lanes_numbers_and_a_partials_floats_as_the_shape_does(dim: int) -> None:
    kernel = sim.metal_kernel(
        name="counts",
        input_names=[],
        output_names=["counts"],
        source="counts[0] = LaneLayout<DIM>::COUNT; counts[1] = sizeof(Partial<DIM>) / sizeof(float);",
        header=kernel_text("paged_attention.h"),
    )
    one = (1, 1, 1)
    (counts,) = kernel(
        inputs=[],
        template=[("DIM", dim)],
        grid=one,
        threadgroup=one,
        output_shapes=[(2,)],
        output_dtypes=[mx.int32],
    )
    assert counts.tolist() == [lane_numbers(dim), replace(SHAPE, value_dim=dim).partial_floats]
