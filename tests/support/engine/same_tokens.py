"""What an engine may do on the way of an answer, which must not change it: settings, and prompts to try them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.execution.logits import _SUM_GROUP, uniforms
from support.models.tiny import tokens_of

TEMPERATURE = 0.8
"""Of seeded answers whose luck is looked at."""

LENGTHS = (3, 17, 32, 9, 26, 40, 8, 21)
TOKENS = 28
TIGHT = 112
"""Tokens of an arena in which most of the rows lose their blocks again and again."""

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"prefix_cache": False, "pipeline": False, "max_rows": 1},
    "prefix cache": {"prefix_cache": True},
    "no prefix cache": {"prefix_cache": False},
    "not pipelined": {"pipeline": False},
    "budget 16": {"prefill_budget": 16},
    "budget 64": {"prefill_budget": 64},
    "budget 1024": {"prefill_budget": 1024},
    "tight": {"tokens": TIGHT, "max_rows": 8},
    "tight without prefix cache": {"tokens": TIGHT, "max_rows": 8, "prefix_cache": False},
    "tight, not pipelined": {"tokens": TIGHT, "max_rows": 8, "pipeline": False},
    "tight, budget 16": {"tokens": TIGHT, "max_rows": 8, "prefill_budget": 16},
    "a target out of reach": {"token_target": 1e-9, "prefill_budget": 512},
    "big blocks": {"block_size": 64},
}


def prompts_of() -> list[list[int]]:
    """Some begin alike, so that there is something to share."""
    common = tokens_of(24, seed=77)
    return [[*common[: n // 2], *tokens_of(n - n // 2, seed=n)] for n in LENGTHS]


def luck_gap(
    judge: Callable[[mx.array], mx.array],
    prompt: Sequence[int],
    mine: int,
    theirs: int,
    before: Sequence[int],
    seed: int,
) -> float:
    """How far a seed's numbers for the token after `before` lie from what mlx-lm's logits, in float64, give to the two
    candidates: of the distances to a token's group and to the token within it, the greatest.
    """
    logits = np.array(judge(mx.array([[*prompt, *before]]))[0, -1].astype(mx.float32)).astype(np.float64)
    weights = np.exp((logits - logits.max()) / TEMPERATURE)
    groups = np.append(weights, np.zeros(-len(weights) % _SUM_GROUP)).reshape(-1, _SUM_GROUP)
    for_group, for_token = map(float, uniforms(np.array([seed], np.uint64), np.array([len(before)]))[0])
    gaps = []
    for token in (mine, theirs):
        group, place = divmod(token, _SUM_GROUP)
        gaps += [outside(groups.sum(axis=1), group, for_group), outside(groups[group], place, for_token)]
    return max(gaps)


def outside(weights: Any, index: int, number: float) -> float:
    """How far a number lies outside the part of the unit interval that belongs to a weight."""
    ends = np.cumsum(weights) / weights.sum()
    return max(ends[index] - weights[index] / weights.sum() - number, number - ends[index], 0.0)
