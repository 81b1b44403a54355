"""PagedMemory: the arena, the tail and the recurrent states of a paged model."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import mlx.core as mx
import numpy as np

from cortexmlx.disk.tier import STATE, PieceLoad
from cortexmlx.execution.boundary import Arrays, MemoryInUse, Shapes
from cortexmlx.execution.states import StateBatch, StateStore
from cortexmlx.kv.arena import KVArena, Slab
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.kv.spec import GroupCounts, LayerGroup
from cortexmlx.kv.step import BlockCopy, GroupStep, copy_indices
from cortexmlx.scheduling.plan import ArenaWrite, Flush
from cortexmlx.stats import ArenaWrites


class PagedMemory:
    """The memory of a paged model: the arena, the tail, and the states of recurrent layers. `tail` has each layer's
    newest tokens, `[rows, kv_heads, columns, dim]` for each array of its slab. The arena has no blocks before
    `begin`. Nothing may be in flight when the arena is changed or read.
    """

    def __init__(self, groups: Sequence[LayerGroup], block_size: int, states: StateStore) -> None:
        self.arena = KVArena(groups, None, block_size)
        self.states = states
        self.tail: dict[int, Slab] = {}
        self.watch = CopyWatch()

    def close(self) -> None:
        """Free all memory. It cannot be used afterwards."""
        self.tail.clear()
        self.states.forget()
        self.arena.close()

    @property
    def blocks(self) -> GroupCounts:
        """How many blocks each layer group has in the arena."""
        return self.arena.blocks

    @property
    def bytes(self) -> MemoryInUse:
        """The bytes in use now."""
        tail_size = sum(array.nbytes for slab in self.tail.values() for array in slab)
        active, peak = mx.get_active_memory(), mx.get_peak_memory()
        return MemoryInUse(self.arena.nbytes, tail_size, self.states.nbytes, active, peak, self.watch.writes)

    @property
    def shapes(self) -> tuple[Shapes, ...]:
        """The shapes of the arrays that `copy_out` returns for a block of each layer group."""
        return tuple(block_shapes(self.arena, group) for group in range(len(self.arena.groups)))

    def begin(self, blocks: GroupCounts) -> None:
        """Allocate an empty arena, after the old one is freed. Raises MemoryRefused; then there is no arena."""
        mx.synchronize()  # what is in flight reads the arena
        self.arena.release()
        mx.clear_cache()
        self.arena = KVArena(self.arena.groups, blocks, self.arena.block_size)

    def resize(self, blocks: GroupCounts) -> None:
        """Resize the arena to `blocks` blocks per layer group: see `KVArena.resize`."""
        self.arena.resize(blocks)

    def check_blocks(self, groups: Sequence[GroupStep]) -> None:
        """Raise KVBlockError if a step would read blocks outside the arena."""
        for number, group in enumerate(groups):
            self.arena.check_blocks(number, group.tables)
            for piece in group.pieces:
                if piece.slots is not None:
                    self.arena.check_blocks(number, piece.slots // self.arena.block_size)

    def load(self, loads: Sequence[PieceLoad]) -> None:
        """Write pieces from disk to their blocks and snapshots."""
        load_pieces(self.arena, self.states, loads)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks. All sources are read before any target is written."""
        for group in range(len(self.arena.groups)):
            sources, targets = copy_indices(copies, group)
            if len(sources):
                self.arena.copy_blocks(group, sources, targets)
        mx.eval(self.arena.arrays())

    def copy_out(self, group: int, names: Sequence[int]) -> list[Arrays | None]:
        """Return NumPy copies of a group's blocks, or, for the group `STATE`, of snapshots (None if missing)."""
        if group != STATE:
            return [*copy_out_blocks(self.arena, group, names)]
        batches = (self.states.snapshot(name) for name in names)
        return [None if batch is None else copy_out_state(batch) for batch in batches]

    def flush(self, flush: Flush) -> None:
        """Write the tail's first `flush.columns` columns to their arena slots, one update per slab. Drop the tail."""
        writes = [ArenaWriteIndex(write, self.arena, group) for group, write in enumerate(flush.writes)]
        moved_bytes = max((array.nbytes for tail in self.tail.values() for array in tail), default=0)
        for layer, tail in self.tail.items():
            write = writes[self.arena.group_of[layer]]
            columns = (t[:, :, : flush.columns].swapaxes(0, 1) for t in tail)
            self.arena.write(
                layer, write.slot_index, *(write.pad(c.reshape(c.shape[0], -1, c.shape[-1])) for c in columns)
            )
        self.tail.clear()
        self.watch.evaluate(WriteMoment.FLUSH, self.arena, moved_bytes)

    def write_tail(self, layer: int, column: int, columns: int, new: Slab) -> Slab:
        """Write a layer's newest tokens, `[rows, kv_heads, 1, dim]` each, to a column of the tail. Return the layer's
        tail. With column 0, a tail of `columns` columns begins.
        """
        tail = self.tail[layer] = write_tail_column(self.tail.get(layer), column, columns, new)
        return tail


