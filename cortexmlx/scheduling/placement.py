"""Where a step's tokens are: block tables, slots to write, slots to zero. Without mlx."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.scheduling.job import Job, Lane
from cortexmlx.scheduling.plan import SCRATCH_SLOT, ArenaWrite, Flush
from cortexmlx.types.arrays import IntArray

ScheduledTokens = Sequence[tuple[Job, int]]
"""The jobs of a step with how many tokens each gets, single tokens first."""

EMPTY = np.zeros(0, np.int32)

ORIGIN = 512
"""In a windowed group, a row's tokens are counted from a multiple of this number, at or before the oldest token that is
seen. The kernels cut a row at multiples of a part of this number, so they cut it where they would if it began at 0.
"""


def group_steps(cache: KVCache, scheduled: ScheduledTokens, *, written: bool) -> tuple[GroupStep, ...]:
    """Return where every layer group finds its keys and values. `written` says that the step's own tokens are written
    to the arena and read from there.
    """
    return tuple(_group_step(cache, group, scheduled, written) for group in range(len(cache.groups)))


def arena_writes(cache: KVCache, scheduled: ScheduledTokens) -> tuple[ArenaWrite, ...]:
    """Return where the step's own tokens go in every layer group."""
    return tuple(_arena_write(cache, group, scheduled) for group in range(len(cache.groups)))


def flush_of(cache: KVCache, lanes: Sequence[Lane], columns: int, ends: Mapping[int, int]) -> Flush:
    """Return how a window's columns go to the arena: those of lane i to its slots from its base up to `ends[i]`, all
    others to scratch.
    """
    writes = []
    for group in range(len(cache.groups)):
        slots = np.full((len(lanes), columns), SCRATCH_SLOT, np.int32)
        zeros = [EMPTY]
        for i, end in ends.items():
            lane = lanes[i]
            slots[i, : end - lane.base] = cache.tables.slots(lane.job.id, group, lane.base, end - lane.base)
            zeros.append(_opened_rest(cache, lane.job, group, lane.base, end))
        writes.append(ArenaWrite(slots.reshape(-1), np.concatenate(zeros)))
    return Flush(columns, tuple(writes))


def _group_step(cache: KVCache, group: int, scheduled: ScheduledTokens, written: bool) -> GroupStep:
    attention_window = cache.groups[group].spec.attention_window
    unit = math.lcm(ORIGIN, cache.block_size, (attention_window.tokens or 1) if attention_window.chunked else 1)

    def origin(job: Job) -> int:
        return 0 if attention_window.tokens is None else attention_window.oldest(job.num_computed_tokens) // unit * unit

    singles = [job for job, count in scheduled if count == 1]
    origins = [origin(job) for job in singles]
    lengths = np.array([j.num_computed_tokens + written - o for j, o in zip(singles, origins, strict=True)], np.int32)
    width = max((cache.tables.blocks_for(int(n)) for n in lengths), default=0)
    tables = np.full((len(singles), width), cache.pools.null_block(group), np.int32)
    runs = []
    for row, (job, begin, length) in enumerate(zip(singles, origins, lengths.tolist(), strict=True)):
        tables[row, : cache.tables.blocks_for(length)] = cache.tables.row(job.id, group, begin + length, begin)
        runs.append(cache.tables.run(job.id, group, begin + length, begin))
    pieces = []
    flat = len(singles)
    for job, count in scheduled:
        if count > 1:
            begin, end = origin(job), job.num_computed_tokens + count
            run = cache.tables.run(job.id, group, end, begin)
            slots = None if run is not None else cache.tables.slots(job.id, group, begin, end - begin)
            pieces.append(PrefillPiece(flat, flat + count, job.num_computed_tokens - begin, run, slots))
            flat += count
    return GroupStep(tables, lengths, tuple(runs), tuple(pieces), attention_window)


def _arena_write(cache: KVCache, group: int, scheduled: ScheduledTokens) -> ArenaWrite:
    slots = [cache.tables.slots(job.id, group, job.num_computed_tokens, count) for job, count in scheduled]
    zeros = [
        _opened_rest(cache, job, group, job.num_computed_tokens, job.num_computed_tokens + count)
        for job, count in scheduled
    ]
    return ArenaWrite(np.concatenate(slots), np.concatenate(zeros))


def _opened_rest(cache: KVCache, job: Job, group: int, begin: int, end: int) -> IntArray:
    """Return the slots after `end` of a block that is first written by `begin .. end`. They get zeros, since whole
    blocks are read.
    """
    rest = -end % cache.block_size
    opened = begin <= end - end % cache.block_size
    return cache.tables.slots(job.id, group, end, rest) if rest and opened else EMPTY
