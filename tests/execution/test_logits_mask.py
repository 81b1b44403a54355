"""Masks of allowed tokens beside NumPy, and choosing apart from the forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given

from cortexmlx.execution.boundary import TokenMask
from cortexmlx.execution.logits import NO_TOKEN, mask_logits
from cortexmlx.execution.sampling import BatchSampler
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import StepKind, StepPlan
from cortexmlx.types.sampling_params import SamplingParams
from support.engine.core_driver import Driver
from support.engine.sampling_tools import row
from support.models.tiny import VOCAB, tokens_of


def mask_of(rows: list[int], allowed: np.ndarray) -> TokenMask:
    """`allowed [k, V]` bool as bits, the last word filled up with ones, which stand for no token."""
    width = -(-allowed.shape[1] // 32) * 32
    bits = np.pad(allowed, ((0, 0), (0, width - allowed.shape[1])), constant_values=True)
    packed = np.packbits(bits, axis=1, bitorder="little").view("<u4")
    return TokenMask(np.array(rows, np.int32), packed)


@given(st.data(), st.integers(1, 5), st.integers(1, 100), st.sampled_from(["float32", "float16", "bfloat16"]))
def test_only_what_is_not_allowed_changes(data: st.DataObject, rows: int, vocab: int, dtype: str) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1)))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    allowed = random.random((len(chosen), vocab)) < data.draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))
    logits = mx.array(random.normal(size=(rows, vocab)).astype(np.float32)).astype(getattr(mx, dtype))
    if data.draw(st.booleans()):
        logits[chosen[0], 0] = mx.nan
    before = np.array(logits.astype(mx.float32))
    wanted = before.copy()
    wanted[chosen] = np.where(allowed, wanted[chosen], -np.inf)
    after = mask_logits(logits, mask_of(chosen, allowed))
    assert after.dtype == logits.dtype
    np.testing.assert_array_equal(np.array(after.astype(mx.float32)), wanted)
    np.testing.assert_array_equal(np.array(logits.astype(mx.float32)), before)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=1.0, top_k=3, logprobs=1),
        SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01, logprobs=1),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={3: 5.0}, logprobs=1),
        SamplingParams(temperature=0.0, logits_processors=(lambda tokens, logits: -logits,), logprobs=1),
    ],
)
def test_a_masked_row_chooses_an_allowed_token_and_its_neighbours_what_they_would(params: SamplingParams) -> None:
    random = np.random.default_rng(4)
    logits = mx.array(random.normal(size=(4, 97)).astype(np.float32))
    rows = [replace(row(params, seed, prompt=[1, 2], output=[3]), processed_for=JobId(seed)) for seed in range(4)]
    functions = {JobId(seed): params.logits_processors for seed in range(4)}
    free = BatchSampler(rows, 97, functions)(logits, np.full(4, 1))
    allowed = random.random((2, 97)) < 0.1
    sampled = BatchSampler(rows, 97, functions)(logits, np.full(4, 1), mask=mask_of([1, 3], allowed))
    tokens = np.array(sampled.tokens)
    assert allowed[0, tokens[1]] and allowed[1, tokens[3]]
    assert tokens[[0, 2]].tolist() == np.array(free.tokens)[[0, 2]].tolist()
    log_total = np.log(np.exp(np.array(logits, np.float64)).sum(axis=1))
    wanted = np.array(logits, np.float64)[range(4), tokens] - log_total
    np.testing.assert_allclose(np.array(sampled.logprobs), wanted, atol=1e-5, err_msg="they are the model's own")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_nothing_leaves_no_token(temperature: float) -> None:
    logits = mx.array(np.random.default_rng(1).normal(size=(2, 40)).astype(np.float32))
    sampler = BatchSampler([row(SamplingParams(temperature=temperature))] * 2, 40)
    tokens = sampler(logits, np.zeros(2, np.int32), mask=mask_of([1], np.zeros((1, 40), bool))).tokens.tolist()
    assert tokens[0] != NO_TOKEN and tokens[1] == NO_TOKEN


# -- choosing apart from the forward pass ------------------------------------------------------------------------------

PROMPTS = [tokens_of(n, seed=n) for n in (21, 9, 34)]


def answers(driver: Driver, masked_row: int | None = None, **params: Any) -> list[tuple[int, ...]]:
    """Answers of steps that are dispatched in two calls. One row may choose even tokens only."""
    runner = driver.core.runner

    def apart(plan: StepPlan) -> Any:
        refused = runner.forward(plan)
        mask = None
        if masked_row is not None and plan.kind is not StepKind.FLUSH:
            rows = [i for i, segment in enumerate(plan.logit_segments) if segment.job == masked_row]
            if rows:
                mask = mask_of(rows, np.arange(VOCAB)[None] % 2 == 0)
        return refused or runner.choose(mask)

    runner.dispatch = apart  # type: ignore[method-assign]
    handles = [driver.add(prompt, 20, seed=i, **params) for i, prompt in enumerate(PROMPTS)]
    driver.finish()
    return [driver.result(handle).token_ids for handle in handles]


@pytest.mark.parametrize(
    ("name", "params"),
    [("llama", {"temperature": 0.9, "logprobs": 2}), ("windowed llama", {"repetition_penalty": 1.2}), ("lfm2", {})],
)
def test_choosing_apart_gives_the_same_tokens(name: str, params: Any, tiny: Any) -> None:
    driver = Driver(tiny(name))
    handles = [driver.add(prompt, 20, seed=i, **params) for i, prompt in enumerate(PROMPTS)]
    driver.finish()
    assert answers(Driver(tiny(name)), **params) == [driver.result(handle).token_ids for handle in handles]


def test_a_mask_binds_its_row_alone(tiny: Any) -> None:
    free, bound = answers(Driver(tiny("llama"))), answers(Driver(tiny("llama")), masked_row=1)
    assert bound[0] == free[0] and bound[2] == free[2]
    assert all(token % 2 == 0 for token in bound[1]) and any(token % 2 for token in free[1])
