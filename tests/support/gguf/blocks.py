"""The quantized blocks of the GGUF format, value by value in float64, and random ones: written from the format's own
description (the structures of the reference implementation), one position of a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

BLOCK_BYTES = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "MXFP4": (32, 17),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "MXFP4": (),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where a block's float16 scales lie."""

SIZE = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q2_K": 24, "Q3_K": 64, "Q4_K": 480, "Q5_K": 960, "Q6_K": 2000}
"""About how large a value is whose scale is 1."""

FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def random_blocks(rng: np.random.Generator, type_name: str, values: int, size: float) -> bytes:
    """Blocks of random bits whose values are about `size`."""
    per_block, nbytes = BLOCK_BYTES[type_name]
    count = values // per_block
    blocks = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)
    for offset in HALVES[type_name]:
        scale = size / SIZE.get(type_name, 16) * (1 + 0.2 * rng.normal(size=count))
        blocks[:, offset : offset + 2] = scale.astype("<f2")[:, None].view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = np.clip(127 + np.log2(size / 3), 0, 254).astype(np.uint8)
    return blocks.tobytes()


def decode_blocks(data: bytes, type_name: str) -> np.ndarray:
    """The values `[blocks, values per block]` in float64."""
    per_block, nbytes = BLOCK_BYTES[type_name]
    blocks = np.frombuffer(data, np.uint8).reshape(-1, nbytes)
    value = VALUES[type_name]
    return np.stack([value(blocks, i) for i in range(per_block)], axis=1)


def half(blocks: np.ndarray, offset: int) -> np.ndarray:
    return blocks[:, offset : offset + 2].copy().view("<f2").astype(np.float64)[:, 0]


def bits(blocks: np.ndarray, byte: int, shift: int, mask: int) -> np.ndarray:
    return (blocks[:, byte].astype(np.int64) >> shift) & mask


def nibble(blocks: np.ndarray, start: int, i: int) -> np.ndarray:
    return bits(blocks, start + i % 16, 4 * (i // 16), 15)


def q5_bit(blocks: np.ndarray, start: int, i: int) -> np.ndarray:
    return bits(blocks, start + i // 8, i % 8, 1) << 4


def scale_and_minimum(blocks: np.ndarray, g: int) -> tuple[np.ndarray, np.ndarray]:
    s = blocks[:, 4:16].astype(np.int64)
    if g < 4:
        return s[:, g] & 63, s[:, g + 4] & 63
    return s[:, g + 4] & 15 | s[:, g - 4] >> 6 << 4, s[:, g + 4] >> 4 | s[:, g] >> 6 << 4


def k_value(blocks: np.ndarray, i: int, codes: np.ndarray) -> np.ndarray:
    scale, minimum = scale_and_minimum(blocks, i // 32)
    return half(blocks, 0) * scale * codes - half(blocks, 2) * minimum


def q4_k_codes(blocks: np.ndarray, start: int, i: int) -> np.ndarray:
    return bits(blocks, start + i // 64 * 32 + i % 32, 4 * (i // 32 % 2), 15)


def q2_bits(blocks: np.ndarray, start: int, i: int) -> np.ndarray:
    return bits(blocks, start + i // 128 * 32 + i % 32, 2 * (i % 128 // 32), 3)


def q3_k(blocks: np.ndarray, i: int) -> np.ndarray:
    g = i // 16
    scale = bits(blocks, 96 + g % 8, 4 * (g // 8), 15) | bits(blocks, 104 + g % 4, 2 * (g // 4), 3) << 4
    codes = q2_bits(blocks, 32, i) - np.where(bits(blocks, i % 32, i // 32, 1), 0, 4)
    return half(blocks, 108) * (scale - 32) * codes


def q6_k(blocks: np.ndarray, i: int) -> np.ndarray:
    side, r = divmod(i, 128)
    low = bits(blocks, side * 64 + r % 64, 4 * (r // 64), 15)
    codes = (low | bits(blocks, 128 + side * 32 + r % 32, 2 * (r // 32), 3) << 4) - 32
    return half(blocks, 208) * blocks[:, 192 + i // 16].view(np.int8).astype(np.float64) * codes


VALUES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "Q4_0": lambda b, i: half(b, 0) * (nibble(b, 2, i) - 8),
    "Q4_1": lambda b, i: half(b, 0) * nibble(b, 4, i) + half(b, 2),
    "Q5_0": lambda b, i: half(b, 0) * ((nibble(b, 6, i) | q5_bit(b, 2, i)) - 16),
    "Q5_1": lambda b, i: half(b, 0) * (nibble(b, 8, i) | q5_bit(b, 4, i)) + half(b, 2),
    "Q8_0": lambda b, i: half(b, 0) * b[:, 2 + i].view(np.int8).astype(np.float64),
    "MXFP4": lambda b, i: np.array(FP4)[nibble(b, 1, i)] * 2.0 ** (b[:, 0].astype(np.float64) - 127),
    "Q2_K": lambda b, i: (
        half(b, 80) * bits(b, i // 16, 0, 15) * q2_bits(b, 16, i) - half(b, 82) * bits(b, i // 16, 4, 15)
    ),
    "Q3_K": q3_k,
    "Q4_K": lambda b, i: k_value(b, i, q4_k_codes(b, 16, i)),
    "Q5_K": lambda b, i: k_value(b, i, q4_k_codes(b, 48, i) | bits(b, 16 + i % 32, i // 32, 1) << 4),
    "Q6_K": q6_k,
}
