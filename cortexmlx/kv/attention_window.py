"""AttentionWindow: how far back a query sees. Without mlx."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_Position = TypeVar("_Position", int, npt.NDArray[np.int32], npt.NDArray[np.int64])


@dataclass(frozen=True)
class AttentionWindow:
    """Which tokens of a row a query sees: those from `oldest` of its position up to itself.

    `tokens` None: all of them. w: the newest w, itself included (a sliding window). With `chunked`, a row is cut at the
    multiples of `tokens`, and a query sees the tokens of its own chunk up to itself.
    """

    tokens: int | None = None
    chunked: bool = False

    def oldest(self, position: _Position) -> _Position:
        """Return the position of the oldest token that a query at `position` (0 or more) sees. Elementwise for an
        array.
        """
        if self.tokens is None:
            return position * 0
        if self.chunked:
            return position - position % self.tokens
        beyond = position - (self.tokens - 1)
        return beyond * (beyond > 0)

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index in a row of the block that has the oldest token that a query at `position` sees."""
        return self.oldest(position) // block_size
