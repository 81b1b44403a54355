"""Whether outputs tell of variables that nothing had written.

A float variable without a value starts as the NaN whose bits are all ones, which no operation makes by itself and which
goes through arithmetic as it is: an output that holds it has been computed from such a variable. What comparisons,
`max` and integers hide, a second run shows in which those variables start as zeros.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .buffers import BufferSpec

_FLOATS = ("float32", "float16", "bfloat16")
Bytes = npt.NDArray[np.uint8]


def _bits(data: Bytes, item_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    whole = item_bytes in (1, 2, 4, 8) and data.size % item_bytes == 0
    return data.view(f"u{item_bytes if whole else 1}")


def _poison(data: Bytes, item_bytes: int) -> npt.NDArray[np.bool_]:
    """Which floats are the NaN of all ones; of either sign, for a negation changes it."""
    bits = _bits(data, item_bytes)
    found: npt.NDArray[np.bool_] = (bits << 1) == np.array(-2).astype(bits.dtype)
    return found


def _values(data: Bytes, spec: BufferSpec) -> npt.NDArray[np.generic]:
    """What compares as the elements do: -0 with 0, and no NaN with another."""
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
    """A sentence about the first output that holds the NaN of uninitialised variables, unless an input brought it."""
    for spec, data in zip(_writable(buffers), outputs, strict=True):
        if spec.element in _FLOATS and (found := _poison(data, spec.item_bytes)).any():
            given = (b.data for b in buffers if b.data is not None and b.element in _FLOATS)
            if not any(_poison(np.ascontiguousarray(d).view(np.uint8), d.itemsize).any() for d in given):
                return _sentence(spec, found, found.size)
    return None


def different(buffers: Sequence[BufferSpec], outputs: Sequence[Bytes], others: Sequence[Bytes]) -> str | None:
    """A sentence about the first output that is another one when such variables start as zeros."""
    for spec, data, other in zip(_writable(buffers), outputs, others, strict=True):
        one, two = _values(data, spec), _values(other, spec)
        found = (one != two) & ~((one != one) & (two != two))
        if found.any():
            return _sentence(spec, found, found.size)
    return None
