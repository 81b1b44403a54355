"""Replaces functions and methods in mlx-lm's model modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

PACKAGE = "mlx_lm.models."


def replace_function(module: str, name: str, replacement: Callable[[Any], Any]) -> None:
    """Replace the function `name` of mlx-lm's model module `module` by `replacement(original)`, in every model module
    loaded so far that has it under that name. Safe to call again.
    """
    current = getattr(import_module(PACKAGE + module), name)
    original = getattr(current, "replaced", current)
    patched = current
    if current is original:
        patched = replacement(original)
        patched.replaced = original
    for loaded_name, loaded in list(sys.modules.items()):
        if loaded_name.startswith(PACKAGE) and getattr(loaded, name, None) is original:
            setattr(loaded, name, patched)


def replace_method(owner: type, name: str, replacement: Callable[[Any], Any]) -> None:
    """Replace the method `name` of a class by `replacement(original)`. Safe to call again."""
    original = getattr(owner, name)
    if not hasattr(original, "replaced"):
        patched = replacement(original)
        patched.replaced = original
        setattr(owner, name, patched)
