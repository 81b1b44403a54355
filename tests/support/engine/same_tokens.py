"""What an engine may do on the way of an answer, which must not change it: settings, and prompts to try them on."""

from __future__ import annotations

from typing import Any

from support.effort import examples
from support.models.tiny import tokens_of

LENGTHS = (3, 17, 32, 9, 26, 40, 8, 21)
TOKENS = examples(28, few=20)
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
