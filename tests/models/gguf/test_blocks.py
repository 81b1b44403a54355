"""Quantized blocks: what MLX makes of our groups is what the format says each value is, bit for bit in float32."""

from __future__ import annotations

import numpy as np
import pytest

from cortexmlx.models.gguf.file import TENSOR_TYPES
from cortexmlx.models.gguf.tensors import GROUP_SIZE, PACKED_TYPES, UNPACKED_TYPES
from support.gguf.blocks import BLOCK_BYTES, HALVES, decode_blocks, random_blocks

HALF_BITS = (0x0000, 0x0001, 0x03FF, 0x8001, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF)
"""Zero, the smallest and the largest subnormal, ones, and the largest numbers of float16."""


def dequantized(data: bytes, type_name: str) -> np.ndarray:
    import mlx.core as mx

    blocks = np.frombuffer(data, np.uint8).reshape(-1, BLOCK_BYTES[type_name][1])
    if type_name in UNPACKED_TYPES:
        return UNPACKED_TYPES[type_name](blocks)
    packing = PACKED_TYPES[type_name]
    groups = packing.groups(blocks)
    weight = mx.array(groups.codes.reshape(1, -1).view("<u4"))
    biases = None if groups.biases is None else mx.array(groups.biases)[None]
    scales = mx.array(groups.scales)[None]
    found = mx.dequantize(weight, scales, biases, GROUP_SIZE, packing.bits, packing.mode, dtype=mx.float32)
    return np.array(found).reshape(len(blocks), -1)


@pytest.mark.parametrize("type_name", [*PACKED_TYPES, *UNPACKED_TYPES])
def test_every_value_is_what_the_format_says(type_name: str) -> None:
    rng = np.random.default_rng(1)
    count = 64 * len(HALF_BITS)
    blocks = np.frombuffer(random_blocks(rng, type_name, count * BLOCK_BYTES[type_name][0], 1.0), np.uint8)
    blocks = blocks.reshape(count, -1).copy()
    for offset in HALVES[type_name]:
        odd = rng.permutation(np.array(HALF_BITS * 32, "<u2"))
        blocks[::2, offset : offset + 2] = odd[:, None].view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = rng.integers(2, 250, count)
    wanted = decode_blocks(blocks.tobytes(), type_name).astype(np.float32)
    assert np.array_equal(dequantized(blocks.tobytes(), type_name), wanted)
    assert len(np.unique(wanted)) > 500


def test_all_blocks_are_as_long_as_the_header_reader_says() -> None:
    sizes = {name: (values, nbytes) for name, values, nbytes in TENSOR_TYPES.values()}
    assert {name: sizes[name] for name in BLOCK_BYTES} == BLOCK_BYTES
    assert set(BLOCK_BYTES) == {*PACKED_TYPES, *UNPACKED_TYPES}
