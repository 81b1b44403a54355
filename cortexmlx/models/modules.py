"""Replacing a function in mlx-lm's loaded model modules, each of which has imported it under its own name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

PACKAGE = "mlx_lm.models."


def replace_function(name: str, replacement: Callable[[Any], Any]) -> None:
    """Put `replacement(original)` in the place of the function `name` in every model module loaded so far. Safe to
    call again: a function with the attribute `replaced` stays.
    """
    made: dict[int, Any] = {}
    for module_name, module in list(sys.modules.items()):
        original = getattr(module, name, None) if module_name.startswith(PACKAGE) else None
        if original is None or hasattr(original, "replaced"):
            continue
        if id(original) not in made:
            made[id(original)] = replacement(original)
            made[id(original)].replaced = original
        setattr(module, name, made[id(original)])
