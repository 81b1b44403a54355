"""Read the tensors of GGUF files into MLX arrays, piece by piece through a memory map.

Only the result and a few megabytes are in memory at once. Pages of the file are given back after they were read. So
loading takes the memory of the loaded model and of its largest tensor.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cortexmlx.errors import ModelNotFound
from cortexmlx.models.gguf.blocks import GROUP, PACKED, WIDENED, Bytes
from cortexmlx.models.gguf.file import TENSOR_TYPES, TensorInfo

FLOATS = ("F32", "F16", "BF16")
READ_TYPES = frozenset((*FLOATS, *PACKED, *WIDENED))
PIECE = 1 << 20
"""Bytes of a file that are decoded at once."""

_BLOCKS = {name: (values, nbytes) for name, values, nbytes in TENSOR_TYPES.values()}


@dataclass(frozen=True)
class PackedArrays:
    """A packed tensor as MLX's quantized layers hold it, in groups of 32 along the rows.

    `scales` and `biases` have the activations' type if it holds all of them exactly, otherwise float32.
    """

    weight: Any
    scales: Any
    biases: Any | None
    """One per group in affine mode; None in other modes."""
    bits: int
    mode: str


class TensorFiles:
    """The files of a model. Each is mapped into memory when it is first read. Raises ModelNotFound if a file is
    missing.
    """

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def read(self, info: TensorInfo, dtype: Any, rows: Sequence[int] | None = None) -> Any:
        """Return the tensor with its values rounded once to the MLX type `dtype`, or PackedArrays if its type is
        packed.

        `rows` gives, for each place, the stored row (of the first dimension) that belongs there.
        """
        raw = self._bytes(info)
        if rows is not None:
            raw = raw.reshape(len(rows), -1)[np.array(rows)].reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged file's scales may be anything
            found = (_packed if info.type_name in PACKED else _widened)(info, raw, dtype)
        self._give_back(info)
        return found

    def _bytes(self, info: TensorInfo) -> Bytes:
        return np.frombuffer(self._map(info.path), np.uint8, info.nbytes, info.offset)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise ModelNotFound(f"cannot open {path}: {error.strerror}") from error
        return self._maps[path]

    def _give_back(self, info: TensorInfo) -> None:
        """Take the tensor's pages out of the memory that counts as the process's. They stay in the system's cache."""
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = info.offset + info.nbytes - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map(info.path).madvise(mmap.MADV_DONTNEED, start, length)


def memory_bytes(info: TensorInfo, dtype: str) -> int:
    """Return the bytes that the tensor takes in memory in a model whose activations are `dtype`. Only its type and
    shape count.
    """
    itemsize = 4 if dtype == "float32" else 2
    packing = PACKED.get(info.type_name)
    if packing is None:
        return info.values * itemsize
    fine = info.type_name in ("Q4_K", "Q5_K") or dtype != "float16"
    per_group = (2 * (4 if fine else 2)) if packing.mode == "affine" else 1
    return info.values * packing.bits // 8 + info.values // GROUP * per_group


def read_floats(info: TensorInfo) -> list[float]:
    """Return the numbers of a small F32 tensor."""
    with info.path.open("rb") as file:
        file.seek(info.offset)
        return [float(value) for value in np.frombuffer(file.read(info.nbytes), "<f4")]


def _pieces(raw: Bytes, block_bytes: int) -> Iterator[tuple[slice, Bytes]]:
    """Yield slices of blocks, each with the bytes of its blocks, `[n, block_bytes]`."""
    blocks = raw.reshape(-1, block_bytes)
    step = max(1, PIECE // block_bytes)
    for start in range(0, len(blocks), step):
        part = slice(start, min(start + step, len(blocks)))
        yield part, blocks[part]


def _widened(info: TensorInfo, raw: Bytes, dtype: Any) -> Any:
    import mlx.core as mx

    kind = info.type_name
    if kind in WIDENED:
        arrays = []
        for _, blocks in _pieces(raw, _BLOCKS[kind][1]):
            arrays.append(mx.array(WIDENED[kind](blocks)).astype(dtype))
            mx.eval(arrays[-1])
        found = mx.concatenate(arrays).reshape(info.shape)
    else:
        stored = mx.array(raw.view({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[kind]))
        found = (stored.view(mx.bfloat16) if kind == "BF16" else stored).astype(dtype).reshape(info.shape)
    mx.eval(found)
    return found


def _packed(info: TensorInfo, raw: Bytes, dtype: Any) -> PackedArrays:
    import mlx.core as mx

    packing = PACKED[info.type_name]
    values, block_bytes = _BLOCKS[info.type_name]
    per_block = values // GROUP
    count = len(raw) // block_bytes * per_block
    codes = np.empty((count, GROUP * packing.bits // 8), np.uint8)
    affine = packing.mode == "affine"
    scales = np.empty(count, np.float32 if affine else np.uint8)
    biases = np.empty(count if affine else 0, np.float32)
    for part, blocks in _pieces(raw, block_bytes):
        place = slice(part.start * per_block, part.stop * per_block)
        groups = packing.groups(blocks)
        codes[place], scales[place] = groups.codes, groups.scales
        if groups.biases is not None:
            biases[place] = groups.biases
    lead, columns = info.shape[:-1], info.shape[-1]
    weight = mx.array(codes.view("<u4")).reshape(*lead, columns * packing.bits // 32)
    arrays = _narrowest((scales, biases), dtype) if affine else [mx.array(scales)]
    shaped = [array.reshape(*lead, columns // GROUP) for array in arrays]
    mx.eval(weight, shaped)
    return PackedArrays(weight, shaped[0], shaped[1] if affine else None, packing.bits, packing.mode)


def _narrowest(numbers: tuple[NDArray[Any], ...], dtype: Any) -> list[Any]:
    """Return the float32 `numbers` in `dtype` if it holds all of them exactly, otherwise in float32."""
    import mlx.core as mx

    if dtype == mx.float16:
        narrow = [array.astype(np.float16) for array in numbers]
        if all(np.array_equal(n.astype(np.float32), a) for n, a in zip(narrow, numbers, strict=True)):
            return [mx.array(array) for array in narrow]
    wide = [array.view("<u4") for array in numbers]
    if dtype == mx.bfloat16 and not any(np.any(array & np.uint32(0xFFFF)) for array in wide):
        return [mx.array((array >> np.uint32(16)).astype(np.uint16)).view(mx.bfloat16) for array in wide]
    return [mx.array(array) for array in numbers]