def write_tail_column(tail: Slab | None, column: int, columns: int, new: Slab) -> Slab:
    """Write one token of each row to a column of a layer's tail, in place, and return the tail: see
    `PagedMemory.write_tail`.
    """
    if column == 0:
        return tuple(mx.pad(array, [(0, 0), (0, 0), (0, columns - 1), (0, 0)]) for array in new)
    assert tail is not None
    for array, value in zip(tail, new, strict=True):
        array[:, :, column : column + 1] = value
    return tail


class ArenaWriteIndex:
    """The slots of an arena write, as an index array on the device for all layers of `group`."""

    def __init__(self, write: ArenaWrite, arena: KVArena, group: int) -> None:
        arena.check_slots(group, write.slots)
        arena.check_slots(group, write.zeros)
        run = write.run_start
        total = len(write.slots) + len(write.zeros)
        self.slot_index = (
            mx.array(np.concatenate([write.slots, write.zeros])) if run is None else slice(run, run + total)
        )
        self._zeros = len(write.zeros)

    def pad(self, values: mx.array) -> mx.array:
        """Return `values` `[heads, tokens, dim]` with zeros added for the slots that the write sets to zero."""
        return mx.pad(values, [(0, 0), (0, self._zeros), (0, 0)]) if self._zeros else values


# Moves blocks and states between the arena and the disk tier: as NumPy arrays of all layers, on the engine's thread.
#
# A block of a group is one array `[layers, kv_heads, block_size, dim]` for each array of a slab: the slots of the block
# in all layers. A state first says which of its slots have an array, `[slots]` uint8, and then has these arrays. NumPy
# has no bfloat16: its bits are uint16 here.


_NONE, _PLAIN, _BFLOAT16 = range(3)
"""What a slot of a state has."""


def copy_out_blocks(arena: KVArena, group: int, blocks: Sequence[int]) -> list[Arrays]:
    """Return NumPy copies of a group's blocks. No step may be in flight."""
    layers, size = arena.groups[group].layers, arena.block_size
    copies: list[list[np.ndarray]] = [[] for _ in blocks]
    for index, layer in enumerate(layers):
        for number, array in enumerate(arena.slab(layer)):
            numbers = _numpy_view(array)
            heads, _, dim = numbers.shape
            for copy, block in zip(copies, blocks, strict=True):
                if index == 0:
                    copy.append(np.empty((len(layers), heads, size, dim), numbers.dtype))
                copy[number][index] = numbers[:, block * size : (block + 1) * size]
    return [tuple(copy) for copy in copies]


def block_shapes(arena: KVArena, group: int) -> Shapes:
    """Return the shapes and dtypes of the arrays that a block of a group is copied to."""
    layers = arena.groups[group].layers
    slab = [_numpy_view(array[:, :0]) for array in (arena.slab(layers[0]) if layers else ())]
    return tuple(((len(layers), len(a), arena.block_size, a.shape[-1]), a.dtype.str) for a in slab)


def load_pieces(arena: KVArena, states: StateStore, loads: Sequence[PieceLoad]) -> None:
    """Write pieces from disk to their blocks and snapshots. Nothing may be in flight."""
    for group in range(len(arena.groups)):
        group_loads = [each for each in loads if each.group == group]
        if group_loads and arena.groups[group].layers:
            _load_blocks(arena, group, group_loads)
    for each in loads:
        if each.group == STATE:
            states.restore(each.target, _state_arrays(each.content.arrays))


