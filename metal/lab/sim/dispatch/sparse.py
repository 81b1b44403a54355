"""Inputs larger than memory: arrays that are zero except for a few written pieces."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.metal.lab.sim.dispatch.memory import RELEASE_ABOVE, SLOT


@dataclass
class SparseArray:
    """A row-contiguous input of a simulated kernel that is zero except where `put` wrote. Only written pieces take
    memory.

    It has more than 8 MiB and less than 32 GiB, else ValueError: it tests offsets that do not fit in 32 bits.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    pieces: list[tuple[int, npt.NDArray[np.generic]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not RELEASE_ABOVE < self.nbytes < SLOT // 2:
            raise ValueError(
                f"a sparse array has more than {RELEASE_ABOVE} and less than {SLOT // 2} bytes, not {self.nbytes}"
            )

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, zeros included."""
        return self.size * self.dtype.size

    def strides(self) -> list[int]:
        """Row-contiguous strides, in elements."""
        return [prod(self.shape[axis + 1 :]) for axis in range(self.ndim)]

    def put(self, index: Sequence[int], values: mx.array) -> None:
        """Write `values`, flattened, to consecutive elements from `index` on.

        Raises:
            IndexError: the values do not fit.
        """
        at = sum(i * stride for i, stride in zip(index, self.strides(), strict=True))
        if at < 0 or at + values.size > self.size:
            raise IndexError(f"{values.size} elements at {tuple(index)} do not fit in {self.shape}")
        flat = values.astype(self.dtype).reshape(-1)
        bits = np.array(flat.view(mx.uint16) if self.dtype == mx.bfloat16 else flat)
        self.pieces.append((at * self.dtype.size, bits))
