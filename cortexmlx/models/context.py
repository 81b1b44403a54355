"""Where a configuration describes its language model, and how many tokens that attends to: the one answer for `plan`
and for the engine. No mlx.
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
"""What the makers of models call it, in the order in which they are believed."""

UNSTATED_CONTEXT = 2048
"""Tokens that are assumed where the configuration says nothing."""


def of_language(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Where a config.json says something of its language model: at its top, and in its `text_config`, if it has one."""
    text = config.get("text_config")
    return config, text if isinstance(text, Mapping) else {}


def stated_context(config: Mapping[str, Any]) -> int | None:
    """The context in tokens that a config.json states; None if it states none."""
    for source in of_language(config):
        for key in _KEYS:
            value = source.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
