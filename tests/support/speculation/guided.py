"""Cores in which a test drafts, and answers without any drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cortexmlx.scheduling.decode_window import DrainReason
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.speculation.speculation import Speculation
from cortexmlx.types.request import Completion
from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.tiny import tokens_of

PROMPT = tokens_of(21, seed=21)
Guess = Callable[[Job], Sequence[int]]


def guide(driver: Driver, guess: Guess) -> None:
    """Let `guess` draft for every job before every step, in the place of `Speculation.draft`."""
    scheduler = driver.core.scheduler

    def draft() -> None:
        for job in scheduler.jobs:
            scheduler.set_drafts(job.id, guess(job))

    core = driver.core
    core.speculation = core.speculation or Speculation(scheduler, ())
    core.speculation.draft = draft  # type: ignore[method-assign]


def guided(driver: Driver, guess: Guess, *prompts: Sequence[int], **asked: Any) -> list[Completion]:
    """The answers to prompts, of a core that is guided."""
    guide(driver, guess)
    handles = [driver.add(prompt, **asked) for prompt in prompts or (PROMPT,)]
    while not driver.core.idle:
        driver.core.step()
        driver.core.check_invariants()
    assert_nothing_lost(driver.core.stats())
    return [driver.result(handle) for handle in handles]


def plain(folder: Path, *prompts: Sequence[int], **asked: Any) -> list[Completion]:
    """The answers of an engine that drafts nothing."""
    driver = Driver(folder, forced_tokens=False, speculate=False)
    handles = [driver.add(prompt, **asked) for prompt in prompts or (PROMPT,)]
    driver.finish()
    assert not verified(driver)
    return [driver.result(handle) for handle in handles]


def quiet(folder: Path, **config: Any) -> Driver:
    """A core in which only the test drafts."""
    return Driver(folder, **{"forced_tokens": False, "speculate": False} | config)


def planned(driver: Driver) -> list[StepPlan]:
    """The plans of a core, as they come."""
    plans, dispatch = [], driver.core.runner.dispatch

    def keep(plan: StepPlan) -> Any:
        plans.append(plan)
        return dispatch(plan)

    driver.core.runner.dispatch = keep  # type: ignore[method-assign]
    return plans


def right(whole: Sequence[int], most: int = 15) -> Guess:
    """The tokens of an answer, as they come."""
    return lambda job: whole[job.num_generated : job.num_generated + most]


def verified(driver: Driver) -> int:
    return driver.core.scheduler.pipeline_gate.steps[DrainReason.VERIFY]
