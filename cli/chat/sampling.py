"""Default sampling of a chat: what the model's makers recommend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.stats import ModelInfo

FALLBACK_SAMPLING: dict[str, Any] = {"max_tokens": 2048, "temperature": 0.5, "top_p": 0.95, "repetition_penalty": 1.1}
"""For models without a recommendation. Keeps small models from repeating themselves."""


def default_sampling(info: ModelInfo) -> SamplingParams:
    """Return the sampling that the model's makers recommend, else `FALLBACK_SAMPLING`."""
    recommended: dict[str, Any] = dict(info.sampling)
    return SamplingParams(
        **({"max_tokens": FALLBACK_SAMPLING["max_tokens"]} | recommended if recommended else FALLBACK_SAMPLING)
    )


def describe_default_source(info: ModelInfo) -> str:
    """Return, in words, where a model's default sampling comes from."""
    if not info.sampling:
        return "this chat's own: the model's makers recommend none"
    return f"recommended by the model's makers: {', '.join(f'{name} {value:g}' for name, value in info.sampling)}"


def carry_over_sampling(params: SamplingParams, old_info: ModelInfo, new_info: ModelInfo) -> SamplingParams:
    """Return a chat's sampling for another model: values that the user did not change become that model's defaults."""
    old_defaults, new_defaults = vars(default_sampling(old_info)), vars(default_sampling(new_info))
    return replace(
        params, **{name: new_defaults[name] for name, value in vars(params).items() if value == old_defaults[name]}
    )
