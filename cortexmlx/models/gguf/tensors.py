"""Read the tensors of GGUF files into MLX arrays, piece by piece through a memory map.

Only the result and a few megabytes are in memory at once. Pages of the file are given back after they were read. So
loading takes the memory of the loaded model and of its largest tensor.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cortexmlx.errors import ModelNotFound
from cortexmlx.models.gguf.file import TENSOR_TYPES, TensorInfo

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

GROUP_SIZE = 32
_LOW_HALVES = np.uint64(0x0F0F0F0F0F0F0F0F)
_FIVE_BIT_STEPS = (
    (3, 0x001F001F001F001F, 0x03E003E003E003E0),
    (6, 0x000003FF000003FF, 0x000FFC00000FFC00),
    (12, 0x00000000000FFFFF, 0x000000FFFFF00000),
)
"""Each row is a shift and two masks: the bits of every other value that stay, and the bits of the value after it that
are shifted down to them.
"""


@dataclass(frozen=True)
class QuantizedGroups:
    """Quantized values in groups of 32, as MLX packs them: codes, scales and biases."""

    codes: Bytes
    """`[groups, 4 * bits] uint8`, the first value in the lowest bits, as MLX packs them."""
    scales: NDArray[Any]
    """`[groups] float32`; in the mode mxfp4 `[groups] uint8`, exponents."""
    biases: Floats | None
    """`[groups] float32`; None in the mode mxfp4."""


@dataclass(frozen=True)
class PackedFormat:
    """How MLX holds a GGUF tensor type that stays packed in memory."""

    bits: int
    """Bits of a code."""
    mode: str
    """MLX's quantization mode."""
    groups: Callable[[Bytes], QuantizedGroups]
    """Makes groups of blocks `[n, bytes]`."""


def _read_float16(columns: Bytes) -> Floats:
    """Read `[n, 2]` bytes as float16 numbers: `[n]` float32."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)[:, 0]


def _reorder_nibbles(packed: Bytes) -> Bytes:
    """Reorder 4-bit values of `[n, 8k]` bytes: GGUF has all low halves first, MLX has neighbours in one byte."""
    words = np.ascontiguousarray(packed).view("<u8")
    halves = (words & _LOW_HALVES, words >> np.uint64(4) & _LOW_HALVES)
    for half in halves:
        half |= half >> np.uint64(4)
    return np.concatenate([side.view(np.uint8)[:, ::2] for side in halves], axis=1)


def _split_nibbles(packed: Bytes) -> Bytes:
    """Split `[n, k]` bytes into `[n, 2k]` values of 4 bits, all low halves first."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def _pack_five_bits(codes: Bytes) -> Bytes:
    """Pack `[n, 32]` values of 5 bits into `[n, 20]` bytes: eight values to 40 bits in steps of two, four and eight."""
    words = np.ascontiguousarray(codes).view("<u8")
    for shift, keep_mask, move_mask in _FIVE_BIT_STEPS:
        words = words & np.uint64(keep_mask) | words >> np.uint64(shift) & np.uint64(move_mask)
    return words.view(np.uint8).reshape(-1, 4, 8)[:, :, :5].reshape(-1, 20)


def _convert_q4_0(blocks: Bytes) -> QuantizedGroups:
    """Convert Q4_0 blocks to MLX's groups. Layout: d, qs[16]; a value is d * (q - 8)."""
    scale = _read_float16(blocks[:, :2])
    return QuantizedGroups(_reorder_nibbles(blocks[:, 2:]), scale, -8 * scale)


def _convert_q4_1(blocks: Bytes) -> QuantizedGroups:
    """Convert Q4_1 blocks to MLX's groups. Layout: d, m, qs[16]; a value is d * q + m."""
    return QuantizedGroups(_reorder_nibbles(blocks[:, 4:]), _read_float16(blocks[:, :2]), _read_float16(blocks[:, 2:4]))


