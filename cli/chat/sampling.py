"""Default sampling of a chat: what the model's makers recommend, and how an answer that repeats itself is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cortexmlx.models.resolve import STARTER
from cortexmlx.types.request import Completion, FinishReason
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.stats import ModelInfo

FALLBACK_SAMPLING: dict[str, Any] = {"max_tokens": 2048, "temperature": 0.5, "top_p": 0.95, "repetition_penalty": 1.1}
"""For models without a recommendation. Keeps small models from repeating themselves."""


STARTER_PENALTY = 1.05
"""Of 24 free answers of the starter model, 4 end in a loop within 320 tokens without it, and 1 with it."""

_LOOP_TOKENS = 64
"""Tokens that repeat what stands before them at the end of a loop, at least."""
_LONGEST_PERIOD = 256


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Return whether the tokens end with the same piece, three times or more in a row."""
    for period in range(1, min(_LONGEST_PERIOD, len(tokens) // 3) + 1):
        needed = max(2 * period, _LOOP_TOKENS)
        if len(tokens) >= needed + period and all(tokens[-n] == tokens[-n - period] for n in range(1, needed + 1)):
            return True
    return False


def loop_note(completion: Completion, params: SamplingParams) -> str:
    """Return advice on an answer that repeats itself; empty if it does not. An answer that its model ended is in
    no loop: rows of a table, lines of code and refrains come again, too.
    """
    penalty = max(1.1, round(params.repetition_penalty + 0.05, 2))
    is_open = completion.finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
    return (
        f"it repeats itself: /set repetition_penalty {penalty:g}"
        if is_open and ends_in_loop(completion.token_ids)
        else ""
    )


def default_sampling(info: ModelInfo) -> SamplingParams:
    """Return the sampling that the model's makers recommend, else `FALLBACK_SAMPLING`. The starter model, which is
    small, repeats itself without a penalty.
    """
    recommended: dict[str, Any] = dict(info.sampling)
    if info.name == STARTER:
        recommended["repetition_penalty"] = STARTER_PENALTY
    return SamplingParams(
        **({"max_tokens": FALLBACK_SAMPLING["max_tokens"]} | recommended if recommended else FALLBACK_SAMPLING)
    )


def describe_default_source(info: ModelInfo) -> str:
    """Return, in words, where a model's default sampling comes from."""
    if not info.sampling:
        return "this chat's own: the model's makers recommend none"
    ours = f"; the repetition penalty of {STARTER_PENALTY:g} is ours" if info.name == STARTER else ""
    return f"recommended by the model's makers: {', '.join(f'{name} {value:g}' for name, value in info.sampling)}{ours}"


def carry_over_sampling(params: SamplingParams, old_info: ModelInfo, new_info: ModelInfo) -> SamplingParams:
    """Return a chat's sampling for another model: values that the user did not change become that model's defaults."""
    old_defaults, new_defaults = vars(default_sampling(old_info)), vars(default_sampling(new_info))
    return replace(
        params, **{name: new_defaults[name] for name, value in vars(params).items() if value == old_defaults[name]}
    )
