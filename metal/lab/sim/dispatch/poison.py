"""Find outputs that were computed from uninitialised variables.

An uninitialised float starts as the NaN whose bits are all ones. No operation creates this NaN, and arithmetic does not
change it: an output that holds it was computed from such a variable. Comparisons, `max` and integers hide it. A second
run, in which these variables start as zeros, finds those.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cortexmlx.metal.lab.sim.dispatch.buffers import BufferSpec

_FLOATS = ("float32", "float16", "bfloat16")
Bytes = npt.NDArray[np.uint8]


def _bits(data: Bytes, item_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    whole = item_bytes in (1, 2, 4, 8) and data.size % item_bytes == 0
    return data.view(f"u{item_bytes if whole else 1}")


def _poison(data: Bytes, item_bytes: int) -> npt.NDArray[np.bool_]:
    """Return which floats are the NaN whose bits are all ones. Its sign is ignored, because a negation changes the
    sign.
    """
    bits = _bits(data, item_bytes)
    found: npt.NDArray[np.bool_] = (bits << 1) == np.array(-2).astype(bits.dtype)
    return found


def _values(data: Bytes, spec: BufferSpec) -> npt.NDArray[np.generic]:
    """Return numbers that compare as the elements do: -0 equals 0, and no NaN equals another."""
    bits = _bits(data, spec.item_bytes)
    if spec.element == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(f"f{spec.item_bytes}") if spec.element in _FLOATS else bits


def _sentence(spec: BufferSpec, found: npt.NDArray[np.bool_], total: int) -> str:
    first = int(np.flatnonzero(found)[0])
    return (
        f"{int(found.sum())} of {total} elements of output '{spec.name}' have been computed from a variable that "
        f"nothing has written, the first is {first}"
    )


def _writable(buffers: Sequence[BufferSpec]) -> list[BufferSpec]:
    return [spec for spec in buffers if spec.writable]


def poisoned(buffers: Sequence[BufferSpec], outputs: Sequence[Bytes]) -> str | None:
    """Return a sentence about the first output that holds the NaN of uninitialised variables; None if an input holds
    it, too.
    """
    for spec, data in zip(_writable(buffers), outputs, strict=True):
        if spec.element in _FLOATS and (found := _poison(data, spec.item_bytes)).any():
            given = (b.data for b in buffers if b.data is not None and b.element in _FLOATS)
            if not any(_poison(np.ascontiguousarray(d).view(np.uint8), d.itemsize).any() for d in given):
                return _sentence(spec, found, found.size)
    return None


def different(buffers: Sequence[BufferSpec], outputs: Sequence[Bytes], others: Sequence[Bytes]) -> str | None:
    """Return a sentence about the first output that differs from `others`, the outputs with zeros in such variables."""
    for spec, data, other in zip(_writable(buffers), outputs, others, strict=True):
        one, two = _values(data, spec), _values(other, spec)
        found = (one != two) & ~((one != one) & (two != two))
        if found.any():
            return _sentence(spec, found, found.size)
    return None