def _join_fifth_bits(high: Bytes, packed: Bytes) -> Bytes:
    """Return packed 5-bit codes, made of the fifth bits `high` and the lower four bits `packed`."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return _pack_five_bits(_split_nibbles(packed) | bits << np.uint8(4))


def _convert_q5_0(blocks: Bytes) -> QuantizedGroups:
    """Convert Q5_0 blocks. Layout: d, qh[4], qs[16]; value j is d * (q - 16), and the fifth bit of q is bit j of qh."""
    scale = _read_float16(blocks[:, :2])
    return QuantizedGroups(_join_fifth_bits(blocks[:, 2:6], blocks[:, 6:]), scale, -16 * scale)


def _convert_q5_1(blocks: Bytes) -> QuantizedGroups:
    """Convert Q5_1 blocks to MLX's groups. Layout: d, m, qh[4], qs[16]; a value is d * q + m."""
    return QuantizedGroups(
        _join_fifth_bits(blocks[:, 4:8], blocks[:, 8:]), _read_float16(blocks[:, :2]), _read_float16(blocks[:, 2:4])
    )


def _convert_q8_0(blocks: Bytes) -> QuantizedGroups:
    """Convert Q8_0 blocks to MLX's groups. Layout: d, qs[32] signed; a value is d * q. MLX's codes are unsigned, so
    128 is added to each and taken off again by the bias.
    """
    scale = _read_float16(blocks[:, :2])
    return QuantizedGroups(blocks[:, 2:] ^ np.uint8(0x80), scale, -128 * scale)


def _convert_mxfp4(blocks: Bytes) -> QuantizedGroups:
    """Convert MXFP4 blocks. Layout: an exponent, qs[16] of 4-bit floats. MLX has the same codes and exponents."""
    return QuantizedGroups(_reorder_nibbles(blocks[:, 1:]), np.ascontiguousarray(blocks[:, 0]), None)


def _decode_k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return the scale and the bias of each of the 8 groups of Q4_K or Q5_K blocks. Layout: d, dmin, scales[12].

    Twelve bytes hold 8 multipliers of d and 8 of dmin, 6 bits each. Those of groups 0 to 3 are the low 6 bits of bytes
    0 to 3 and 4 to 7. Those of groups 4 to 7 are the low and high halves of bytes 8 to 11, with the two spare bits of
    the former.
    """
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale_multipliers = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minimum_multipliers = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    scales = _read_float16(blocks[:, :2])[:, None] * scale_multipliers.astype(np.float32)
    minima = _read_float16(blocks[:, 2:4])[:, None] * minimum_multipliers.astype(np.float32)
    return scales.reshape(-1), -minima.reshape(-1)


def _convert_q4_k(blocks: Bytes) -> QuantizedGroups:
    """Convert Q4_K blocks. Layout: d, dmin, scales[12], qs[128]; 32 bytes hold two groups, in low and high halves."""
    return QuantizedGroups(_reorder_nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 16), *_decode_k_scales(blocks))


def _convert_q5_k(blocks: Bytes) -> QuantizedGroups:
    """Convert Q5_K blocks: as Q4_K, with qh[32] before qs; the fifth bit of value l of group g is bit g of qh[l]."""
    codes = _split_nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    fifth_bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return QuantizedGroups(
        _pack_five_bits((codes | fifth_bits << np.uint8(4)).reshape(-1, 32)), *_decode_k_scales(blocks)
    )


PACKED_TYPES: dict[str, PackedFormat] = {
    "Q4_0": PackedFormat(4, "affine", _convert_q4_0),
    "Q4_1": PackedFormat(4, "affine", _convert_q4_1),
    "Q5_0": PackedFormat(5, "affine", _convert_q5_0),
    "Q5_1": PackedFormat(5, "affine", _convert_q5_1),
    "Q8_0": PackedFormat(8, "affine", _convert_q8_0),
    "Q4_K": PackedFormat(4, "affine", _convert_q4_k),
    "Q5_K": PackedFormat(5, "affine", _convert_q5_k),
    "MXFP4": PackedFormat(4, "mxfp4", _convert_mxfp4),
}


def _split_two_bits(packed: Bytes) -> Bytes:
    """Split `[n, 64]` bytes into `[n, 2, 4, 32]` values of 2 bits. Each half gives all its bytes' lowest bits first."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return packed.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)


def _apply_scales(scales: Floats, codes: NDArray[Any]) -> Floats:
    """Multiply the 16 values that belong to each of the scales `[n, 16]` by that scale: `[n, 16, 16]`."""
    return scales[:, :, None] * codes.reshape(-1, 16, 16).astype(np.float32)


