"""Default sampling of a chat: as the model's makers recommend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.stats import ModelInfo

SAMPLING: dict[str, Any] = {"max_tokens": 2048, "temperature": 0.5, "top_p": 0.95, "repetition_penalty": 1.1}
"""For models without a recommendation. Keeps small models from repeating themselves."""


def usual(info: ModelInfo) -> SamplingParams:
    """Return the sampling that the model's makers recommend, else `SAMPLING`."""
    recommended: dict[str, Any] = dict(info.sampling)
    return SamplingParams(**({"max_tokens": SAMPLING["max_tokens"]} | recommended if recommended else SAMPLING))


def source(info: ModelInfo) -> str:
    """Return, in words, where the usual sampling of a model comes from."""
    if not info.sampling:
        return "this chat's own: the model's makers recommend none"
    return f"recommended by the model's makers: {', '.join(f'{name} {value:g}' for name, value in info.sampling)}"


def moved(params: SamplingParams, before: ModelInfo, after: ModelInfo) -> SamplingParams:
    """Return the sampling of a chat that continues with another model. Values that the user has not changed become the
    new model's.
    """
    old, new = vars(usual(before)), vars(usual(after))
    return replace(params, **{name: new[name] for name, value in vars(params).items() if value == old[name]})
