"""The logits behind an engine's answers, and mlx-lm's for the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from support.engine.core_driver import Driver


class Recorder:
    """A logits processor that changes nothing and keeps the logits `[vocab]` before each token, by tokens so far."""

    def __init__(self) -> None:
        self._seen: dict[int, mx.array] = {}

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self._seen[tokens.size] = logits[0]
        return logits

    def of(self, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
        """Those of an answer, `[len(answer), vocab]`."""
        return np.array(mx.stack([self._seen[len(prompt) + i] for i in range(len(answer))]))


def answers_with_logits(
    driver: Driver, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """For each prompt, all of which join while others decode, the answer and its logits `[max_tokens, vocab]`. The
    tokens are drawn: greedy ones of random weights may repeat themselves, and would show little.
    """
    recorders, handles = [Recorder() for _ in prompts], []
    for prompt, recorder in zip(prompts, recorders, strict=True):
        seed = len(handles)
        handles.append(driver.add(prompt, max_tokens, seed, temperature=1.0, logits_processors=[recorder]))
        driver.step(2)
    driver.finish()
    answers = [driver.result(handle).token_ids for handle in handles]
    return [(a, r.of(p, a)) for p, a, r in zip(prompts, answers, recorders, strict=True)]


def mlx_lms_logits(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """mlx-lm's logits before each token of `answer`, on its own caches: the prompt at once, then token by token."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    logits = [model(mx.array([list(prompt)]), cache=cache)[0, -1]]
    mx.eval(logits)
    for token in answer[:-1]:
        logits.append(model(mx.array([[token]]), cache=cache)[0, -1])
        mx.eval(logits[-1])  # a step's keys may be a view of a buffer that the next step writes
    return np.array(mx.stack(logits).astype(mx.float32))
