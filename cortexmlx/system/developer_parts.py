"""Packages that only a developer's install has: the kernel simulator and what is built on it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from cortexmlx.errors import InvalidRequest

DEVELOPER_PARTS = ("cortexmlx.bench.studies", "cortexmlx.metal.lab")
"""A wheel leaves these out. Modules of a wheel import them only through `import_developer_part`."""


HOW_TO_GET_THEM = "clone the repository and run `pip install -e '.[dev]'` in it"


def has_developer_parts() -> bool:
    """Return whether this install has all developers' packages. Imports none of them."""
    return all(find_spec(part) is not None for part in DEVELOPER_PARTS)


def import_developer_part(module: str, purpose: str) -> ModuleType:
    """Import and return `module`. Raises InvalidRequest, which names `purpose`, if this install lacks it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(DEVELOPER_PARTS):
            raise
        raise InvalidRequest(
            f"{purpose} needs the kernel simulator, which this install does not have: {HOW_TO_GET_THEM}"
        ) from None
