"""Where a step's tokens lie, beside an arena of labels: every query sees its row's tokens, and no junk is read."""

from __future__ import annotations

from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep
from cortexmlx.metal.prefill import PrefillVariant
from cortexmlx.metal.shape import PARTITION
from cortexmlx.scheduling import builder as placement
from cortexmlx.scheduling.builder import arena_writes, flush_of, group_steps
from cortexmlx.scheduling.job import Job, Lane
from cortexmlx.scheduling.plan import SCRATCH_SLOT, ArenaWrite
from support.scheduling.requests import job_of

GROUPS = [LayerGroup(KVSpec(1, 4, 4, "float32"), (0,)), LayerGroup(KVSpec(1, 8, 8, "float32", window=5), (1,))]
JUNK, ZERO = -1, -2
BLOCKS = 160
COUNTS = st.lists(st.sampled_from([1, 1, 2, 3, 7]), min_size=1, max_size=4)


class Labels:
    """An arena in which the token of job j at position p is the number 100 * j + p."""

    def __init__(self, size: int) -> None:
        self.cache = KVCache(BlockPools(GROUPS, BLOCKS, size))
        self.slots = [np.full((BLOCKS + 1) * size, JUNK) for _ in GROUPS]
        for group in self.slots:
            group[BLOCKS * size :] = ZERO  # the null block

    def write(self, group: int, write: ArenaWrite, labels: list[int]) -> None:
        """A slot of scratch is nobody's: its label is dropped."""
        real = write.slots != SCRATCH_SLOT
        self.slots[group][write.slots[real]] = np.array(labels)[real]
        self.slots[group][write.zeros] = ZERO

    def read(self, group: int, step: GroupStep, row: int) -> list[int]:
        """What a single-token query reads: whole blocks."""
        size = self.cache.block_size
        return [int(label) for b in step.tables[row] for label in self.slots[group][b * size : (b + 1) * size]]


def oldest_seen(job: Job, window: int | None) -> int:
    return 0 if window is None else max(0, job.num_computed_tokens + 1 - window)


def labels_of(job: Job, first: int, count: int) -> list[int]:
    return [100 * job.id + p for p in range(first, first + count)]


@pytest.mark.parametrize("origin", [1, 8, placement.ORIGIN])
@given(steps=st.lists(COUNTS, min_size=1, max_size=6), size=st.sampled_from([1, 4, 8]))
def test_each_query_finds_its_rows_tokens_and_no_junk(origin: int, steps: list[list[int]], size: int) -> None:
    with mock.patch.object(placement, "ORIGIN", origin):
        find_tokens(steps, size)


def find_tokens(steps: list[list[int]], size: int) -> None:
    """Rows that compute so many tokens in each step; of a window only what it sees must be there."""
    arena = Labels(size)
    jobs = [job_of(i, [1]) for i in range(max(map(len, steps)))]
    for job in jobs:
        arena.cache.allocate_for(job.id, 1)
    for counts in steps:
        scheduled = sorted(zip(jobs, counts, strict=False), key=lambda s: s[1] > 1)
        for job, count in scheduled:
            arena.cache.reserve(job.id, job.num_computed_tokens + count)
        writes = arena_writes(arena.cache, scheduled)
        written = [label for job, n in scheduled for label in labels_of(job, job.num_computed_tokens, n)]
        for group, (write, step) in enumerate(
            zip(writes, group_steps(arena.cache, scheduled, written=True), strict=True)
        ):
            arena.write(group, write, written)
            assert step.attention_window == GROUPS[group].spec.attention_window
            window = GROUPS[group].spec.window
            singles = [job for job, n in scheduled if n == 1]
            for row, job in enumerate(singles):
                seen, length = arena.read(group, step, row), int(step.lengths[row])
                oldest = oldest_seen(job, window)
                hidden = length - (job.num_computed_tokens + 1 - oldest)
                assert hidden <= oldest and (oldest - hidden) % size == 0
                assert seen[hidden:length] == labels_of(job, oldest, length - hidden) and set(seen[length:]) <= {ZERO}
                assert JUNK not in seen, "whole blocks are read"
                if (run := step.runs[row]) is not None:
                    blocks = step.tables[row, : run.count]
                    assert [*range(run.start, run.stop)][hidden // size :] == blocks[hidden // size :].tolist()
            begin = len(singles)
            for piece, (job, n) in zip(step.pieces, scheduled[begin:], strict=True):
                assert (piece.begin, piece.end) == (begin, begin + n)
                hidden = piece.first - (job.num_computed_tokens - (oldest := oldest_seen(job, window)))
                where = piece.slots if piece.run is None else np.arange(piece.run.start * size, piece.run.stop * size)
                assert where is not None and hidden <= oldest
                seen = arena.slots[group][where[hidden : piece.tokens]].tolist()
                assert seen == labels_of(job, oldest, piece.tokens - hidden)
                begin += n
        for job, count in scheduled:
            arena.cache.append(job.id, count)
            job.num_computed_tokens += count


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 6)), min_size=1, max_size=4), st.sampled_from([1, 4, 8]))
def test_a_flush_brings_each_lanes_columns_to_their_slots_and_the_rest_to_scratch(
    rows: list[tuple[int, int]], size: int
) -> None:
    arena, columns = Labels(size), 6
    lanes = []
    for i, (base, done) in enumerate(rows):
        job = job_of(i, [1] * base)
        arena.cache.allocate_for(job.id, base + done)
        arena.cache.append(job.id, base + done)
        for group in range(2):
            before = arena.cache.tables.slots(job.id, group, 0, base)
            arena.slots[group][before] = labels_of(job, 0, base)
            rest = arena.cache.tables.slots(job.id, group, base, -base % size) if base % size else []
            arena.slots[group][rest] = ZERO
        lanes.append(Lane(job, job.generation, base))
    ends = {i: base + done for i, (base, done) in enumerate(rows) if done}
    flush = flush_of(arena.cache, lanes, columns, ends)
    labels = [label for lane in lanes for label in labels_of(lane.job, lane.base, columns)]
    assert flush.columns == columns
    for group, write in enumerate(flush.writes):
        assert (write.slots == SCRATCH_SLOT).sum() == columns * len(rows) - sum(done for _, done in rows)
        arena.write(group, write, labels)
        for lane, (base, done) in zip(lanes, rows, strict=True):
            table = arena.cache.tables.block_table(lane.job.id, group)
            seen = [int(x) for b in table for x in arena.slots[group][b * size : (b + 1) * size]]
            assert seen[: base + done] == labels_of(lane.job, 0, base + done)
            assert set(seen[base + done :]) <= {ZERO}


def test_rows_of_windows_are_cut_where_the_kernels_cut_whole_rows() -> None:
    """What a kernel adds up in one go must not depend on how much of a row is gone."""
    assert placement.ORIGIN % (2 * PARTITION) == 0, "the longest partition"
    for group in (1, 2, 3, 4, 8, 16):
        for dim in (64, 128, 256):
            variant = PrefillVariant("float16", "float16", dim, dim, 32, group)
            assert placement.ORIGIN % variant.tile == 0
