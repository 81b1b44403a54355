"""Replace functions and methods in mlx-lm's model modules."""

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


def replace_method(owner: type, name: str, replacement: Callable[[Any], Any]) -> None:
    """Put `replacement(original)` in the place of the method `name` of a class. Safe to call again."""
    original = getattr(owner, name)
    if not hasattr(original, "replaced"):
        made = replacement(original)
        made.replaced = original
        setattr(owner, name, made)
