"""What `engine.stats()` returns: frozen numbers."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from cortexmlx.stats import EngineStats
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of


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
