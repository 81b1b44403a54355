"""StateOps: the operations on recurrent states in a step, as plain data. No mlx."""

from __future__ import annotations

from dataclasses import dataclass

Row = tuple[int, int]
"""Names a row's state: its job, and the job's generation when it got the row."""


@dataclass(frozen=True)
class Save:
    """The state of `row` after `tokens` tokens is kept as snapshot `snapshot`."""

    row: Row
    tokens: int
    snapshot: int


@dataclass(frozen=True)
class StateOps:
    """Carried out in this order: before the step `saves` of states that there are, `begins` (a row begins with a
    snapshot's state), `drops` of snapshots, `ends` of rows; then in the step `cuts`, saves of states that the step
    computes on its way.
    """

    saves: tuple[Save, ...] = ()
    begins: tuple[Save, ...] = ()
    drops: tuple[int, ...] = ()
    ends: tuple[Row, ...] = ()
    cuts: tuple[Save, ...] = ()


NOTHING = StateOps()
