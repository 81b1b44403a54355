"""Answers that a model gives on one runner, and on several ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from support.engine.core_driver import Driver
from support.engine.same_tokens import TIGHT, prompts_of

SAMPLED = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2}


def answers_of(model: Path, **config: Any) -> list[Any]:
    """Greedy answers, then sampled ones to the same prompts, which find their beginnings in the cache."""
    driver = Driver(model, **{"tokens": TIGHT, "max_rows": 8} | config)
    handles = [driver.add(prompt, 16) for prompt in prompts_of()]
    driver.finish()
    handles += [driver.add(prompt, 8, seed=i, n=1 + i % 2, **SAMPLED) for i, prompt in enumerate(prompts_of())]
    driver.step(6)
    driver.core.cancel(handles.pop(9).id)
    driver.finish()
    stats = driver.core.stats()
    assert stats.cached_tokens and (stats.preemptions or config.get("tokens", TIGHT) > TIGHT)
    return ended(driver, handles)


@cache
def expected_of(model: Path, tokens: int = TIGHT) -> list[Any]:
    """The same in one process."""
    return answers_of(model, tokens=tokens)


def ended(driver: Driver, handles: list[Any]) -> list[Any]:
    """The tokens of all answers, and their log-probabilities."""
    driver.core.check_invariants()
    results = [each for handle in handles for each in (driver.result(handle), *driver.result(handle).others)]
    driver.core.release()
    return [(each.token_ids, each.logprobs, each.prompt_logprobs) for each in results]