def _load_blocks(arena: KVArena, group: int, loads: Sequence[PieceLoad]) -> None:
    """Write the pieces of one layer group that were loaded from disk to their blocks."""
    blocks = np.array([each.target for each in loads], np.int32)
    arena.check_blocks(group, blocks)
    slots = (blocks[:, None] * arena.block_size + np.arange(arena.block_size, dtype=np.int32)).reshape(-1)
    is_run = bool((np.diff(blocks) == 1).all())
    slot_index = slice(int(slots[0]), int(slots[-1]) + 1) if is_run else mx.array(slots)
    for index, layer in enumerate(arena.groups[group].layers):
        dtypes = [array.dtype for array in arena.slab(layer)]
        each = zip(*(load.content.arrays for load in loads), strict=True)
        values = [np.concatenate([array[index] for array in arrays], axis=1) for arrays in each]
        arena.write(layer, slot_index, *(_to_mlx(v, dtype) for v, dtype in zip(values, dtypes, strict=True)))
        mx.eval(arena.slab(layer))


def copy_out_state(batch: StateBatch) -> Arrays:
    """Return a NumPy copy of a snapshot's state."""
    slots = [array for leaf in batch.states for array in leaf]
    kinds = np.array([_NONE if a is None else _BFLOAT16 if a.dtype == mx.bfloat16 else _PLAIN for a in slots], np.uint8)
    return kinds, *(np.array(_numpy_view(array)) for array in slots if array is not None)


def _state_arrays(arrays: Arrays) -> list[mx.array | None]:
    """Return the MLX arrays of all slots of a state: the inverse of `copy_out_state`."""
    rest = (mx.array(array) for array in arrays[1:])
    return [
        None if kind == _NONE else next(rest) if kind == _PLAIN else next(rest).view(mx.bfloat16) for kind in arrays[0]
    ]


def _numpy_view(array: mx.array) -> np.ndarray:
    """Return a NumPy view of an array's memory. It must be gone before the next write."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _to_mlx(numbers: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Return the numbers as an MLX array. For bfloat16, `numbers` are integers with the same bit patterns."""
    array = mx.array(numbers)
    return array if array.dtype == dtype else array.view(dtype)


# Measures whether MLX writes the arena in place, or copies a slab: by MLX's own counts of bytes around single writes.
#
# An address says nothing, and a NumPy view or a memoryview of a slab would be a holder itself. So only three counts are
# read, and none is reset: an app may use MLX's peak for itself.
#
# Read in MLX's source (0.32: `is_donatable` in `backend/common/utils.h`, `buffer_cache.h`, `metal/eval.cpp`):
#
# - A write is in place if nothing else holds the array or its buffer, and the buffer is at most 16,384 bytes larger
# than the array. - On Metal the inputs of an operation are held until the completion handler of their command buffer
# has run. The event that `mx.eval` waits for is signalled before that; `mx.synchronize` waits for the handlers, too. -
# A freed buffer goes to a cache, from which a later allocation may take it. So a copy shows in the active bytes (what
# held the slab holds the old buffer), in active and cached bytes together (the cache has the old buffer), or in the
# peak.


_log = logging.getLogger(__name__)

_WRITE_SLACK = 64 << 10
"""Bytes that a write may allocate or free beside the tokens that it moves: indices, and the rounding to pages."""

_MEASURABLE_RATIO = 4
"""How many times that an array must have, to be measured."""

_QUIET_SECONDS = (0.001, 0.002, 0.004)
"""After a copy was seen: seconds without any allocation, each followed by more measured writes. If something happens in
them, someone else may have made the bytes.
"""


class WriteMoment(Enum):
    """When arena writes are measured. The value is how many measurements are enough for an arena of one size."""

    FLUSH = 3
    """A flush. Each of its writes is measured."""
    PASS = 2
    """The moment before a forward pass that writes the arena. It is too late to measure the pass itself, among whose
    activations a slab is not seen. So a zero is written to the scratch slot, under the same conditions.
    """


_TRIES_PER_MEASUREMENT = 4
"""For each measurement that is enough: how many may be made. The others were disturbed."""


@dataclass(frozen=True)
class _MemoryCounts:
    """MLX's counts of active, cached and peak bytes at one moment."""

    active: int
    cached: int
    peak: int

    @classmethod
    def now(cls) -> _MemoryCounts:
        return cls(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())

    def was_copied(self, previous: _MemoryCounts, size: int, tolerance: int) -> bool | None:
        """Return whether an array of `size` bytes was copied since `previous`; None if others allocated or freed memory
        meanwhile.

        In each count a copy is `size` and no copy is 0, `tolerance` bytes more or less.
        """
        active = self.active - previous.active
        changes = [active, active + self.cached - previous.cached]
        if self.peak > previous.peak:
            changes.append(self.peak - previous.active)
        if any(abs(change - size) <= tolerance for change in changes):
            return True
        return False if all(abs(change) <= tolerance for change in changes) else None


