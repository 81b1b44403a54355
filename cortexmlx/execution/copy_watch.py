"""Measures whether MLX writes the arena in place, or copies a slab: by MLX's own counts of bytes around single writes.

An address says nothing, and a NumPy view or a memoryview of a slab would be a holder itself. So only three counts are
read, and none is reset: an app may use MLX's peak for itself.

Read in MLX's source (0.32: `is_donatable` in `backend/common/utils.h`, `buffer_cache.h`, `metal/eval.cpp`):

- A write is in place if nothing else holds the array or its buffer, and the buffer is at most 16,384 bytes larger than
  the array.
- On Metal the inputs of an operation are held until the completion handler of their command buffer has run. The event
  that `mx.eval` waits for is signalled before that; `mx.synchronize` waits for the handlers, too.
- A freed buffer goes to a cache, from which a later allocation may take it. So a copy shows in the active bytes (what
  held the slab holds the old buffer), in active and cached bytes together (the cache has the old buffer), or in the
  peak.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import mlx.core as mx

from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.stats import ArenaWrites

_log = logging.getLogger(__name__)

_SLACK = 64 << 10
"""Bytes that a write may allocate or free beside the tokens that it moves: indices, and the rounding to pages."""

_MEASURABLE = 4
"""How many times that an array must have, to be measured."""

_QUIET = (0.001, 0.002, 0.004)
"""After a copy was seen: seconds without any allocation, each followed by more measured writes. If something happens in
them, someone else may have made the bytes.
"""


class Moment(Enum):
    """What is measured, with how many measurements of an arena's size are enough."""

    FLUSH = 3
    """A flush. Each of its writes is measured."""
    PASS = 2
    """The moment before a forward pass that writes the arena. It is too late to measure the pass itself, among whose
    activations a slab is not seen. So a zero is written to the scratch slot, under the same conditions.
    """


_TRIES = 4
"""For each measurement that is enough: how many may be made. The others were disturbed."""


@dataclass(frozen=True)
class _Bytes:
    """MLX's counts at one moment."""

    active: int
    cached: int
    peak: int

    @classmethod
    def now(cls) -> _Bytes:
        return cls(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())

    def copied(self, before: _Bytes, size: int, allowed: int) -> bool | None:
        """Return whether an array of `size` bytes was copied since `before`; None if others took or gave back memory.

        In each count a copy is `size` and no copy is 0, `allowed` bytes more or less.
        """
        active = self.active - before.active
        changes = [active, active + self.cached - before.cached]
        if self.peak > before.peak:
            changes.append(self.peak - before.active)
        if any(abs(change - size) <= allowed for change in changes):
            return True
        return False if all(abs(change) <= allowed for change in changes) else None


class CopyWatch:
    """Measures the first writes of an arena, and again after its size has changed. `writes` says what was found; the
    first copy is also a warning in the log.

    It accuses nobody by mistake, as far as it can: a measurement counts only if every single change of the counts is
    that of a copy or of none, and if after a copy all is quiet. Other engines and an app's own work in the process
    allocate at other times, too, and in other sizes. Writes to slabs that are small beside what is moved are not
    measured.
    """

    def __init__(self) -> None:
        self.writes = ArenaWrites()
        self._size = 0
        self._measured: Counter[Moment] = Counter()
        self._tried: Counter[Moment] = Counter()

    def evaluate(self, moment: Moment, arena: KVArena, moved: int) -> None:
        """Evaluate the arena's arrays, each of which a write may have changed. A write moves at most `moved` bytes."""
        arrays = arena.arrays()
        allowed = 4 * moved + _SLACK
        least = _MEASURABLE * allowed
        large = [array for array in arrays if array.nbytes >= least] if self._due(moment, arrays) else []
        mx.eval([array for array in arrays if array.nbytes < least] if large else list(arrays))
        if not large:
            return
        self._tried[moment] += 1
        copied = _copies(large, allowed)
        if copied is None or (copied and not _quiet(arena, large)):
            mx.eval(arrays)
            return
        self._measured[moment] += 1
        self._tell(len(large), copied)

    def look(self, arena: KVArena) -> None:
        """Measure whether the arena could be written in place now. Nothing may be in flight."""
        arrays = arena.arrays()
        if any(array.nbytes >= _MEASURABLE * _SLACK for array in arrays) and self._due(Moment.PASS, arrays):
            arena.write_scratch()
            self.evaluate(Moment.PASS, arena, 0)

    def _due(self, moment: Moment, arrays: Sequence[mx.array]) -> bool:
        size = sum(array.nbytes for array in arrays)
        if size != self._size:
            self._size = size
            self._measured.clear()
            self._tried.clear()
        return self._measured[moment] < moment.value and self._tried[moment] < _TRIES * moment.value

    def _tell(self, measured: int, copied: Sequence[int]) -> None:
        told, so_far = self.writes.copied > 0, self.writes
        self.writes = ArenaWrites(
            so_far.measured + measured, so_far.copied + len(copied), so_far.copied_bytes + sum(copied)
        )
        if copied and not told:
            _log.warning(
                "MLX copied %s of the KV cache to write a few tokens (%d of %d arrays): something holds them. This "
                "costs memory and time; please report it with what `cortexmlx doctor --report` writes",
                format_bytes(sum(copied)),
                len(copied),
                measured,
            )


def _copies(arrays: Sequence[mx.array], allowed: int) -> list[int] | None:
    """Evaluate arrays one by one. Return the bytes of those that were copied; None if that cannot be told. Then some
    are perhaps not evaluated.
    """
    copied = []
    before = _Bytes.now()
    for array in arrays:
        mx.eval(array)
        after = _Bytes.now()
        was_copied = after.copied(before, array.nbytes, allowed)
        if was_copied is None:
            return None
        if was_copied:
            copied.append(array.nbytes)
        before = after
    return copied


def _quiet(arena: KVArena, arrays: Sequence[mx.array]) -> bool:
    """Return whether nobody else seems to allocate or to free memory. The arena's arrays are evaluated."""
    for seconds in _QUIET:
        before = _Bytes.now()
        time.sleep(seconds)
        if _Bytes.now() != before:
            return False
        arena.write_scratch()
        if _copies(arrays, _SLACK) is None:
            return False
    return True
