"""What `engine.stats()` returns: frozen numbers."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from cortexmlx.stats import EngineStats
from support.core_driver import Driver


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
