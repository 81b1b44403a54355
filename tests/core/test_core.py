"""The engine's work step by step: requests that are cancelled at any of them."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.errors import ModelCorrupt, NoTokenToChoose
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.types.request import FinishReason, RequestState
from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.tiny import tokens_of, write_tiny

PROMPT = tokens_of(20, seed=1)


@pytest.mark.parametrize("steps", (0, 3, 4, 22))
def test_cancelling_at_any_step_keeps_the_tokens_so_far_and_the_neighbours(tiny: Any, theirs: Any, steps: int) -> None:
    """Fifty tokens are prefilled in four pieces, then decoded across the end of a window."""
    driver = Driver(tiny("llama"), prefill_budget=16)
    prompt, other = tokens_of(50, seed=2), tokens_of(9, seed=3)
    neighbour = driver.add(other, 40)
    handle = driver.add(prompt, 60)
    driver.step(steps)
    handle.cancel()
    completion = driver.result(handle)
    assert completion.finish_reason is FinishReason.CANCELLED and handle.state is RequestState.CANCELLED
    assert list(completion.token_ids) == theirs("llama", prompt, 60)[: len(completion.token_ids)]
    handle.cancel()
    driver.finish()
    assert list(driver.result(neighbour).token_ids) == theirs("llama", other, 40)
    assert_nothing_lost(driver.core.stats())


def test_a_waiting_request_is_cancelled_before_it_runs(tiny: Any) -> None:
    driver = Driver(tiny("llama"), max_rows=1)
    first, second = driver.add(PROMPT, 20), driver.add(PROMPT, 20)
    driver.step(3)
    second.cancel()
    assert driver.result(second).token_ids == ()
    driver.finish()
    assert len(driver.result(first).token_ids) == 20
    assert_nothing_lost(driver.core.stats())


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU takes the next step without being waited for")
def test_first_tokens_are_handed_out_before_a_cpu_takes_the_next_step(tiny: Any) -> None:
    driver = Driver(tiny("llama"))
    runner, order, in_flight = driver.core.runner, [], deque()
    dispatch, collect = runner.dispatch, runner.collect

    def watched_dispatch(plan: StepPlan) -> Any:
        order.append(("dispatch", plan.kind.name))
        in_flight.append(plan.kind.name)
        return dispatch(plan)

    def watched_collect() -> Any:
        order.append(("collect", in_flight.popleft()))
        return collect()

    runner.dispatch, runner.collect = watched_dispatch, watched_collect
    driver.add(PROMPT, 4)
    driver.finish()
    assert order[:5] == [
        ("dispatch", "MIXED"),
        ("collect", "MIXED"),
        ("dispatch", "DECODE"),
        ("dispatch", "DECODE"),  # and these one step ahead
        ("collect", "DECODE"),
    ]


@pytest.mark.parametrize("changes", [{"rope_theta": 0.0}, {"rope_theta": -2.0}])
def test_a_model_that_computes_no_numbers_is_refused_and_answers_nothing(tmp_path: Path, changes: Any) -> None:
    with pytest.raises(ModelCorrupt, match="produces NaN logits"):
        Driver(write_tiny(tmp_path / "m", **changes))


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    weights: Any = dict(mx.load(str(folder / "model.safetensors")))
    norm = weights["model.layers.1.input_layernorm.weight"]
    weights["model.layers.1.input_layernorm.weight"] = mx.where(mx.arange(norm.size) == 3, float("nan"), norm)
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(ModelCorrupt, match=r"weights are damaged.*Download it again"):
        Driver(folder)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}], ids=str)
def test_a_model_whose_logits_become_nan_fails_the_request_and_goes_on_when_they_are_numbers_again(
    tiny: Any, theirs: Any, params: dict[str, Any]
) -> None:
    driver = Driver(tiny("llama"))
    norm = driver.core.loaded.model.model.norm.norm
    weight = norm.weight
    handle = driver.add(tokens_of(9), 20, **params)
    driver.step(4)
    norm.weight = weight * mx.nan
    driver.finish()
    with pytest.raises(NoTokenToChoose, match=r"NaN, or all -inf, after 9 tokens of the prompt and \d+ of the answer"):
        driver.result(handle)
    norm.weight = weight
    assert_nothing_lost(driver.core.stats())
    (again,) = driver.answers([tokens_of(9)], 20, ignore_eos=False)
    assert list(again) == theirs("llama", tokens_of(9), 20)
