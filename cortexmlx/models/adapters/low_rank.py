"""Low-rank matrices of an adapter that is served per request, read with NumPy. No mlx: any thread may read them.

A linear layer of the model computes `x W`. The adapter adds `x A B`, with A `[in, rank]` and B `[rank, out]`. The
adapter's scale is folded into B, so that the engine need not know it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cortexmlx.errors import AdapterRefused, ModelCorrupt, ModelUnsupported
from cortexmlx.models.adapters.files import Adapter, AdapterKind, file_changed_error, read_adapter
from cortexmlx.models.messages import unreadable_message
from cortexmlx.models.safetensors_check import read_safetensors_header

Matrix = npt.NDArray[np.float32]

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_UNSERVED_KINDS = {
    AdapterKind.DORA: "is a DoRA, which scales the layer's own weights",
    AdapterKind.FULL: "has whole layers in place of the model's",
}
AS_MODEL_ADVICE = "open an engine with it as its only adapter instead (adapter=, --adapter)"


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter that requests can name."""

    name: str
    rank: int
    targets: tuple[str, ...]
    """The model's linear layers that it changes, by their names in the model, sorted."""
    bytes: int
    """Bytes that it takes in memory. Two names of the same content share them."""
    digest: str
    """A hash of its content: equal for equal numbers, whatever its name and folder."""
    path: str
    """The folder that it was read from."""
    base: str | None = None
    """The model that it was trained on, as its folder says; None if it does not say."""


@dataclass(frozen=True, eq=False)
class LowRankAdapter:
    """The matrices of an adapter served per request: A and B of each target layer in float32, with the scale in B."""

    path: Path
    rank: int
    pairs: Mapping[str, tuple[Matrix, Matrix]] = field(repr=False)
    digest: bytes
    base: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the model's layers that the adapter changes, sorted."""
        return tuple(sorted(self.pairs))


def read_low_rank_adapter(name: str, path: str | Path, most_rank: int, most_bytes: int) -> LowRankAdapter:
    """Read the matrices of an adapter (mlx-lm's or PEFT's) that is to be served per request. `name` is for errors.

    Raises AdapterRefused for a kind that cannot be served per request: DoRA, whole layers, embeddings, and settings of
    PEFT that change more than linear layers. Also raises it for a rank above `most_rank`, and for a file that surely
    takes more than `most_bytes` bytes; then its numbers are not read. Raises ModelNotFound or ModelCorrupt as
    `read_adapter` does, and ModelCorrupt for numbers that are NaN or infinite, and for files that change meanwhile.
    """
    try:
        adapter = read_adapter(path)
    except ModelUnsupported as error:
        raise AdapterRefused(f"the adapter {name!r} cannot be served per request: {error}") from error
    if adapter.kind in _UNSERVED_KINDS:
        raise AdapterRefused(
            f"the adapter {name!r} ({adapter.path}) {_UNSERVED_KINDS[adapter.kind]}: it cannot be served per "
            "request, so "
            f"{AS_MODEL_ADVICE}."
        )
    if adapter.settings["rank"] > most_rank:
        raise AdapterRefused(
            f"the adapter {name!r} ({adapter.path}) has rank {adapter.settings['rank']}, and the engine takes "
            f"{most_rank} at most: raise max_adapter_rank."
        )
    if adapter.size > 2 * most_bytes:  # the engine's numbers have at least half as many bytes as the file's
        raise AdapterRefused(
            f"the adapter {name!r} ({adapter.weights}) has {adapter.size} bytes, and the engine's adapters may take "
            f"{most_bytes}: raise adapter_memory."
        )
    pairs = _read_pairs(name, adapter)
    adapter.check_unchanged()
    return LowRankAdapter(adapter.path, int(adapter.settings["rank"]), pairs, _hash_pairs(pairs), adapter.base)


