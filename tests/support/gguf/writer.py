"""Writes small GGUF files, and reads their tensors back in NumPy: the independent side of the GGUF tests."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 32
TYPE_NUMBERS = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_XS": 23,
    "BF16": 30,
    "MXFP4": 39,
}


class Uint32(int):
    """A number to be written as uint32 (a plain int is written as int32)."""


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, Uint32):
        return 4, struct.pack("<I", value)
    if isinstance(value, int):
        return 5, struct.pack("<i", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    kinds = {_value(item)[0] for item in value} or {5}
    assert len(kinds) == 1, "one element type per array"
    body = b"".join(_value(item)[1] for item in value)
    return 9, struct.pack("<IQ", kinds.pop(), len(value)) + body


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """Write a version 3 file; `tensors` are (type name, row-major shape, data bytes) by name."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        kind, body = _value(value)
        out += _string(key) + struct.pack("<I", kind) + body
    offset = 0
    for name, (type_name, shape, data) in tensors.items():
        out += _string(name) + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", dim) for dim in reversed(shape))
        out += struct.pack("<IQ", TYPE_NUMBERS[type_name], offset)
        offset += -(-len(data) // ALIGNMENT) * ALIGNMENT
    out += bytes(-len(out) % ALIGNMENT)
    for _, _, data in tensors.values():
        out += data + bytes(-len(data) % ALIGNMENT)
    path.write_bytes(out)
    return path


def encode(values: np.ndarray, type_name: str) -> bytes:
    """`values` (rows of a multiple of 32) in the format's own layout, rounded to nearest."""
    if type_name == "F32":
        return values.astype("<f4").tobytes()
    if type_name == "F16":
        return values.astype("<f2").tobytes()
    if type_name == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    blocks = values.reshape(-1, 32).astype(np.float64)
    if type_name == "Q8_0":
        scale = np.maximum(np.abs(blocks).max(axis=1) / 127, 1e-6).astype("<f2")
        codes = np.clip(np.rint(blocks / scale[:, None].astype(np.float64)), -127, 127).astype("<i1")
        return _join(scale[:, None], codes)
    low = blocks.min(axis=1)
    if type_name == "Q4_0":
        scale = np.maximum(np.abs(blocks).max(axis=1) / 8, 1e-6).astype("<f2")
        codes = np.clip(np.rint(blocks / scale[:, None].astype(np.float64)) + 8, 0, 15).astype(np.uint8)
        return _join(scale[:, None], codes[:, :16] | codes[:, 16:] << 4)
    assert type_name == "Q4_1"
    scale = np.maximum((blocks.max(axis=1) - low) / 15, 1e-6).astype("<f2")
    minimum = low.astype("<f2")
    codes = np.clip(
        np.rint((blocks - minimum[:, None].astype(np.float64)) / scale[:, None].astype(np.float64)), 0, 15
    ).astype(np.uint8)
    return _join(scale[:, None], minimum[:, None], codes[:, :16] | codes[:, 16:] << 4)


def _join(*columns: np.ndarray) -> bytes:
    return np.concatenate([np.ascontiguousarray(c).view(np.uint8) for c in columns], axis=1).tobytes()


def decode(data: bytes, type_name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The values of a tensor in float64, straight from the format's definition."""
    raw = np.frombuffer(data, np.uint8)
    if type_name in ("F32", "F16"):
        return raw.view("<f4" if type_name == "F32" else "<f2").astype(np.float64).reshape(shape)
    if type_name == "BF16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64).reshape(shape)
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[type_name]
    blocks = raw.reshape(-1, size)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float64)
    if type_name == "Q8_0":
        return (scale * blocks[:, 2:].copy().view("<i1")).reshape(shape)
    packed = blocks[:, size - 16 :]
    codes = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float64)
    if type_name == "Q4_0":
        return (scale * (codes - 8)).reshape(shape)
    return (scale * codes + blocks[:, 2:4].copy().view("<f2").astype(np.float64)).reshape(shape)
