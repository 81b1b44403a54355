"""PagedMemory: the arena, the tail and the recurrent states of a paged model."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from cortexmlx.disk.tier import STATE, PieceLoad
from cortexmlx.execution.boundary import Arrays, MemoryInUse, Shapes
from cortexmlx.execution.copy_watch import CopyWatch, Moment
from cortexmlx.execution.states import StateStore
from cortexmlx.execution.transfer import copy_out, copy_out_state, load, shapes_of
from cortexmlx.kv.arena import KVArena, Slab
from cortexmlx.kv.spec import Counts, LayerGroup
from cortexmlx.kv.step import BlockCopy, GroupStep, in_group
from cortexmlx.scheduling.plan import ArenaWrite, Flush


class PagedMemory:
    """The owner of the bytes. `tail` has each layer's newest tokens, `[rows, kv_heads, columns, dim]` for each
    array of its slab. The arena has no blocks before `begin`. Nothing may be in flight when the arena is changed or
    read.
    """

    def __init__(self, groups: Sequence[LayerGroup], block_size: int, states: StateStore) -> None:
        self.arena = KVArena(groups, None, block_size)
        self.states = states
        self.tail: dict[int, Slab] = {}
        self.watch = CopyWatch()

    def close(self) -> None:
        """Free all bytes. It cannot be used afterwards."""
        self.tail.clear()
        self.states.forget()
        self.arena.close()

    @property
    def blocks(self) -> Counts:
        """How many blocks each layer group has in the arena."""
        return self.arena.blocks

    @property
    def bytes(self) -> MemoryInUse:
        """The bytes in use now."""
        tail = sum(array.nbytes for slab in self.tail.values() for array in slab)
        active, peak = mx.get_active_memory(), mx.get_peak_memory()
        return MemoryInUse(self.arena.nbytes, tail, self.states.nbytes, active, peak, self.watch.writes)

    @property
    def shapes(self) -> tuple[Shapes, ...]:
        """The shapes of what `copy_out` returns for a block of each layer group."""
        return tuple(shapes_of(self.arena, group) for group in range(len(self.arena.groups)))

    def begin(self, blocks: Counts) -> None:
        """Begin with an empty arena. Raises MemoryRefused; then there is no arena, since the old one is given back
        first.
        """
        mx.synchronize()  # what is in flight reads the arena
        self.arena.release()
        mx.clear_cache()
        self.arena = KVArena(self.arena.groups, blocks, self.arena.block_size)

    def resize(self, blocks: Counts) -> None:
        """Give each layer group its number of blocks: see `KVArena.resize`."""
        self.arena.resize(blocks)

    def check(self, groups: Sequence[GroupStep]) -> None:
        """Raise KVBlockError if a step would read outside the arena."""
        for number, group in enumerate(groups):
            self.arena.check_blocks(number, group.tables)
            for piece in group.pieces:
                if piece.slots is not None:
                    self.arena.check_blocks(number, piece.slots // self.arena.block_size)

    def load(self, loads: Sequence[PieceLoad]) -> None:
        """Write pieces from disk to their blocks and snapshots."""
        load(self.arena, self.states, loads)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks. All sources are read before any target is written."""
        for group in range(len(self.arena.groups)):
            sources, targets = in_group(copies, group)
            if len(sources):
                self.arena.copy_blocks(group, sources, targets)
        mx.eval(self.arena.arrays())

    def copy_out(self, group: int, names: Sequence[int]) -> list[Arrays | None]:
        """Return copies of blocks of a layer group. If `group` is `STATE`, return copies of snapshots, with None for
        one that does not exist.
        """
        if group != STATE:
            return [*copy_out(self.arena, group, names)]
        batches = (self.states.snapshot(name) for name in names)
        return [None if batch is None else copy_out_state(batch) for batch in batches]

    def flush(self, flush: Flush) -> None:
        """Write the tail's live columns to their slots, with one update per slab."""
        writes = [LazyWrite(write, self.arena, group) for group, write in enumerate(flush.writes)]
        moved = max((array.nbytes for tail in self.tail.values() for array in tail), default=0)
        for layer, tail in self.tail.items():
            write = writes[self.arena.group_of[layer]]
            columns = (t[:, :, : flush.columns].swapaxes(0, 1) for t in tail)
            self.arena.write(
                layer, write.where, *(write.padded(c.reshape(c.shape[0], -1, c.shape[-1])) for c in columns)
            )
        self.tail.clear()
        self.watch.evaluate(Moment.FLUSH, self.arena, moved)

    def write_tail(self, layer: int, column: int, columns: int, new: Slab) -> Slab:
        """Write a layer's newest tokens, `[rows, kv_heads, 1, dim]` each, to a column. Return the layer's tail. With
        column 0, a tail of `columns` columns begins.
        """
        if column == 0:
            rest = [(0, 0), (0, 0), (0, columns - 1), (0, 0)]
            tail = tuple(mx.pad(a, rest) for a in new)
        else:
            tail = self.tail[layer]
            for array, value in zip(tail, new, strict=True):
                array[:, :, column : column + 1] = value
        self.tail[layer] = tail
        return tail


class LazyWrite:
    """The index of an ArenaWrite on the device, shared by all layers of its `group`. Raises KVBlockError if a slot is
    outside the arena.
    """

    def __init__(self, write: ArenaWrite, arena: KVArena, group: int) -> None:
        arena.check_slots(group, write.slots)
        arena.check_slots(group, write.zeros)
        run = write.run
        total = len(write.slots) + len(write.zeros)
        self.where = mx.array(np.concatenate([write.slots, write.zeros])) if run is None else slice(run, run + total)
        self._zeros = len(write.zeros)

    def padded(self, values: mx.array) -> mx.array:
        """Return `values` `[heads, tokens, dim]` followed by the zeros."""
        return mx.pad(values, [(0, 0), (0, self._zeros), (0, 0)]) if self._zeros else values
