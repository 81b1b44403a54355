"""A tiny configuration of our own for every model type that mlx-lm can load: `configurations.json`, made whole here.

The file has the numbers that all share, and for each type what is its own. A type's layers are as few as have every
kind that it knows, its windows and chunks are short, and its numbers of heads, experts and ranks are all different
from 1 where the type allows it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cortexmlx.mlx_lm.package import import_mlx_lm_utils

_FILE = json.loads(Path(__file__).with_name("configurations.json").read_text())
_LAYER = {"S": "sliding_attention", "F": "full_attention"}

LENGTHS = (1, 8, 10, 19, 27)
"""Tokens of the prompts that run together: one token; a block of 8; just over the window of 9; over two and at three
of them.
"""

TYPES: tuple[str, ...] = tuple(_FILE["types"])
"""Every model type that has a module of its own in mlx-lm."""


def remapped() -> dict[str, str]:
    """The names that mlx-lm takes for another type's: name to type."""
    return dict(import_mlx_lm_utils().MODEL_REMAPPING)


def configuration(name: str) -> dict[str, Any]:
    """What config.json of a tiny model of this type, or of a name that is taken for it, holds: for a type of a newer
    mlx-lm only the numbers that all share.
    """
    own = _FILE["types"].get(remapped().get(name, name) if name not in TYPES else name, {})
    return {**_whole(own), "model_type": name}


def weight_settings(name: str) -> dict[str, Any]:
    """Arguments of `write_model` for a type whose answers would repeat themselves with those of the others, or whose
    numbers would lose much more than float32 rounds.
    """
    settings: dict[str, Any] = _FILE["weights"].get(remapped().get(name, name), {})
    return settings


def lengths(name: str) -> Sequence[int]:
    """Lengths of the prompts that show what this type does."""
    return _FILE["lengths"].get(remapped().get(name, name), LENGTHS)


def _whole(own: dict[str, Any]) -> dict[str, Any]:
    whole = _FILE["shared"] | own
    kinds = whole.get("layer_types")
    if isinstance(kinds, str):
        whole["layer_types"] = [_LAYER[kind] for kind in kinds]
    text = whole.get("text_config")
    if isinstance(text, str):
        whole["text_config"] = configuration(text)
    elif text is not None:
        whole["text_config"] = _whole(text)
    return whole


def modules() -> tuple[list[str], list[str]]:
    """The modules of mlx-lm's models: those that define a model type, and those that only help others."""
    folder = Path(importlib.import_module("mlx_lm.models").__path__[0])
    types, helpers = [], []
    for path in sorted(folder.glob("*.py")):
        if path.stem != "__init__":
            (types if "class ModelArgs" in path.read_text() else helpers).append(path.stem)
    return types, helpers
