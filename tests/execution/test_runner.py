"""What the runner hands to attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.attention.paged import AttentionParams, PagedKV, StepDerivedData
from cortexmlx.kv.step import GroupStep
from cortexmlx.scheduling.plan import StepPlan
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of


def test_what_a_backend_derives_goes_with_the_group_step(tiny: Callable[[str], Path]) -> None:
    """All layers of a group, and all steps of a decode window, share it; another group or another step never does."""
    driver = Driver(tiny("windowed llama"))
    runner = driver.core.runner
    attend = runner._attend
    seen: list[tuple[int, GroupStep, StepDerivedData]] = []

    def watched(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        seen.append((kv.layer, kv.step, kv.derived))
        return attend(queries, kv, params)

    runner._attend = watched
    driver.answers([tokens_of(20), tokens_of(9, seed=1)], 24)

    layers, together = defaultdict(list), {}
    for layer, step, derived in seen:
        assert together.setdefault(id(step), derived) is derived
        layers[id(derived)].append(layer)
    assert len(layers) == len(together), "two steps share what was derived from one of them"
    groups = [set(group.layers) for group in driver.core.cache.groups]
    assert len(groups) == 2 and all(set(found) in groups for found in layers.values())
    assert max(len(found) for found in layers.values()) == 16 * max(len(group) for group in groups)


def test_command_buffers_are_told_on_a_gpu_only_and_follow_the_arena(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tiny("llama"), tokens=4096)
    assert driver.core.stats().command_buffers is None, "nothing is queued on a CPU"
    monkeypatch.setattr(driver.core.runner, "computes_at_dispatch", False)
    monkeypatch.setattr(mx, "device_info", lambda device: {"architecture": "applegpu_g16s"})
    monkeypatch.delenv("MLX_MAX_OPS_PER_BUFFER", raising=False)
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "0")
    few = driver.core.stats().command_buffers
    assert few is not None and (few.max_operations, few.max_elements) == (50, 0)
    assert few.per_step == 1 and not few.may_idle
    slab = driver.core.runner.arena.slab(0)[0]
    driver.core.runner.resize(
        tuple(-(-(1 << 20) // (slab.shape[0] * slab.shape[2] * 8)) for _ in driver.core.cache.groups)
    )
    many = driver.core.stats().command_buffers
    assert many is not None and many.per_step == 3, "each of two layers binds a Mi of elements"


def test_a_step_that_was_prepared_is_not_prepared_again(tiny: Callable[[str], Path]) -> None:
    """Memory operations come before the pass, each once, whether the step is prepared apart or not."""
    prompts = [tokens_of(20), tokens_of(9, seed=1), [*tokens_of(20)[:12], *tokens_of(8, seed=2)]]

    def answers(apart: bool) -> tuple[list[tuple[int, ...]], list[str]]:
        driver, done = Driver(tiny("llama")), list[str]()
        runner = driver.core.runner
        for name in ("flush", "copy"):
            own = getattr(runner.memory, name)
            setattr(runner.memory, name, lambda plan, own=own, name=name: (done.append(name), own(plan))[1])
        dispatch = runner.dispatch

        def prepared(plan: StepPlan) -> Any:
            if plan.flush is not None or plan.copies:
                assert runner.prepare(plan) is None
                done.append("prepared")
            refused = dispatch(plan)
            done.append("dispatched")
            return refused

        if apart:
            runner.dispatch = prepared
        return driver.answers(prompts, 24), done

    told, done = answers(apart=True)
    expected, without = answers(apart=False)
    assert told == expected
    assert [name for name in done if name in ("flush", "copy")] == without and "flush" in without
    assert all(done[place + 1] == "dispatched" for place, name in enumerate(done) if name == "prepared")
