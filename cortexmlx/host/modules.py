"""Replacing a function in mlx-lm's loaded model modules, each of which has imported it under its own name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

PACKAGE = "mlx_lm.models."


def replace_function(home: str, name: str, replacement: Callable[[Any], Any]) -> None:
    """Put `replacement(original)` in the place of `original`, the function `name` of the model module `home`, in every
    model module loaded so far that has it under that name. Safe to call again.
    """
    current = getattr(import_module(PACKAGE + home), name)
    original = getattr(current, "replaced", current)
    made = current
    if current is original:
        made = replacement(original)
        made.replaced = original
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(PACKAGE) and getattr(module, name, None) is original:
            setattr(module, name, made)
