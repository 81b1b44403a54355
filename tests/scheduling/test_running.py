"""The running set: what is said to fit does fit, asking changes nothing, and who is short of memory hears it."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.running import RunningSet, can_fork
from cortexmlx.scheduling.shortage import Backoff
from cortexmlx.types.request import RequestState
from support.effort import examples
from support.scheduling.requests import job_of

GROUPS = [LayerGroup(KVSpec(1, 4 + i, 4, "float32"), (i,)) for i in range(2)]


def running_set(blocks: int, limit: int | None = None, size: int = 4, **settings: Any) -> RunningSet:
    cache = KVCache(
        BlockPools(GROUPS, blocks, size, max_blocks=limit, may_resize=settings.pop("may_resize", lambda blocks: True))
    )
    return RunningSet(cache, **({"backoff": Backoff(8, 512), "headroom": 0, "share_prefixes": True} | settings))


def begin(running: RunningSet, job: Job) -> None:
    job.keys = running.compute_keys(job.tokens, None)
    running.begin(job, running.match(job))


def one_block_more(running: RunningSet, row: Job) -> bool:
    """Whether a row gets one block more than it has or was promised. The promise stays as it was."""
    promised, cache = row.reserved_tokens, running.cache
    kept = cache.tables.blocks_for(max(promised, cache.tables.length(row.id)))
    got = running.reserve(row, kept * cache.block_size + 1)
    row.reserved_tokens = promised
    return got


def books(running: RunningSet) -> Any:
    """Everything that a question must leave as it was."""
    cache, jobs = running.cache, running.jobs
    tables = [cache.tables.block_table(j.id, g).tolist() for j in jobs for g in range(len(GROUPS))]
    maps = [cache.pools[g].allocator.block_map() for g in range(len(GROUPS))]
    state = [(j.state, j.reserved_tokens, j.max_new_tokens, j.num_computed_tokens) for j in jobs]
    return (
        cache.stats(),
        cache.pools.obtainable_blocks(0),
        cache.pools.obtainable_blocks(1),
        cache.pools.blocks,
        tables,
        maps,
        state,
        running.changes,
    )


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@settings(max_examples=examples(150))
@given(st.data(), st.integers(6, 16), st.integers(0, 6), st.sampled_from([0, 9]), st.booleans())
def test_what_fits_can_begin_and_leaves_every_row_a_block(
    data: st.DataObject, blocks: int, more: int, headroom: int, share: bool
) -> None:
    running = running_set(blocks, blocks + more, headroom=headroom, share_prefixes=share)
    for number in range(data.draw(st.integers(1, 14))):
        if running.jobs and data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.sampled_from(running.jobs))
            running.release_row(gone)
            running.release_blocks(gone)
        job = job_of(number, data.draw(PROMPTS))
        job.keys = running.compute_keys(job.tokens, None)
        match, rows = running.match(job), list(running.jobs)
        before = books(running)
        fits = running.fits(job, match)
        assert books(running) == before, "asking changes nothing"
        if not rows:
            assert fits or len(job.tokens) > running.cache.tables.capacity_tokens
        if not fits or len(running.jobs) == running.backoff.rows:
            continue
        running.make_room(job, match)
        running.begin(job, match)
        running.cache.check_invariants()
        assert job.is_running and running.jobs[-1] is job
        assert running.cache.tables.length(job.id) == job.num_computed_tokens < len(job.tokens)
        running.cache.append(job.id, len(job.tokens) - job.num_computed_tokens)
        running.note_stored(job, len(job.tokens))
        running.cache.release_copy_sources()
        assert all(one_block_more(running, row) for row in rows), "nobody must go for it"


def test_the_source_of_a_copy_counts_as_room_and_is_room_when_it_is_let_go() -> None:
    """A found example: the text begins like a cached block that nobody uses, so it begins with a copy of it. Until the
    last load is planned, source and copy both take a block (see `Admission.admit`).
    """
    running = running_set(7)
    for number, prompt in enumerate([[1, 0, 0, 0], [0] * 9]):
        begin(running, job := job_of(number, prompt))
        running.cache.append(job.id, len(prompt))
        running.note_stored(job, len(prompt))
    running.release_row(first := running.jobs[0])
    running.release_blocks(first)
    (row,) = running.jobs
    late = job_of(2, [1, 0, 0, 1, 0, 0, 0, 0, 0])
    late.keys = running.compute_keys(late.tokens, None)
    match = running.match(late)
    assert match is not None and match.partial_tokens == 3
    assert running.fits(late, match)
    assert len(running.begin(late, match)) == len(GROUPS)
    assert not one_block_more(running, row), "6 of 7 blocks belong to the rows, and the source is held"
    running.cache.release_copy_sources()
    assert one_block_more(running, row)


def test_room_that_is_wanted_only_is_given_up_for_who_needs_it() -> None:
    running = running_set(8, headroom=16)
    first = job_of(0, [1] * 4)
    begin(running, first)
    assert running.cache.pools.obtainable_blocks(0) == 3, "a block, and four of headroom"
    late = job_of(1, [2] * 20)
    late.keys = running.compute_keys(late.tokens, None)
    assert running.fits(late, None)
    running.make_room(late, None)
    assert running.cache.pools.obtainable_blocks(0) == 7
    running.begin(late, None)
    assert not running.fits(job_of(2, [3] * 4), None), "a block for it and one for each row are more than two"


def test_a_row_asks_for_the_headroom_of_others_before_it_asks_for_a_row() -> None:
    running = running_set(6, headroom=8)
    one, other = job_of(0, [1] * 4), job_of(1, [2] * 4)
    begin(running, one)
    begin(running, other)
    assert running.cache.pools.obtainable_blocks(0) == 0
    assert running.reserve(one, 16), "two blocks of headroom of each"
    assert running.cache.pools.obtainable_blocks(0) == 1
    assert running.reserve(one, 20) and not running.reserve(one, 24), "another row must go first"
    running.release_row(other)
    running.release_blocks(other)
    assert running.reserve(one, 24)


def test_who_is_alone_and_refused_memory_ends_where_the_cache_is_full() -> None:
    running = running_set(2, 8, may_resize=lambda blocks: False)
    job = job_of(0, [1] * 4, 20)
    begin(running, job)
    assert running.reserve(job, 17)
    assert running.cache.tables.capacity_tokens == 8 and job.max_new_tokens == 8 + 1 - 4
    assert running.cache.pools.obtainable_blocks(0) == 0


def test_a_row_alone_that_still_has_no_room_raises() -> None:
    running = running_set(4)
    begin(running, job := job_of(0, [1] * 4))
    running.cache.allocate_for(99, 12)  # blocks of nobody in the set
    with pytest.raises(KVCacheFull, match="raise the KV memory"):
        running.reserve(job, 8)


def test_a_begin_that_is_refused_changes_nothing() -> None:
    running = running_set(4)
    begin(running, job_of(0, [1] * 12))
    late = job_of(1, [2] * 8)
    before = books(running)
    with pytest.raises(KVCacheFull):
        begin(running, late)
    assert books(running) == before and late.state is RequestState.WAITING


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("stored", [0, 8, 9, 30])
def test_a_fork_waits_until_all_but_the_last_token_of_the_prompt_is_stored(state: RequestState, stored: int) -> None:
    parent, child = job_of(0, [1] * 10), job_of(1, [1] * 10)
    assert not can_fork(child)
    child.fork_of, parent.state, parent.num_stored_tokens = parent, state, stored
    assert can_fork(child) == (state is RequestState.DECODING and stored >= 9)


def test_a_fork_shares_its_parents_full_blocks_and_computes_the_last_token() -> None:
    running = running_set(8)
    parent, child = job_of(0, [1] * 10), job_of(1, [1] * 10)
    begin(running, parent)
    running.cache.append(parent.id, 10)
    running.note_stored(parent, 10)
    parent.state, child.fork_of = RequestState.DECODING, parent
    copies = running.begin(child, None)
    tables = [running.cache.tables.block_table(j.id, 0).tolist() for j in (parent, child)]
    assert tables[0][:2] == tables[1][:2] and {(c.source, c.target) for c in copies if c.group == 0} == {
        (tables[0][2], tables[1][2])
    }
    assert child.num_computed_tokens == child.num_stored_tokens == 9


def test_whatever_gives_up_or_stores_is_a_change() -> None:
    running = running_set(8)
    begin(running, job := job_of(0, [1] * 8))
    seen = [running.changes]
    running.cache.append(job.id, 8)
    running.note_stored(job, 8)
    seen.append(running.changes)
    running.release_row(job)
    seen.append(running.changes)
    running.release_blocks(job)
    seen.append(running.changes)
    assert seen == sorted(set(seen))
    assert running.match(again := job_of(1, [1] * 8)) is not None and not again.is_running
    assert running.cache.stats().used_blocks == 0 < running.cache.stats().cached_blocks


def test_without_sharing_nothing_has_a_name_and_nothing_stays() -> None:
    running = running_set(8, share_prefixes=False)
    begin(running, job := job_of(0, [1] * 8))
    running.cache.append(job.id, 8)
    running.note_stored(job, 8)
    running.release_row(job)
    running.release_blocks(job)
    assert running.compute_keys([1] * 8, None) == [] and running.match(job) is None
    assert running.cache.stats().cached_blocks == 0
