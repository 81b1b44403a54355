"""A CPU is given each layer of a step while the next one is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.cpu.feed import EarlyEvaluator
from cortexmlx.execution.runner import ModelRunner
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="for MLX's CPU build")
PROMPTS = [tokens_of(20), tokens_of(9, seed=1), tokens_of(33, seed=2)]


@pytest.mark.parametrize("on", [True, False])
def test_what_is_fed_is_computed_without_being_asked_for(on: bool) -> None:
    feed = EarlyEvaluator()
    feed.enabled = on
    before = mx.get_active_memory()
    array = mx.zeros((1 << 20,)) + mx.arange(1 << 20)
    feed(array)
    mx.synchronize()
    assert (mx.get_active_memory() - before >= array.nbytes) == on
    assert (feed.wait_seconds > 0) == on


@pytest.mark.parametrize("kind", ["windowed llama", "granitemoehybrid"])
def test_every_layer_is_fed_in_every_step_and_nothing_else_changes(tiny: Callable[[str], Path], kind: str) -> None:
    driver = Driver(tiny(kind))
    runner = driver.core.runner
    assert isinstance(runner, ModelRunner)
    feed, calls = runner._feed, 0
    begin = feed.__class__.__call__

    class Counting(EarlyEvaluator):
        def __call__(self, *arrays: mx.array) -> None:
            nonlocal calls
            calls += 1
            begin(self, *arrays)

    runner._feed.__class__ = Counting
    answers: list[Any] = driver.answers(PROMPTS, 12)
    layers = len(driver.core.loaded.model.layers)
    assert calls and calls % layers == 0
    assert calls >= 12 * layers
    other = Driver(tiny(kind))
    other.core.runner._feed.on = False
    assert other.answers(PROMPTS, 12) == answers
