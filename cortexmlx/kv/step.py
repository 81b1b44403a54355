"""Where the keys and values of one step lie, as plain data: the scheduler says it, attention reads it. No mlx."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cortexmlx.kv.allocator import KVHandle


@dataclass(frozen=True)
class BlockCopy:
    """A block whose bytes must be copied, in every layer of `group`, before the target is read or written."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class Piece:
    """A prefill piece: flat tokens `begin .. end` are a row's positions `first .. first + end - begin`.

    Its keys and values up to its last position lie in `run`, or, scattered, in `slots` (`[tokens]` int32).
    """

    begin: int
    end: int
    first: int
    run: KVHandle | None
    slots: npt.NDArray[np.int32] | None

    @property
    def tokens(self) -> int:
        """Tokens of the row that the piece's last query sees, itself included."""
        return self.first + self.end - self.begin


@dataclass(frozen=True)
class GroupStep:
    """Where one layer group finds the keys and values of a step.

    `tables` `[rows, blocks]` int32 and `lengths` `[rows]` describe the arena part of the single-token queries;
    padding entries of a table name the null block. `window` is the group's sliding window. `runs` has a row's run
    where it is a single one.
    """

    tables: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    runs: tuple[KVHandle | None, ...]
    pieces: tuple[Piece, ...]
    window: int | None

    @property
    def rows(self) -> int:
        """How many single-token queries the step has."""
        return len(self.lengths)
