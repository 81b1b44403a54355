"""A whole engine whose layers have ALiBi's slopes: prefill, decode windows, tails and batches, on both backends.

No model of mlx-lm has slopes, so a tiny one's runner adds them. The judge is that model under mlx-lm, with the
slopes as a mask over all tokens in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.llama
import numpy as np
import pytest

from cortexmlx.attention.selfcheck_problems import alibi_slopes
from cortexmlx.metal.lab import sim
from support.engine.core_driver import Driver
from support.engine.judge import NOISE
from support.models.tiny import tokens_of

SLOPES = mx.array(alibi_slopes(4))
PROMPTS = [tokens_of(n, seed=n) for n in (5, 41, 17)]


def with_slopes(queries: mx.array, keys: mx.array, values: mx.array, *_: Any, scale: float, **__: Any) -> mx.array:
    """mlx-lm's attention of a whole sequence, with the biases in the place of its mask."""
    position = mx.arange(keys.shape[2])
    distance = position[None, :] - position[:, None]
    bias = mx.where(distance > 0, -mx.inf, SLOPES[:, None, None] * distance)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=bias)


@pytest.mark.parametrize("backend", ["reference", pytest.param("sim", marks=pytest.mark.lab)])
def test_its_tokens_are_those_of_the_model_with_biases_for_a_mask(
    backend: str, tiny: Callable[[str], Path], judged: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with sim.options(checked=False):
        driver = Driver(tiny("llama"), attention=backend)
        runner: Any = driver.core.runner
        attend = runner._attend
        runner._attend = lambda queries, kv, params: attend(queries, kv, replace(params, slopes=SLOPES))
        answers = driver.answers(PROMPTS, 20)
    assert driver.core.backend.notes() == ()
    monkeypatch.setattr(mlx_lm.models.llama, "scaled_dot_product_attention", with_slopes)
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        logits = np.array(judged("llama")[0](mx.array([[*prompt, *tokens[:-1]]]))[0, len(prompt) - 1 :])
        chosen = logits[np.arange(len(tokens)), tokens]
        assert (logits.max(axis=1) - chosen).max() < NOISE
