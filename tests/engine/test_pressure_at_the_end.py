"""Memory pressure at every moment of equal answers: their blocks are doubles of each other, which are free the moment
the answers end, while the tail's newest tokens are still on their way to them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.kv.arena import KVArena
from cortexmlx.types.request import RequestState
from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.tiny import tokens_of

STEPS = 19
SETTINGS = [(2, 9, 12, True), (3, 24, 17, True), (2, 24, 12, False), (3, 9, 17, False), (2, 9, 17, True)]
"""Answers, tokens of the prompt and of an answer, pipelining: every pair of values is in one."""


class Watch:
    """Notes every write of an arena that is not inside it: MLX would carry it out anywhere in memory."""

    def __init__(self, arena: KVArena, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outside: list[int] = []
        write = arena.write

        def watched(layer: int, slots: Any, *values: Any) -> None:
            every = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else np.array(slots)
            size = arena.slab(layer)[0].shape[1]
            outside = every[(every < -1) | (every >= size)].tolist()
            self.outside += outside
            if not outside:
                write(layer, slots, *values)

        monkeypatch.setattr(arena, "write", watched)


@pytest.mark.parametrize(("answers", "prompt", "length", "pipeline"), SETTINGS)
def test_pressure_at_any_step_of_equal_answers_writes_nothing_outside_the_arena(
    tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch, answers: int, prompt: int, length: int, pipeline: bool
) -> None:
    tokens = tokens_of(prompt, seed=prompt)
    for steps in range(STEPS + 1):
        driver = Driver(tiny("one layer"), tokens=1024, pipeline=pipeline)
        watch = Watch(driver.core.runner.arena, monkeypatch)
        handle = driver.add(tokens, length, n=answers, temperature=0.0)
        driver.step(steps)
        ended = driver.core.idle
        driver.core.relieve(True)
        driver.finish()
        driver.core.check_invariants()
        assert not watch.outside, f"{len(watch.outside)} slots outside the arena after pressure at step {steps}"
        result = driver.result(handle)
        wanted = theirs("one layer", tokens, length)
        assert [list(a.token_ids) for a in (result, *result.others)] == [wanted] * answers
        assert_nothing_lost(driver.core.stats())
        if ended:
            break  # later steps do nothing


def test_pressure_through_the_engine_while_equal_answers_end(tiny: Any, theirs: Any) -> None:
    answers, prompt = 3, tokens_of(9, seed=9)
    with Engine(tiny("one layer"), block_size=8) as engine:
        for length in range(1, 40, 2):
            asked = SamplingParams(max_tokens=length, n=answers, temperature=0.0, ignore_eos=True)
            handle = engine.submit(prompt, asked)
            while handle.state not in (RequestState.FINISHED, RequestState.FAILED):
                engine.on_memory_pressure("critical")
            result = handle.result(0)
            wanted = theirs("one layer", prompt, length)
            assert [list(a.token_ids) for a in (result, *result.others)] == [wanted] * answers
        engine.check_invariants()