class CopyWatch:
    """Detects whether MLX copies the arena in order to write it: measures the first writes of each arena size.
    `writes` says what was found; the first copy is also a warning in the log.

    It accuses nobody by mistake, as far as it can: a measurement counts only if every single change of the counts is
    that of a copy or of none, and if after a copy all is quiet. Other engines and an app's own work in the process
    allocate at other times, too, and in other sizes. Writes to slabs that are small beside what is moved are not
    measured.
    """

    def __init__(self) -> None:
        self.writes = ArenaWrites()
        self._size = 0
        self._measured_writes: Counter[WriteMoment] = Counter()
        self._attempts: Counter[WriteMoment] = Counter()

    def evaluate(self, moment: WriteMoment, arena: KVArena, moved_bytes: int) -> None:
        """Evaluate the arena after a write of at most `moved_bytes` bytes, and measure whether any array was copied."""
        arrays = arena.arrays()
        tolerance = 4 * moved_bytes + _WRITE_SLACK
        min_size = _MEASURABLE_RATIO * tolerance
        large = [array for array in arrays if array.nbytes >= min_size] if self._should_measure(moment, arrays) else []
        mx.eval([array for array in arrays if array.nbytes < min_size] if large else list(arrays))
        if not large:
            return
        self._attempts[moment] += 1
        copied_sizes = _copied_sizes(large, tolerance)
        if copied_sizes is None or (copied_sizes and not _is_quiet(arena, large)):
            mx.eval(arrays)
            return
        self._measured_writes[moment] += 1
        self._record(len(large), copied_sizes)

    def measure_scratch_write(self, arena: KVArena) -> None:
        """Measure by a scratch write whether the arena could be written in place now. Nothing may be in flight."""
        arrays = arena.arrays()
        if any(array.nbytes >= _MEASURABLE_RATIO * _WRITE_SLACK for array in arrays) and self._should_measure(
            WriteMoment.PASS, arrays
        ):
            arena.write_scratch_slots()
            self.evaluate(WriteMoment.PASS, arena, 0)

    def _should_measure(self, moment: WriteMoment, arrays: Sequence[mx.array]) -> bool:
        """Return whether another write of these arrays at such a moment should be measured."""
        size = sum(array.nbytes for array in arrays)
        if size != self._size:
            self._size = size
            self._measured_writes.clear()
            self._attempts.clear()
        return (
            self._measured_writes[moment] < moment.value
            and self._attempts[moment] < _TRIES_PER_MEASUREMENT * moment.value
        )

    def _record(self, measured_count: int, copied_sizes: Sequence[int]) -> None:
        """Add the measured writes to `writes`, and log the first copy."""
        was_reported, totals = self.writes.copied > 0, self.writes
        self.writes = ArenaWrites(
            totals.measured + measured_count, totals.copied + len(copied_sizes), totals.copied_bytes + sum(copied_sizes)
        )
        if copied_sizes and not was_reported:
            _log.warning(
                "MLX copied %s of the KV cache to write a few tokens (%d of %d arrays): something holds them. This "
                "costs memory and time; please report it with what `cortexmlx doctor --report` writes",
                format_bytes(sum(copied_sizes)),
                len(copied_sizes),
                measured_count,
            )


def _copied_sizes(arrays: Sequence[mx.array], tolerance: int) -> list[int] | None:
    """Evaluate arrays one by one, and return the bytes of each that MLX copied instead of writing in place, by MLX's
    memory counts (give or take `tolerance`). Stop and return None if other threads change these counts.
    """
    copied_sizes = []
    previous = _MemoryCounts.now()
    for array in arrays:
        mx.eval(array)
        current = _MemoryCounts.now()
        was_copied = current.was_copied(previous, array.nbytes, tolerance)
        if was_copied is None:
            return None
        if was_copied:
            copied_sizes.append(array.nbytes)
        previous = current
    return copied_sizes


def _is_quiet(arena: KVArena, arrays: Sequence[mx.array]) -> bool:
    """Return whether no other thread seems to allocate or free memory now. The arena's arrays are evaluated."""
    for seconds in _QUIET_SECONDS:
        previous = _MemoryCounts.now()
        time.sleep(seconds)
        if _MemoryCounts.now() != previous:
            return False
        arena.write_scratch_slots()
        if _copied_sizes(arrays, _WRITE_SLACK) is None:
            return False
    return True
