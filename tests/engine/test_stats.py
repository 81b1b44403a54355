"""What `engine.stats()` returns: frozen numbers."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from cortexmlx.scheduling.job import RowTokens
from cortexmlx.stats import DraftStats, EngineStats, SpeculationStats
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of
from support.scheduling.requests import job_of


@pytest.fixture(scope="module")
def stats(tiny: Any) -> EngineStats:
    found: EngineStats = Driver(tiny("one layer")).core.stats()
    return found


@pytest.mark.parametrize(("cached", "prompt", "rate"), [(0, 0, 0.0), (0, 40, 0.0), (30, 40, 0.75), (40, 40, 1.0)])
def test_the_hit_rate_is_the_share_of_the_prompts_that_was_found(
    stats: EngineStats, cached: int, prompt: int, rate: float
) -> None:
    assert replace(stats, cached_tokens=cached, prompt_tokens=prompt).hit_rate == rate


def test_numbers_of_one_moment_stay_those_of_that_moment(stats: EngineStats) -> None:
    with pytest.raises(FrozenInstanceError):
        stats.steps = 1  # type: ignore[misc]


def test_the_engines_figures_are_those_of_the_answers_that_it_gave(tiny: Any) -> None:
    """Counts add up, and both speak of the same clock: an answer's time to its first token is one of the engine's."""
    driver = Driver(tiny("llama"))
    asked = [tokens_of(80, seed=1), tokens_of(20, seed=2), [*tokens_of(80, seed=1), 5, 6], tokens_of(9, seed=3)]
    done = [driver.result_of(prompt, 6 + number) for number, prompt in enumerate(asked)]
    figures = driver.core.stats()
    assert figures.requests_finished == len(done)
    assert figures.prompt_tokens == sum(each.usage.prompt_tokens for each in done) == 191
    assert figures.cached_tokens == sum(each.usage.cached_tokens for each in done) == 80
    assert figures.generated_tokens == sum(each.usage.completion_tokens for each in done) == 30
    first, queued, between = figures.time_to_first_token, figures.queued, figures.inter_token
    assert (first.count, queued.count, between.count) == (4, 4, 26)
    assert first.mean == pytest.approx(sum(each.timings.ttft for each in done) / 4)
    assert first.longest == pytest.approx(max(each.timings.ttft for each in done))
    assert queued.mean == pytest.approx(sum(each.timings.queued for each in done) / 4)
    decoding = (each.usage.completion_tokens - 1 for each in done)
    seconds = (n / each.timings.decode_tokens_per_second for n, each in zip(decoding, done, strict=True))
    assert between.mean * between.count == pytest.approx(sum(seconds))


def test_drafted_tokens_are_counted_for_the_engine_and_for_each_answer(tiny: Any) -> None:
    """A step gives a row one token, and one more for each accepted draft."""
    wanted = Driver(tiny("llama"), speculate=False).result_of(tokens_of(9), 40).token_ids
    driver = Driver(tiny("llama"), speculate=False)
    handle = driver.add(tokens_of(9), 40)
    while not driver.core.idle:
        for job in driver.core.scheduler.jobs:
            right = wanted[job.num_generated : job.num_generated + 4]
            driver.core.scheduler.set_drafts(job.id, [*right[:3], *(token ^ 1 for token in right[3:])])
        driver.core.step()
    usage, said = driver.result(handle).usage, driver.core.stats().speculation
    assert (usage.drafted_tokens, usage.accepted_tokens) == (said.drafted, said.accepted)
    assert said.drafted > said.accepted > 20 and said.verified == said.drafted - said.accepted
    assert said.tokens_per_step == 1 + said.accepted / said.verified > 3
    assert usage.tokens_per_step == 40 / (40 - said.accepted) > 2


def test_without_speculation_nothing_is_drafted(tiny: Any) -> None:
    driver = Driver(tiny("llama"), speculate=False)
    usage = driver.result_of(tokens_of(5, seed=1) * 6, 40).usage
    assert driver.core.stats().speculation == SpeculationStats()
    assert (usage.drafted_tokens, usage.accepted_tokens, usage.tokens_per_step) == (0, 0, 1.0)


def test_drafts_are_counted_as_a_whole_and_by_source(tiny: Any) -> None:
    core = Driver(tiny("llama"), speculate=True).core
    core.measurements.count_drafts(
        [RowTokens(job_of(0, [1]), (), 0, None, 7, 5), RowTokens(job_of(1, [1]), (), 0, None, 2, 2)]
    )
    assert core.stats().speculation.sources == {}
    core.speculation.counts["suffix"].drafted, core.speculation.counts["suffix"].accepted = 7, 5
    core.speculation.counts["forced"].drafted, core.speculation.counts["forced"].accepted = 2, 2
    said = core.stats().speculation
    assert said.sources == {"suffix": DraftStats(7, 5), "forced": DraftStats(2, 2)}
    assert (said.drafted, said.accepted, said.verified, said.tokens_per_step) == (9, 7, 2, 4.5)
