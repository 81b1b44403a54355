"""Random tensors for vision towers, the same in every environment: `tests/vision/record.py` and the tests make them
from names, so that no weights are recorded. Only NumPy is imported.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def uniform(name: str, shape: Sequence[int]) -> Floats:
    """Return numbers in [-1, 1) that the name and the shape decide, by the mixer of splitmix64 (Steele et al. 2014)."""
    mixed = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(zlib.crc32(name.encode()))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return ((mixed >> np.uint64(40)).astype(np.float32) / 2**23 - 1).reshape(tuple(shape))


def tower_tensor(name: str, shape: Sequence[int]) -> Floats:
    """Return a tensor of a tower: matrices that keep the size of what they multiply, biases, norms around 1."""
    values = uniform(name, shape)
    if len(shape) > 1:
        return values * np.float32((3 / np.prod(shape[1:])) ** 0.5) if "pos_embed" not in name else values
    return values / 5 + (1 if name.endswith("weight") else 0)
