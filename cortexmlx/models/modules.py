"""Replacing a function in mlx-lm's loaded model modules, each of which has imported it under its own name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

PACKAGE = "mlx_lm.models."


def replace_function(name: str, replacement: Callable[[Any], Any], only: str | None = None) -> None:
    """Put `replacement(original)` in the place of the function `name` in every model module loaded so far; with `only`,
    where it is that module's function, and not another of the same name. Safe to call again: a function with the
    attribute `replaced` stays.
    """
    wanted = None
    if only is not None:
        wanted = getattr(sys.modules.get(PACKAGE + only), name, None)
        wanted = getattr(wanted, "replaced", wanted)
    made: dict[int, Any] = {}
    for module_name, module in list(sys.modules.items()):
        original = getattr(module, name, None) if module_name.startswith(PACKAGE) else None
        if original is None or hasattr(original, "replaced") or (only is not None and original is not wanted):
            continue
        if id(original) not in made:
            made[id(original)] = replacement(original)
            made[id(original)].replaced = original
        setattr(module, name, made[id(original)])
