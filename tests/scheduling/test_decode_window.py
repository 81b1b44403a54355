"""Decode windows: a step for each column of the tail, and a flush that goes where its blocks were."""

from __future__ import annotations

import pytest

from cortexmlx.kv.spec import TAIL_COLUMNS
from cortexmlx.request import RequestState
from cortexmlx.scheduling.plan import StepKind
from support.stage import Stage


def test_one_request_is_one_prefill_step_and_then_windows_of_decode_steps() -> None:
    stage = Stage(blocks=40)
    stage.ask([1, 2, 3, 4, 5], 40)
    plans = []
    while not stage.scheduler.idle:
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
    assert stage.cache.blocks > 9


def test_a_flush_keeps_inside_an_arena_that_shrinks() -> None:
    stage = Stage(blocks=60, block_size=2, max_rows=2)
    short = stage.ask([1], 4)
    stage.ask([2, 3], 25)
    stage.steps(5)
    assert short.state is RequestState.FINISHED
    stage.scheduler.relieve(critical=True)
    stage.finish()
    assert stage.cache.blocks < 60