def _decode_q2_k(blocks: Bytes) -> Floats:
    """Decode Q2_K. Layout: scales[16], qs[64], d, dmin; a value is d * (scale's low half) * q - dmin * (high half)."""
    scales = _read_float16(blocks[:, 80:82])[:, None] * (blocks[:, :16] & 15).astype(np.float32)
    minima = _read_float16(blocks[:, 82:84])[:, None] * (blocks[:, :16] >> 4).astype(np.float32)
    return (_apply_scales(scales, _split_two_bits(blocks[:, 16:80])) - minima[:, :, None]).reshape(-1, 256)


def _decode_q3_k(blocks: Bytes) -> Floats:
    """Return the values of Q3_K blocks. Layout: hmask[32], qs[64], scales[12], d; a value is d * (s - 32) * q, where q
    is 2 bits, less 4 where its bit in hmask is not set.

    The low 4 bits of the 16 scales are in scales[0..7], first all low halves; their high 2 bits in scales[8..11].
    """
    low = _split_nibbles(blocks[:, 96:104])
    high = (blocks[:, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = _read_float16(blocks[:, 108:])[:, None] * ((low | high << 4).astype(np.float32) - 32)
    mask_bits = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)
    codes = _split_two_bits(blocks[:, 32:96]).reshape(-1, 256).astype(np.int8) - 4 * (1 - mask_bits.astype(np.int8))
    return _apply_scales(scales, codes).reshape(-1, 256)


def _decode_q6_k(blocks: Bytes) -> Floats:
    """Decode Q6_K: ql[128], qh[64], signed scales[16], d. Value: d * scale * (q - 32), 4 bits of q in ql, 2 in qh."""
    low = _split_nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 256)
    codes = (low | _split_two_bits(blocks[:, 128:192]).reshape(-1, 256) << 4).astype(np.int8) - 32
    scales = _read_float16(blocks[:, 208:])[:, None] * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _apply_scales(scales, codes).reshape(-1, 256)


UNPACKED_TYPES: dict[str, Callable[[Bytes], Floats]] = {
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q6_K": _decode_q6_k,
}


FLOATS = ("F32", "F16", "BF16")
READ_TYPES = frozenset((*FLOATS, *PACKED_TYPES, *UNPACKED_TYPES))
PIECE_BYTES = 1 << 20
"""Bytes of a file that are decoded at once."""

_BLOCKS = {name: (values, nbytes) for name, values, nbytes in TENSOR_TYPES.values()}


@dataclass(frozen=True)
class PackedArrays:
    """A quantized tensor as the arrays of MLX's quantized layers, in groups of 32 along the rows.

    `scales` and `biases` have the activations' type if it holds all of them exactly, otherwise float32.
    """

    weight: Any
    scales: Any
    biases: Any | None
    """One per group in affine mode; None in other modes."""
    bits: int
    mode: str


class TensorFiles:
    """Reads tensors from a model's files, memory-mapped at first use. Raises ModelNotFound if a file is missing."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def read(self, info: TensorInfo, dtype: Any, rows: Sequence[int] | None = None) -> Any:
        """Read a tensor: PackedArrays if its type stays packed, otherwise an array with its values rounded once to the
        MLX type `dtype`.

        `rows` gives, for each place, the stored row (of the first dimension) that belongs there.
        """
        raw = np.frombuffer(self._map_file(info.path), np.uint8, info.nbytes, info.offset)
        if rows is not None:
            raw = raw.reshape(len(rows), -1)[np.array(rows)].reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged file's scales may be anything
            tensor = (_read_packed if info.type_name in PACKED_TYPES else _read_unpacked)(info, raw, dtype)
        self._release_pages(info)
        return tensor

    def _map_file(self, path: Path) -> mmap.mmap:
        """Return the memory map of a file, which is opened at the first call."""
        if path not in self._maps:
            try:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise ModelNotFound(f"cannot open {path}: {error.strerror}") from error
        return self._maps[path]

    def _release_pages(self, info: TensorInfo) -> None:
        """Take the tensor's pages out of the process's memory. They stay in the system's file cache."""
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = info.offset + info.nbytes - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map_file(info.path).madvise(mmap.MADV_DONTNEED, start, length)


def tensor_memory_bytes(info: TensorInfo, dtype: str) -> int:
    """Return a tensor's bytes in the memory of a model with `dtype` activations. Only its type and shape count."""
    itemsize = 4 if dtype == "float32" else 2
    packed_format = PACKED_TYPES.get(info.type_name)
    if packed_format is None:
        return info.element_count * itemsize
    has_float32_scales = info.type_name in ("Q4_K", "Q5_K") or dtype != "float16"
    per_group = (2 * (4 if has_float32_scales else 2)) if packed_format.mode == "affine" else 1
    return info.element_count * packed_format.bits // 8 + info.element_count // GROUP_SIZE * per_group


