"""Rows that drop tokens: they go on for ever in a small arena, and nobody waits for what is gone. The random walks of
`test_scheduler_model.py` have them, too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.types.request import RequestState
from support.scheduling.desk import Desk
from support.scheduling.stage import Stage


def test_a_fork_does_not_wait_for_a_parent_that_has_dropped_its_prompt() -> None:
    stage = Stage(blocks=40, context_length=24, keep=KeepPolicy(0, 12), max_rows=1)
    parent = stage.ask(list(range(20)), max_tokens=300)
    child = stage.ask(list(range(20)), max_tokens=30, fork_of=parent)
    stage.steps(20)
    assert parent.drops and child.state is RequestState.WAITING
    stage.scheduler.check_invariants()
    backoff = stage.scheduler.backoff
    stage.scheduler.config = replace(stage.scheduler.config, max_rows=2)
    backoff.most_rows = backoff.rows = 2
    stage.scheduler._running_set.changes += 1
    stage.steps(3)
    assert child.is_running and parent.is_running
    stage.finish()


def test_a_fork_of_one_that_has_dropped_its_prompt_is_shared_under_its_own_name() -> None:
    stage = Stage(blocks=40, context_length=24, keep=KeepPolicy(0, 12))
    prompt = list(range(20))
    parent = stage.ask(prompt, max_tokens=300)
    stage.steps(40)
    child = stage.ask(prompt, max_tokens=30, fork_of=parent)
    assert parent.drops and child.keys == stage.cache.prefix.keys(prompt)
    stage.finish()


def test_what_was_found_of_a_prompt_is_not_what_was_found_after_a_drop() -> None:
    stage = Stage(blocks=40, context_length=24, keep=KeepPolicy(8, 8))
    job = stage.ask(list(range(20)), max_tokens=100)
    stage.finish()
    assert job.drops and job.cached == 0 == stage.scheduler.cached_tokens


def test_what_a_row_has_dropped_goes_before_the_arena_grows_and_before_what_others_left() -> None:
    stage = Stage(blocks=16, limit=200, context_length=24, keep=KeepPolicy(4, 10))
    others = [9, 8, 7, 6] * 4
    stage.ask(others, max_tokens=1)
    stage.finish()
    stage.ask([1, 2, 3], max_tokens=1000)
    stage.finish()
    assert stage.cache.pools.blocks == (16,)
    again = stage.ask(others, max_tokens=1)
    stage.finish()
    assert again.cached == 15


def test_a_row_goes_on_with_the_blocks_of_its_first_tokens() -> None:
    """They are in the same place of both texts, so nobody computes them again."""
    stage = Stage(blocks=16, context_length=60, keep=KeepPolicy(20, 20))
    job = stage.ask(list(range(20)), max_tokens=1000)
    stage.steps(3)
    first = stage.cache.tables.block_table(job.id, 0)[:5].tolist()
    while job.drops < 3:
        stage.steps(1)
        if job.is_running:
            assert stage.cache.tables.block_table(job.id, 0)[:5].tolist() == first
    stage.finish()


@pytest.mark.parametrize("client", [None, "a"])
@pytest.mark.parametrize("max_tokens", [None, 10**6])
def test_answers_without_end_keep_nobody_of_their_client_waiting_for_ever(
    client: str | None, max_tokens: int | None
) -> None:
    desk = Desk(max_rows=2, keep=KeepPolicy(2, 16), clock=count().__next__)
    endless = [desk.ask([i] * 5, client, max_tokens=max_tokens) for i in range(2)]
    desk.step(5)
    late = [desk.ask([7] * 3, client, max_tokens=5) for _ in range(6)]
    desk.step(200)
    assert all(job.finish_reason for job in late)
    desk.scheduler.check_invariants()
    assert all(job.num_generated > 100 and job.finish_reason is None for job in endless), "they go on"


def test_answers_without_end_take_turns() -> None:
    desk = Desk(max_rows=2, keep=KeepPolicy(2, 16), clock=count().__next__)
    endless = [desk.ask([i] * 5, max_tokens=None) for i in range(6)]
    desk.step(2000)
    lengths = [job.num_generated for job in endless]
    assert min(lengths) > 500 and max(lengths) - min(lengths) <= 34 + 16, "a row's worth of tokens, and what it drops"


def test_an_answer_that_fits_a_row_goes_on_before_those_who_came_later() -> None:
    """A chat's answer drops tokens in the middle, because its prompt is long: it does not stand still for a batch."""
    desk = Desk(max_rows=1, keep=KeepPolicy(2, 16), clock=count().__next__)
    first = desk.ask(list(range(30)), max_tokens=34)
    desk.step()
    late = desk.ask([7] * 3, max_tokens=5)
    while not late.start_number:
        desk.step()
    assert first.drops >= 2 and first.num_generated == 34


def test_others_begin_when_a_client_with_all_rows_drops_tokens() -> None:
    desk = Desk(max_rows=2, keep=KeepPolicy(2, 16), clock=count().__next__)
    endless = [desk.ask([i] * 5, "a", max_tokens=None) for i in range(2)]
    desk.step(5)
    late = desk.ask([7] * 3, "b", max_tokens=5)
    desk.step(34)
    assert late.start_number and max(job.drops for job in endless) == 1
