"""A prompt that takes several steps: how far it is, as its caller is told, and that a cancelled one goes no further."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.core import answers
from cortexmlx.core.handle import RequestHandle
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import RequestState
from support.engine.core_driver import Driver

PROMPT = [1 + i * 7 % 50 for i in range(100)]


@pytest.fixture
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PROGRESS_SECONDS", 0.0)


def heard(driver: Driver, handle: RequestHandle) -> list[Any]:
    """What is told until the request has ended: each progress, and a token's place in the answer."""
    events: list[Any] = []
    handle._listener = events.append
    driver.finish()
    return [e.progress or e.token_id for e in events if e.progress is not None or e.token_id is not None]


def read(done: int, total: int = 100, cached: int = 0) -> Progress:
    return Progress("prefilling", done, total, cached)


@pytest.mark.usefixtures("told_at_once")
def test_each_piece_of_a_prompt_tells_what_is_computed_before_it(tiny: Any) -> None:
    driver = Driver(tiny("one layer"))
    handle = driver.add(PROMPT, 3)
    assert handle.progress is None
    assert heard(driver, handle) == [read(0), read(32), read(64), read(96), *driver.result(handle).token_ids]
    assert handle.progress == read(96) and read(96).fraction == 0.96


@pytest.mark.usefixtures("told_at_once")
def test_a_prompt_of_one_step_tells_nothing_and_one_that_was_cached_in_part_counts_that_as_done(tiny: Any) -> None:
    driver = Driver(tiny("one layer"))
    short = driver.add(PROMPT[:30], 2)
    assert len(heard(driver, short)) == 2 and short.progress == read(0, 30)
    longer = driver.add(PROMPT, 2)
    first, *_ = heard(driver, longer)
    assert first == read(first.cached, cached=driver.result(longer).usage.cached_tokens) and first.cached >= 24


@pytest.mark.usefixtures("told_at_once")
def test_who_had_to_give_up_its_blocks_tells_of_prompt_and_answer(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), prefix_cache=False)
    handle = driver.add(PROMPT, 40)
    driver.step(20)
    driver.core.drain()
    before = len(driver.core.scheduler.jobs[0].tokens)
    driver.core.scheduler.restart_rows()
    assert before > 104
    told = [each for each in heard(driver, handle) if isinstance(each, Progress)]
    assert [(p.done, p.total) for p in told] == [(at, before) for at in range(0, before, 32)]
    assert len(driver.result(handle).token_ids) == 40


@pytest.mark.usefixtures("told_at_once")
def test_several_answers_read_their_prompt_once(tiny: Any) -> None:
    driver = Driver(tiny("one layer"))
    handle = driver.add(PROMPT, 2, n=3)
    assert sum(isinstance(each, Progress) for each in heard(driver, handle)) == 4


@pytest.mark.usefixtures("told_at_once")
def test_who_reads_late_finds_the_newest_progress_only(tiny: Any) -> None:
    driver = Driver(tiny("one layer"))
    handle = driver.add(PROMPT, 2)
    driver.finish()
    assert [event.progress for event in handle if event.progress] == [read(96)]


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_cancelled_prompt_gets_no_further_piece(tiny: Any, pieces: int) -> None:
    """Also where the engine's thread has not come to the cancel yet when it plans the next step."""
    driver = Driver(tiny("one layer"))
    handle = driver.add(PROMPT, 3)
    asked: list[int] = []
    handle._cancel = asked.append
    driver.step(pieces)
    steps = driver.core.scheduler.planned_steps
    handle.cancel()
    driver.step(3)
    assert (asked, handle.state, driver.core.scheduler.planned_steps) == ([handle.id], RequestState.CANCELLED, steps)
    assert driver.core.scheduler.is_idle and driver.core.cache.tables.sequences.keys() == set()
