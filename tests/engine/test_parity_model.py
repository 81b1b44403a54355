"""Parity on real weights: greedy tokens of the starter model equal mlx-lm's, whoever else is in the batch.

`pytest -m "model and not slow" tests/engine/test_parity_model.py` runs a part; all 24 prompts in every configuration:
`pytest -m model tests/engine/test_parity_model.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from support.engine.core_driver import assert_nothing_lost
from support.engine.judge import NOISE, disagreement, greedy
from support.patience import PATIENCE
from support.prompts import LENGTHS, prompt_of

pytestmark = pytest.mark.model

TOKENS = 48
A_FEW = (0, 4, 9, 14)
"""Prompts of the quick part: 1, 8, 32 and 65 tokens, with `FEW` tokens of an answer: each crosses a block's border."""
FEW = 33


@pytest.fixture(scope="module")
def starter() -> Iterator[Any]:
    from cortexmlx.models import load_model

    yield load_model("smollm2")


@pytest.fixture(scope="module")
def theirs(starter: Any) -> Callable[..., list[int]]:
    """mlx-lm's tokens for the prompt number i."""

    @cache
    def answer(i: int, tokens: int = TOKENS) -> list[int]:
        return greedy(starter.model, starter.tokenizer, prompt_of(starter.tokenizer, LENGTHS[i], i), tokens)

    return answer


def differences(
    starter: Any, which: Sequence[int], answers: Sequence[Sequence[int]], theirs: Any, tokens: int = TOKENS
) -> list[str]:
    """What is not equal and not a proven tie."""
    found = []
    for i, mine in zip(which, answers, strict=True):
        prompt = prompt_of(starter.tokenizer, LENGTHS[i], i)
        gap = disagreement(starter.model, prompt, mine, theirs(i, tokens))
        if gap is not None and gap[1] >= NOISE:
            found.append(f"prompt of {LENGTHS[i]} tokens: differs at token {gap[0]}, the logits by {gap[1]:.2g}")
    return found


def joining(engine: Engine, starter: Any, which: Sequence[int], tokens: int = TOKENS) -> list[Sequence[int]]:
    """Ask one after the other, each when the one before has got a few tokens: everybody joins at another step."""
    params = SamplingParams(max_tokens=tokens)
    handles = []
    for i in which:
        handles.append(engine.submit(prompt_of(starter.tokenizer, LENGTHS[i], i), params))
        events = iter(handles[-1])
        for _ in range(i % 5 if len(handles) % engine.stats().max_rows else 0):
            next(events)
    answers = [h.result(PATIENCE).token_ids for h in handles]
    assert_nothing_lost(engine.stats())
    return answers


@pytest.mark.parametrize(("max_rows", "block_size"), [(3, 32), pytest.param(8, 8, marks=pytest.mark.slow)])
def test_a_few_prompts_together(starter: Any, theirs: Any, max_rows: int, block_size: int) -> None:
    with Engine("smollm2", kv_memory="300MB", max_rows=max_rows, block_size=block_size) as engine:
        assert differences(starter, A_FEW, joining(engine, starter, A_FEW, FEW), theirs, FEW) == []


@pytest.mark.slow
def test_every_prompt_alone(starter: Any, theirs: Any) -> None:
    every = range(len(LENGTHS))
    with Engine("smollm2", kv_memory="300MB", prefix_cache=False) as engine:
        params = SamplingParams(max_tokens=TOKENS)
        answers = [engine.generate(prompt_of(starter.tokenizer, LENGTHS[i], i), params).token_ids for i in every]
    assert differences(starter, every, answers, theirs) == []


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("max_rows", [3, 8])
def test_every_prompt_together(starter: Any, theirs: Any, max_rows: int, block_size: int) -> None:
    every = range(len(LENGTHS))
    with Engine("smollm2", kv_memory="300MB", max_rows=max_rows, block_size=block_size) as engine:
        assert differences(starter, every, joining(engine, starter, every), theirs) == []
