"""Route: which tokens of a module's input get which slot's product. It is made once per step, for all modules.

The scheduler orders a step's rows by adapter, so the tokens of an adapter are runs. A long run is one product. Short
runs are gathered: each token is multiplied with its own slot's matrices, in one call for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np

from cortexmlx.types.arrays import IntArray

NO_SLOT = 0
"""The slot of zeros."""

GATHERED = 32
"""Up to so many tokens, all of them are gathered, unless one slot has them all: fewer calls are faster."""

LONG_RUN = 8
"""From so many tokens on, a run is a product of its own."""


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive tokens `begin .. end` of a module's input. All of them have `slot`, or each has its own of `slots`
    `[end - begin] uint32`.
    """

    begin: int
    end: int
    slot: int
    slots: mx.array | None = None

    @property
    def untouched(self) -> bool:
        """Whether nothing is added to these tokens."""
        return self.slots is None and self.slot == NO_SLOT


@dataclass(frozen=True, eq=False)
class Route:
    """The parts of `tokens` tokens, in order."""

    tokens: int
    parts: tuple[Part, ...]


def route_of(slots: IntArray) -> Route | None:
    """Return the route of tokens with these `slots` `[T]`; None if no token has one."""
    if not slots.any():
        return None
    runs = list(_runs(slots))
    if len(runs) == 1:
        return Route(len(slots), (Part(0, len(slots), int(slots[0])),))
    if len(slots) <= GATHERED:
        return Route(len(slots), (_gathered(slots, 0, len(slots)),))
    parts: list[Part] = []
    begin = 0  # of the short runs that are not in a part yet
    for first, end in runs:
        if end - first < LONG_RUN:
            continue
        if begin < first:
            parts.append(_gathered(slots, begin, first))
        parts.append(Part(first, end, int(slots[first])))
        begin = end
    if begin < len(slots):
        parts.append(_gathered(slots, begin, len(slots)))
    return Route(len(slots), tuple(parts))


def _gathered(slots: IntArray, begin: int, end: int) -> Part:
    mine = slots[begin:end]
    same = bool((mine == mine[0]).all())
    return Part(begin, end, int(mine[0]), None if same else mx.array(mine.astype(np.uint32)))


def _runs(slots: IntArray) -> Iterator[tuple[int, int]]:
    """Yield where runs of equal slots begin and end."""
    edges = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
    yield from pairwise(edges)
