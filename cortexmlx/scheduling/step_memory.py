"""The order of a step's memory operations. Without mlx."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cortexmlx.disk.tier import PieceLoad
from cortexmlx.kv.spec import Counts
from cortexmlx.kv.step import BlockCopy
from cortexmlx.scheduling.plan import Flush, StepPlan


class StepMemory(Protocol):
    """The bytes that a step works on: the arena, the tail, and the snapshots of recurrent states."""

    @property
    def blocks(self) -> Counts:
        """How many blocks each layer group has now."""

    def flush(self, flush: Flush) -> None:
        """Write columns of the tail to the arena."""

    def resize(self, blocks: Counts) -> None:
        """Give each layer group its number of blocks."""

    def load(self, loads: Sequence[PieceLoad]) -> None:
        """Write pieces from disk to blocks and snapshots."""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks. All sources are read before any target is written."""


def prepare(plan: StepPlan, memory: StepMemory) -> None:
    """Carry out a step's memory operations before its forward pass, in the one order that is right:

    1. **flush**: the tail belongs to the arena as the step before left it. Some of its blocks may be free by now, lie
    after the new end, or be a target of the following operations.

    2. **resize**: targets of the following operations may lie after the old end.

    3. **loads**: a loaded block is cached as soon as its load is planned, so a copy of the same step may read it.

    4. **copies**.

    5. Then the pass: it restores, saves and drops states (`StateOps`), writes new keys and values, and reads.

    No step may need copies before loads: no load writes the source of a copy. `KVCache.allocate_for` holds the source,
    and `Admission.admit` lets go of it when the step's last load is planned. What is planned after that takes blocks
    for the pass only, which writes them after the copies. A snapshot's number is never used twice, so loads of
    snapshots destroy nothing.
    """
    if plan.flush is not None:
        memory.flush(plan.flush)
    if plan.blocks != memory.blocks:
        memory.resize(plan.blocks)
    if plan.loads:
        memory.load(plan.loads)
    if plan.copies:
        memory.copy(plan.copies)