def _read_pairs(name: str, adapter: Adapter) -> dict[str, tuple[Matrix, Matrix]]:
    """Read the matrices A and B of each layer that the adapter changes, with the scale in B."""
    rank, scale = adapter.settings["rank"], np.float32(adapter.settings["scale"])
    shapes = adapter.shapes
    unknown_names = sorted(each for each in shapes if each.rpartition(".")[2] not in ("lora_a", "lora_b"))
    if unknown_names:
        raise AdapterRefused(
            f"the adapter {name!r} ({adapter.path}) has {unknown_names[0]}, which is no part of a LoRA of one linear "
            f"layer: {AS_MODEL_ADVICE}."
        )
    modules = sorted({tensor.rpartition(".")[0] for tensor in shapes})
    tensors = _read_tensors(adapter)
    pairs = {}
    for module in modules:
        tensor_names = [f"{module}.lora_a", f"{module}.lora_b"]
        missing_name = next((each for each in tensor_names if each not in shapes), None)
        if missing_name is not None:
            raise ModelCorrupt(f"{adapter.weights} has no {missing_name}, but the other half of it. Copy it again.")
        a, b = (shapes[each] for each in tensor_names)
        if len(a) == 3 or len(b) == 3:
            raise AdapterRefused(
                f"the adapter {name!r} ({adapter.path}) changes {module}, the experts of a layer, which cannot be done "
                f"per request: {AS_MODEL_ADVICE}."
            )
        if len(a) != 2 or len(b) != 2 or a[1] != rank or b[0] != rank:
            raise ModelCorrupt(f"{adapter.weights} has {module} of shapes {a} and {b}, which are not of rank {rank}.")
        with np.errstate(over="ignore", invalid="ignore"):
            pair = tensors[tensor_names[0]], tensors[tensor_names[1]] * scale
        for half, array in zip(tensor_names, pair, strict=True):
            if not np.isfinite(array).all():
                raise ModelCorrupt(
                    f"{adapter.weights} is damaged: {half} holds what is no number (NaN or infinite), or its scale "
                    f"{scale:g} is too large. Copy it again, or train it anew."
                )
        pairs[module] = pair
    return pairs


def _read_tensors(adapter: Adapter) -> dict[str, Matrix]:
    """Read the adapter's tensors in float32, with the names and the layout that the model gives them."""
    file = adapter.weights
    header = read_safetensors_header(file)
    try:
        raw = np.fromfile(file, np.uint8)
    except OSError as error:
        raise ModelCorrupt(unreadable_message(file, error)) from error
    if len(raw) < 8:
        raise ModelCorrupt(f"{file} is cut short: it has {len(raw)} bytes. Copy it again.")
    start = 8 + struct.unpack("<Q", raw[:8].tobytes())[0]
    arrays = {}
    for name in adapter.shapes:
        entry = header.get(adapter.names.get(name, name))
        if entry is None:
            raise file_changed_error(file)
        array = _decode_float32(file, name, entry, raw[start:])
        arrays[name] = np.ascontiguousarray(array.T) if adapter.is_transposed else array
        if arrays[name].shape != adapter.shapes[name]:
            raise file_changed_error(file)
    return arrays


def _decode_float32(file: Path, name: str, entry: Any, data: npt.NDArray[np.uint8]) -> Matrix:
    """Return the tensor of a safetensors entry in float32."""
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        dtype_names = ", ".join(_DTYPES)
        raise AdapterRefused(f"{file} has {name} in {entry['dtype']}, and an adapter's numbers are {dtype_names}.")
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if end - start != math.prod(shape) * dtype.itemsize or end > len(data):
        raise ModelCorrupt(f"{file} is damaged: {name} of shape {shape} has {end - start} bytes. Copy it again.")
    array = np.frombuffer(data[start:end].tobytes(), dtype)  # the file need not align them
    if entry["dtype"] == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32).reshape(shape)


def _hash_pairs(pairs: Mapping[str, tuple[Matrix, Matrix]]) -> bytes:
    """Return a hash of the names, shapes and numbers of all matrices."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(pairs):
        for array in pairs[name]:
            digest.update(f"{name}\0{array.shape}\0".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
