"""Strides of arrays, and which operations return a view instead of a copy. No mlx.

Strides count numbers, not bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Shape = tuple[int, ...]

_NOTHING = np.zeros(1, np.int8)

RESHAPES = ("Reshape", "Unflatten", "Flatten", "Squeeze", "ExpandDims")
SAME = ("Copy", "StopGradient", "Split")
LOOKS = (*RESHAPES, *SAME, "Transpose", "Broadcast", "Slice", "Contiguous", "AsStrided")
"""The operations whose result may be a view of their input."""


def dense(shape: Sequence[int]) -> Shape:
    """Return the strides of a contiguous array."""
    strides = []
    step = 1
    for count in reversed(shape):
        strides.append(step)
        step *= count
    return tuple(reversed(strides))


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether an array is contiguous."""
    return all(count == 1 or a == b for count, a, b in zip(shape, strides, dense(shape), strict=True))


def multiplies_in_place(shape: Shape, strides: Shape) -> bool:
    """Whether MLX's CPU build multiplies an array's matrices without a copy: they are contiguous or transposed."""
    if len(shape) < 2:
        return True
    (rows, columns), (down, across) = shape[-2:], strides[-2:]
    plain = across == 1 and (down == columns or rows == 1)
    return plain or (down == 1 and (across == rows or columns == 1))


def look(kind: str, settings: Sequence[Any], shape: Shape, strides: Shape, result: Shape) -> Shape | None:
    """Return the strides of the view that an operation of `LOOKS` makes; None if it has to copy."""
    if kind == "Transpose":
        return tuple(strides[axis] for axis in settings[0])
    if kind == "Broadcast":
        new = len(result) - len(shape)
        return (0,) * new + tuple(
            0 if count != wide else step for count, wide, step in zip(shape, result[new:], strides, strict=True)
        )
    if kind == "Slice":
        return tuple(step * by for step, by in zip(strides, settings[2], strict=True))
    if kind == "Contiguous":
        return strides if is_dense(shape, strides) else None
    if kind in SAME:
        return strides
    if kind == "AsStrided":
        return dense(result)
    return _reshaped(shape, strides, result)


def _reshaped(shape: Shape, strides: Shape, result: Shape) -> Shape | None:
    """Return the strides of a reshaped view by NumPy's rule, without reading memory; None if there is no view."""
    if 0 in result:
        return dense(result)
    view = np.lib.stride_tricks.as_strided(_NOTHING, shape, strides)
    try:
        view.shape = result
    except (AttributeError, ValueError):
        return None
    return tuple(view.strides)
