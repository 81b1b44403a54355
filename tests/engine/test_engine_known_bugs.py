"""Bugs that others met in engines like this one, one test for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cortexmlx import Engine, SamplingParams
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of


def test_indices_are_int32_from_plan_to_arena(tiny: Any) -> None:
    """The wrong integer type: silently wrong on one device, an error on the other."""
    driver = Driver(tiny("llama"))
    driver.add(tokens_of(40), 5)
    driver.add([7], 5)
    plan = driver.core.scheduler.plan(0)
    assert plan is not None and plan.groups is not None and plan.tokens is not None
    group, write = plan.groups[0], plan.writes[0]
    arrays = (plan.tokens, plan.positions, plan.token_index, plan.logit_rows, group.tables, group.lengths)
    assert {a.dtype for a in (*arrays, write.slots, write.zeros)} == {np.dtype(np.int32)}


def test_the_engine_prints_nothing(tiny: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A print left behind in the forward pass."""
    with Engine(tiny("llama"), kv_memory="128KB") as engine:
        engine.generate_batch([tokens_of(9), tokens_of(20)], SamplingParams(max_tokens=20))
        engine.stats()
    assert capfd.readouterr() == ("", "")
