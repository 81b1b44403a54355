"""Decode windows: a step for each column of the tail, and a flush that goes where its blocks were."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import LONG_TAIL_COLUMNS, TAIL_COLUMNS, KVSpec, LayerGroup
from cortexmlx.scheduling.decode_window import DecodeWindow
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import SCRATCH_SLOT, StepKind
from cortexmlx.scheduling.running import RunningSet
from cortexmlx.types.request import RequestState
from support.scheduling.requests import job_of
from support.scheduling.stage import Stage


def test_one_request_is_one_prefill_step_and_then_windows_of_decode_steps() -> None:
    stage = Stage(blocks=40)
    stage.ask([1, 2, 3, 4, 5], 40)
    plans = []
    while not stage.scheduler.is_idle:
        if (plan := stage.shadow.plan()) is not None:
            plans.append(plan)
        if stage.shadow.in_flight and (plan is None or len(stage.shadow.in_flight) > 1):
            stage.shadow.commit()
    kinds = [p.kind for p in plans]
    assert kinds == [StepKind.MIXED, *[StepKind.DECODE] * 39, StepKind.FLUSH]
    assert [p.column for p in plans[1:-1]] == [i % TAIL_COLUMNS for i in range(39)]
    assert [p.flush is not None for p in plans[1:-1]] == [i % TAIL_COLUMNS == 0 and i > 0 for i in range(39)]
    assert [p.tokens is None for p in plans[1:-1]] == [i % TAIL_COLUMNS != 0 or i == 0 for i in range(39)]


@pytest.mark.parametrize("more", [1, 2, 7])
def test_a_flush_keeps_off_blocks_that_the_arena_grows_by(more: int) -> None:
    """The unused columns of a row that ended go to scratch, which has moved when the arena has grown in between."""
    stage = Stage(blocks=9, block_size=1, limit=9 + more, max_rows=2)
    short, long = stage.ask([1], 3), stage.ask([2], None)
    stage.steps(6)
    assert short.state is RequestState.FINISHED and long.state is RequestState.DECODING
    stage.finish()
    assert stage.cache.pools.blocks > (9,)


def test_a_flush_keeps_inside_an_arena_that_shrinks() -> None:
    stage = Stage(blocks=60, block_size=2, max_rows=2)
    short = stage.ask([1], 4)
    stage.ask([2, 3], 25)
    stage.steps(5)
    assert short.state is RequestState.FINISHED
    stage.scheduler.relieve_memory(critical=True)
    stage.finish()
    assert stage.cache.pools.blocks < (60,)


# -- the window alone -------------------------------------------------------------------------------------------------


class Opened:
    """A window over rows whose prompts are computed, without a scheduler."""

    def __init__(
        self, limits: list[int], layers: tuple[int, ...] = (0,), *, blocks: int = 64, long_tail_rows: int = 0
    ) -> None:
        self.cache = KVCache(BlockPools([LayerGroup(KVSpec(1, 4, 4, "float32"), layers)], blocks, 4))
        self.running = RunningSet(self.cache, 8, headroom=0, share_prefixes=True)
        self.window = DecodeWindow(self.cache, self.running, long_tail_rows)
        self.jobs = [job_of(i, [i] * (3 + i), limit) for i, limit in enumerate(limits)]
        self.room: dict[int, int] = {}
        for job in self.jobs:
            job.keys = self.running.compute_keys(job.tokens, None)
            self.running.begin(job, None)
            self.cache.append(job.id, len(job.tokens))
            job.num_computed_tokens = job.num_stored_tokens = len(job.tokens)
            job.state, job.num_planned_outputs = RequestState.DECODING, 1
            job.tokens.append(9)
        self.window.open(self.make_room)

    def make_room(self, job: Job, tokens: int) -> None:
        self.room[job.id] = tokens
        assert self.running.reserve(job, tokens)

    def step(self) -> None:
        """A column: every lane that is to get a token gets it at once."""
        for job in self.window.next_jobs.values():
            job.num_computed_tokens += 1
            job.num_planned_outputs += 1
            self.cache.append(job.id, 1)
            job.tokens.append(9)
        self.window.column += 1

    def end(self, job: Job, well: bool) -> None:
        lane = self.window.find_lane(job)
        assert lane is not None
        job.state, job.generation = RequestState.FINISHED, job.generation + 1
        self.running.release_row(job)
        if well:
            self.window.await_flush(lane)
        else:
            self.running.release_blocks(job)


def test_a_window_has_room_for_its_columns_and_for_no_more_than_an_answer_takes() -> None:
    opened = Opened([40, 5, 1])
    assert opened.room == {0: 3 + TAIL_COLUMNS, 1: 4 + 4}, "what has all its tokens planned gets no lane"
    assert [lane.job.id for lane in opened.window.lanes] == [0, 1]
    for _ in range(5):
        opened.step()
    assert list(opened.window.next_jobs) == [0], "the second answer is complete"
    assert opened.window.find_lane(opened.jobs[1]) is not None and opened.window.find_lane(opened.jobs[2]) is None


@pytest.mark.parametrize(
    ("limits", "long_tail_rows", "columns"),
    [
        ([100], 1, LONG_TAIL_COLUMNS),
        ([100, 100], 2, LONG_TAIL_COLUMNS),
        ([100, 1], 1, LONG_TAIL_COLUMNS),  # the second has all its tokens planned and gets no lane
        ([100, 100], 1, TAIL_COLUMNS),
        ([100, 100, 100], 2, TAIL_COLUMNS),
    ],
)
def test_few_rows_have_a_long_tail(limits: list[int], long_tail_rows: int, columns: int) -> None:
    opened = Opened(limits, long_tail_rows=long_tail_rows)
    assert opened.window.columns == columns and opened.room[0] == 3 + columns
    for _ in range(columns):
        assert not opened.window.needs_flush
        opened.step()
    assert opened.window.needs_flush


@pytest.mark.parametrize(("blocks", "columns"), [(19, TAIL_COLUMNS), (40, LONG_TAIL_COLUMNS)])
def test_no_row_gives_up_blocks_for_a_long_tail(blocks: int, columns: int) -> None:
    """Two rows of 3 and 4 tokens, of which the second wants 30 more: short windows fit 19 blocks of 4."""
    assert Opened([100, 31], blocks=blocks, long_tail_rows=2).window.columns == columns


def test_a_window_without_layers_that_have_a_tail_goes_on_behind_it() -> None:
    opened = Opened([100], layers=())
    for _ in range(TAIL_COLUMNS):
        opened.step()
    assert not opened.window.needs_flush
    while opened.window.next_jobs and not opened.window.needs_flush:
        opened.step()
    assert 3 * TAIL_COLUMNS < opened.window.column == opened.room[0] - 3 < 100, "but it ends, and what it has is stored"


@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, TAIL_COLUMNS))
def test_a_flush_is_wanted_when_going_on_computes_more_in_vain_than_a_step_of_all(
    lanes: int, dead: int, column: int
) -> None:
    opened = Opened([40] * lanes)
    for job in opened.jobs[:dead]:
        opened.end(job, well=False)
    opened.window.column = column
    in_vain = min(dead, lanes) * (TAIL_COLUMNS - column)
    assert opened.window.needs_flush == (column == TAIL_COLUMNS or in_vain >= lanes)


def test_a_flush_stores_what_ended_well_and_drops_what_did_not() -> None:
    opened = Opened([40, 40, 40])
    for _ in range(6):
        opened.step()
    going, well, badly = opened.jobs
    opened.end(well, well=True)
    opened.end(badly, well=False)
    assert opened.window.jobs_awaiting_flush == [well] and opened.cache.tables.sequences.keys() == {going.id, well.id}
    slots = {job: opened.cache.tables.slots(job.id, 0, job.prompt_length, 6).tolist() for job in (going, well)}
    flush = opened.window.close()
    assert flush is not None and flush.columns == 6
    wanted = [*slots[going], *slots[well], *[SCRATCH_SLOT] * 6]
    assert flush.writes[0].slots.tolist() == wanted
    assert going.num_stored_tokens == going.num_computed_tokens == 9
    assert opened.cache.tables.sequences.keys() == {going.id} and not opened.window.jobs_awaiting_flush
    found = opened.cache.match(well.tokens, opened.cache.prefix.keys(well.tokens), len(well.tokens))
    assert len(found.entries) * 4 + found.partial_tokens == 10, "its prompt and six tokens; the newest has no key"
    assert (opened.window.lanes, opened.window.column) == ((), 0)


def test_a_window_without_a_column_has_nothing_to_flush() -> None:
    opened = Opened([40])
    assert opened.window.close() is None and opened.window.lanes == ()