def read_float32_tensor(info: TensorInfo) -> list[float]:
    """Read the numbers of a small F32 tensor."""
    with info.path.open("rb") as file:
        file.seek(info.offset)
        return [float(value) for value in np.frombuffer(file.read(info.nbytes), "<f4")]


def _iterate_pieces(raw: Bytes, block_bytes: int) -> Iterator[tuple[slice, Bytes]]:
    """Yield a tensor's blocks piece by piece: the slice of their indices, and their bytes `[n, block_bytes]`."""
    blocks = raw.reshape(-1, block_bytes)
    step = max(1, PIECE_BYTES // block_bytes)
    for start in range(0, len(blocks), step):
        block_slice = slice(start, min(start + step, len(blocks)))
        yield block_slice, blocks[block_slice]


def _read_unpacked(info: TensorInfo, raw: Bytes, dtype: Any) -> Any:
    """Return a tensor as an array of `dtype`, unpacked if its type is quantized."""
    import mlx.core as mx

    kind = info.type_name
    if kind in UNPACKED_TYPES:
        arrays = []
        for _, blocks in _iterate_pieces(raw, _BLOCKS[kind][1]):
            arrays.append(mx.array(UNPACKED_TYPES[kind](blocks)).astype(dtype))
            mx.eval(arrays[-1])
        tensor = mx.concatenate(arrays).reshape(info.shape)
    else:
        stored_array = mx.array(raw.view({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[kind]))
        tensor = (stored_array.view(mx.bfloat16) if kind == "BF16" else stored_array).astype(dtype).reshape(info.shape)
    mx.eval(tensor)
    return tensor


def _read_packed(info: TensorInfo, raw: Bytes, dtype: Any) -> PackedArrays:
    """Return a quantized tensor as the arrays of MLX's quantized layers."""
    import mlx.core as mx

    packed_format = PACKED_TYPES[info.type_name]
    values, block_bytes = _BLOCKS[info.type_name]
    per_block = values // GROUP_SIZE
    count = len(raw) // block_bytes * per_block
    codes = np.empty((count, GROUP_SIZE * packed_format.bits // 8), np.uint8)
    affine = packed_format.mode == "affine"
    scales = np.empty(count, np.float32 if affine else np.uint8)
    biases = np.empty(count if affine else 0, np.float32)
    for block_slice, blocks in _iterate_pieces(raw, block_bytes):
        group_slice = slice(block_slice.start * per_block, block_slice.stop * per_block)
        groups = packed_format.groups(blocks)
        codes[group_slice], scales[group_slice] = groups.codes, groups.scales
        if groups.biases is not None:
            biases[group_slice] = groups.biases
    leading_dims, columns = info.shape[:-1], info.shape[-1]
    weight = mx.array(codes.view("<u4")).reshape(*leading_dims, columns * packed_format.bits // 32)
    arrays = _narrow_if_exact((scales, biases), dtype) if affine else [mx.array(scales)]
    reshaped_arrays = [array.reshape(*leading_dims, columns // GROUP_SIZE) for array in arrays]
    mx.eval(weight, reshaped_arrays)
    return PackedArrays(
        weight, reshaped_arrays[0], reshaped_arrays[1] if affine else None, packed_format.bits, packed_format.mode
    )


def _narrow_if_exact(numbers: tuple[NDArray[Any], ...], dtype: Any) -> list[Any]:
    """Return the float32 `numbers` in `dtype` if it holds all of them exactly, otherwise in float32."""
    import mlx.core as mx

    if dtype == mx.float16:
        float16_arrays = [array.astype(np.float16) for array in numbers]
        if all(np.array_equal(n.astype(np.float32), a) for n, a in zip(float16_arrays, numbers, strict=True)):
            return [mx.array(array) for array in float16_arrays]
    bit_patterns = [array.view("<u4") for array in numbers]
    if dtype == mx.bfloat16 and not any(np.any(array & np.uint32(0xFFFF)) for array in bit_patterns):
        return [mx.array((array >> np.uint32(16)).astype(np.uint16)).view(mx.bfloat16) for array in bit_patterns]
    return [mx.array(array) for array in numbers]
