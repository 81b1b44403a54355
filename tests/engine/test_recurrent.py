"""Recurrent and hybrid models: mlx-lm's own caches on the same weights are the judge of tokens and of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.logits import mlx_lms_logits
from support.models.recurrent import RECURRENT
from support.models.tiny import tokens_of

LENGTHS = (1, 30, 17, 26, 40)
TOKENS = 12
FEW = ("qwen3_next", "falcon_h1", "rwkv7")
"""A delta rule beside attention, both in one layer, and no attention at all."""
EVERY = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT]


class Watched:
    """A driver that keeps the logits of each token of each job."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.logits: dict[int, list[Any]] = {}
        forward = driver.core.runner._forward

        def watched(plan: Any) -> Any:
            logits, kept = forward(plan)
            for index, segment in enumerate(plan.logit_segments):
                if segment.live:
                    self.logits.setdefault(segment.job, []).append(np.array(logits[index]))
            return logits, kept

        driver.core.runner._forward = watched  # type: ignore[method-assign]


def ragged(driver: Driver, prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[tuple[int, ...]]:
    """The answers to prompts that come at different steps, so that pieces and single tokens meet."""
    handles = []
    for prompt in prompts:
        handles.append(driver.add(prompt, tokens))
        driver.step(2)
    driver.finish()
    return [driver.result(handle).token_ids for handle in handles]


@pytest.mark.parametrize("name", EVERY)
def test_ragged_rows_have_the_logits_of_mlx_lm(name: str, tiny: Any, judged: Any) -> None:
    """The engine's answer is greedy by mlx-lm's logits, which are the engine's to 1e-4 of their size."""
    prompts = [tokens_of(n, seed=n) for n in LENGTHS]
    watched = Watched(Driver(tiny(name), tokens=2048, max_rows=5, prefill_budget=24))
    answers = ragged(watched.driver, prompts)
    for job, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        theirs = mlx_lms_logits(judged(name)[0], prompt, answer)
        for mine, wanted, token in zip(watched.logits[job], theirs, answer, strict=True):
            scale = max(1.0, float(np.abs(wanted).max()))
            np.testing.assert_allclose(mine, wanted, atol=1e-4 * scale, rtol=0)
            assert wanted[token] >= wanted.max() - 2e-4 * scale
    assert_nothing_lost(watched.driver.core.stats())
