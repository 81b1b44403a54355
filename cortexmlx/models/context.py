"""The part of a configuration that describes the language model, and the context length that it states. No mlx.

Both `plan` and the engine use it, so they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "model_max_length",
    "seq_length",
    "n_ctx",
)
"""The names that makers of models give to the context length. The first one that is present counts."""

_UNSERVED_WINDOWS = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""Types whose layers all have the stated window in transformers, and none in mlx-lm."""

UNSTATED_CONTEXT = 2048
"""The context in tokens that is assumed if the configuration states none."""


def language_configs(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the two parts of a config.json that can describe the language model: its top level, and its `text_config`
    (empty if there is none).
    """
    text = config.get("text_config")
    return config, text if isinstance(text, Mapping) else {}


def stated_context(config: Mapping[str, Any]) -> int | None:
    """Return the context in tokens that a config.json states; None if it states none."""
    for source in language_configs(config):
        for key in _KEYS:
            value = source.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def unserved_window(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens, itself included, a token sees at most in transformers, where mlx-lm's class lets it see
    all before it; None: the two agree.
    """
    for source in language_configs(config):
        value = source.get("sliding_window")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            used = source.get("use_sliding_window", source.get("model_type") in _UNSERVED_WINDOWS)
            return value if used is True else None
    return None


def context_of(config: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return the context in tokens that a config.json states, or the one that is assumed, with a note on that."""
    context = stated_context(config)
    if context is not None:
        return context, ()
    note = f"the model does not state its context length: {UNSTATED_CONTEXT} tokens are assumed"
    return UNSTATED_CONTEXT, (note,)
