"""What a model type has to show: the engine's logits and tokens are those that mlx-lm computes on the same weights.

mlx-lm, the judge, runs each sequence alone on its own caches: for the batch the prompt at once, then token by token;
for all else prompt and answer at once. Each check runs a tiny model through the engine's core in another way, and
raises `Wrong` if a single logit or token is not the judge's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from cortexmlx.mlx_lm.package import import_mlx_lm_utils
from cortexmlx.models import load_model
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.logits import Recorder, mlx_lms_logits
from support.models.tiny import tokens_of
from tests.architectures.configurations import lengths, weight_settings
from tests.architectures.weights import write_model

Logits = npt.NDArray[np.float32]

TOLERANCE = 1e-4
"""How far a logit may be from mlx-lm's, in float32: of order 10 they are, and round by 1e-6."""

STEPS = 12
"""Tokens of an answer."""

BLOCK = 8
"""Tokens of a block."""


class Wrong(AssertionError):
    """What was computed is not what mlx-lm computes."""


@dataclass(frozen=True)
class Subject:
    """A tiny model on disk, and mlx-lm's own of the same weights."""

    name: str
    folder: Path
    judge: Any

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts around the edges of blocks and windows, and up to three windows long."""
        return [tokens_of(n, seed=n) for n in lengths(self.name)]

    def driver(self, tokens: int | None = None, **config: Any) -> Driver:
        """A core with room for `tokens`: by default for all prompts and their answers twice."""
        if tokens is None:
            tokens = 2 * sum(len(p) + 3 * STEPS for p in self.prompts)
        return Driver(
            self.folder,
            tokens=tokens,
            block_size=BLOCK,
            **{"max_rows": len(self.prompts), "prefill_budget": 12} | config,
        )

    def judged(self, prompt: Sequence[int], answer: Sequence[int], *, steps: bool) -> Logits:
        """mlx-lm's logits before each token of `answer`, `[len(answer), vocab]`: with `steps` from the prompt at once
        and then token by token, else from prompt and answer at once.
        """
        if steps:
            return mlx_lms_logits(self.judge, prompt, answer)
        text = mx.array([[*prompt, *answer[:-1]]])
        logits = self.judge(text, cache=make_prompt_cache(self.judge))
        return np.array(logits[0, len(prompt) - 1 :].astype(mx.float32))


def subject(name: str, folder: Path) -> Subject:
    """Write a model of this type to `folder` and load it with mlx-lm. Raises what mlx-lm raises if it cannot be built,
    or cannot compute a step here.
    """
    write_model(folder, name, **weight_settings(name))
    model, _ = import_mlx_lm_utils().load_model(folder)
    try:
        _step(model)
    except RuntimeError:
        # Packed weights that only a Metal kernel reads: the same class with the weights that they stand for.
        model = load_model(folder).model
        _step(model)
    return Subject(name, folder, model)


def _step(model: Any) -> None:
    mx.eval(model(mx.array([[1]]), cache=make_prompt_cache(model)))


def compare(
    subject: Subject, prompt: Sequence[int], answer: Sequence[int], mine: Logits | None = None, what: str = ""
) -> float:
    """The largest difference of a logit to mlx-lm's along a greedy answer; without logits, how far the answer's tokens
    are from mlx-lm's best. Raises Wrong beyond the tolerance.
    """
    theirs = subject.judged(prompt, answer, steps=mine is not None)
    if np.isnan(theirs).any():
        raise ValueError("mlx-lm's logits are not numbers")
    below = theirs.max(axis=-1) - theirs[np.arange(len(answer)), list(answer)]
    worst = float(below.max())
    at = int(below.argmax())
    if worst > 2 * TOLERANCE:
        raise Wrong(
            f"{what}prompt of {len(prompt)}: token {at} of the answer is {worst:.2g} below mlx-lm's best in its logits"
        )
    if mine is None:
        return worst
    with np.errstate(invalid="ignore"):
        differences = np.where(mine == theirs, 0.0, np.abs(mine - theirs)).max(axis=-1)
    worst, at = float(differences.max()), int(differences.argmax())
    if not worst <= TOLERANCE:
        raise Wrong(f"{what}prompt of {len(prompt)}: the logits of token {at} are {worst:.2g} from mlx-lm's")
    return worst


def ragged(subject: Subject, **config: Any) -> float:
    """Sequences of different lengths that join while others decode, their prompts in pieces: the largest difference of
    a logit.
    """
    driver = subject.driver(**config)
    recorders, handles = [], []
    for prompt in subject.prompts:
        recorders.append(Recorder())
        handles.append(driver.add(prompt, STEPS, logits_processors=[recorders[-1]]))
        driver.step(2)
    driver.finish()
    answers = [driver.result(handle).token_ids for handle in handles]
    if len({token for answer in answers for token in answer}) < 2 * len(answers):
        raise ValueError("the answers repeat themselves, and would show little")
    worst = max(
        compare(subject, prompt, answer, recorder.of(prompt, answer))
        for prompt, answer, recorder in zip(subject.prompts, answers, recorders, strict=True)
    )
    assert_nothing_lost(driver.core.stats())
    return worst


def reuse(subject: Subject) -> int:
    """A prompt again, its next turn, and another that begins like it: how many tokens of them were not computed again.
    Then the same without a prefix cache.
    """
    first = subject.prompts[-1]
    driver = subject.driver()
    (answer,) = driver.answers([first], STEPS)
    compare(subject, first, answer, what="first time: ")
    turn = [*first, *answer, *tokens_of(5, seed=3)]
    again = [first, turn, [*first[: len(first) * 2 // 3], *tokens_of(6, seed=4)]]
    cached = 0
    for prompt in again:
        done = driver.result_of(prompt, STEPS)
        cached += done.usage.cached_tokens
        compare(subject, prompt, done.token_ids, what=f"{done.usage.cached_tokens} tokens from the cache, ")
    plain = subject.driver(prefix_cache=False)
    for prompt, mine in zip(again, plain.answers(again, STEPS), strict=True):
        compare(subject, prompt, mine, what="without a prefix cache, ")
    assert_nothing_lost(driver.core.stats())
    return cached


def forked(subject: Subject) -> int:
    """Two answers to each prompt, drawn by chance, have the log-probabilities that mlx-lm gives: how many differ."""
    driver = subject.driver()
    handles = [driver.add(p, STEPS, seed=i, n=2, temperature=1.0, logprobs=0) for i, p in enumerate(subject.prompts)]
    driver.finish()
    different = 0
    for prompt, handle in zip(subject.prompts, handles, strict=True):
        first = driver.result(handle)
        different += first.token_ids != first.others[0].token_ids
        for answer in (first, *first.others):
            logits = subject.judged(prompt, answer.token_ids, steps=False).astype(np.float64)
            logits -= logits.max(axis=-1, keepdims=True)
            chosen = logits[np.arange(len(logits)), list(answer.token_ids)]
            theirs = chosen - np.log(np.exp(logits).sum(axis=-1))
            assert answer.logprobs is not None
            worst = float(np.abs(theirs - [token.logprob for token in answer.logprobs]).max())
            if not worst <= 2 * TOLERANCE:
                raise Wrong(
                    f"answer {answer.index} of prompt of {len(prompt)}: a log-probability differs by {worst:.2g}"
                )
    assert_nothing_lost(driver.core.stats())
    return different


def preempted(subject: Subject) -> int:
    """All prompts at once in an arena too small for them: how often a row lost its blocks."""
    longest = max(len(p) for p in subject.prompts)
    driver = subject.driver(tokens=longest + 2 * STEPS + BLOCK)
    answers = driver.answers(subject.prompts, 2 * STEPS)
    for prompt, answer in zip(subject.prompts, answers, strict=True):
        compare(subject, prompt, answer)
    stats = driver.core.stats()
    assert_nothing_lost(stats)
    return stats.preemptions


CHECKS: dict[str, Callable[[Subject], float]] = {
    "batch": ragged,
    "prefix": reuse,
    "fork": forked,
    "preempt": preempted,
}
"""What is checked of every type, by its name in the table. A figure of 0: nothing of the kind took place."""

SIMULATED = ("llama", "gpt_oss", "mimo_v2_flash", "gemma2", "llama4", "gemma3n", "deepseek_v3", "qwen3_next")
"""Types that are also run on the Metal kernels in the simulator: windows, sinks, values narrower than keys, soft caps,
chunks, layers that read what others keep, latents, states.
"""
