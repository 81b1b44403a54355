"""Which matmuls the kernel serves, and how a shape fills its threadgroup."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from cortexmlx.metal.matmul.shape import (
    FORMATS,
    MATMULS,
    MAX_PAIRS,
    MAX_ROWS,
    MatmulShape,
    RowSplit,
    refusal,
    split_rows,
)

SHAPE = MatmulShape("float16", "affine", 4, 64, 4096, 1000)
EXPERTS = replace(SHAPE, experts=16)


@pytest.mark.parametrize(
    ("shape", "rows", "reason"),
    [
        (replace(SHAPE, dtype="int8"), 8, "float32"),
        (replace(SHAPE, bits=6), 8, "4 and 8 bits"),
        (replace(SHAPE, group=128), 8, "groups of 32 or 64"),
        (replace(SHAPE, mode="mxfp4"), 8, "mxfp4"),
        (replace(SHAPE, mode="nvfp4", group=16), 8, "mxfp4"),
        (replace(SHAPE, inputs=96), 8, "whole groups"),
        (replace(SHAPE, outputs=0), 8, "an output"),
        (replace(SHAPE, experts=0), 8, "an expert"),
        (replace(SHAPE, inputs=64, outputs=3), 8, "address space"),
        (replace(EXPERTS, experts=8389), 8, "16 GiB"),
        (SHAPE, 0, "1 to 32 rows"),
        (SHAPE, MAX_ROWS + 1, "1 to 32 rows"),
        (EXPERTS, 0, "pairs"),
        (EXPERTS, MAX_PAIRS + 1, "pairs"),
    ],
)
def test_what_the_kernel_does_not_serve_has_a_reason(shape: MatmulShape, rows: int, reason: str) -> None:
    refused = refusal(shape, rows)
    assert refused is not None and reason in refused


@pytest.mark.parametrize("rows", [1, MAX_ROWS])
def test_what_it_serves_has_none(rows: int) -> None:
    assert refusal(SHAPE, rows) is None and refusal(replace(SHAPE, mode="mxfp4", group=32), rows) is None
    assert refusal(EXPERTS, MAX_PAIRS) is None and refusal(replace(EXPERTS, experts=8388), 8) is None
    assert [p.label for p in MATMULS if refusal(p.shape, p.rows) is not None] == []


@pytest.mark.parametrize(("inputs", "slices"), [(64, 1), (128, 2), (192, 2), (448, 4), (512, 8), (4096, 8), (14336, 8)])
def test_slices_are_as_many_as_there_are_groups_for(inputs: int, slices: int) -> None:
    shape = replace(SHAPE, inputs=inputs)
    assert shape.slices == slices and shape.threads == 32 * slices <= 512


def test_a_threadgroup_fits_its_memory() -> None:
    """Sums of 8 slices, 8 rows and 32 outputs with gaps of 4, and the pairs of an expert."""
    assert 4 * (8 * 8 * 36 + 16) <= 32 * 1024


def test_the_last_threadgroup_may_have_few_outputs() -> None:
    assert [replace(SHAPE, outputs=n).threadgroups for n in (1, 32, 33, 1000)] == [1, 1, 2, 32]


def test_up_to_24_rows_are_one_part_of_tiles_of_8() -> None:
    """Three tiles are the most that fit the registers. What needs four is two parts of two, not three and one."""
    one = {1: 1, 8: 1, 9: 2, 16: 2, 17: 3, 24: 3}
    assert {rows: split_rows(rows) for rows in one} == {rows: RowSplit(1, tiles) for rows, tiles in one.items()}
    assert split_rows(25) == split_rows(32) == RowSplit(2, 2)


@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_of_a_matrix_are_those_that_mlx_makes(mode: str, bits: int, group: int, dtype: str) -> None:
    parts = mx.quantize(mx.zeros((24, 128), getattr(mx, dtype)), group, bits, mode=mode)
    shape = MatmulShape(dtype, mode, bits, group, 128, 24)
    assert shape.weight_bytes == sum(part.nbytes for part in parts)


def test_equal_shapes_are_one_key() -> None:
    assert {SHAPE: 1}[replace(SHAPE)] == 1 and hash(SHAPE) != hash(EXPERTS)


def test_labels_tell_shapes_apart() -> None:
    assert SHAPE.label == "float16, 4 bits in groups of 64, 4096 to 1000"
    assert replace(EXPERTS, mode="mxfp4", group=32).label == "float16, mxfp4, 4096 to 1000, 16 experts"
    assert len({matmul.label for matmul in MATMULS}) == len(MATMULS)
