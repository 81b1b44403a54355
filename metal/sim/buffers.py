"""The arguments of a launch, as bytes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class BufferSpec:
    """One argument: its data (None for an output that starts undefined), its size and that of an element, in bytes.

    `pieces` are the parts of a sparse input that are not zero, by their offset in bytes.
    """

    name: str
    data: npt.NDArray[np.generic] | None
    nbytes: int
    item_bytes: int
    writable: bool = False
    pieces: tuple[tuple[int, npt.NDArray[np.generic]], ...] = ()
