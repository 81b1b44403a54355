"""Packages that only a developer's install has: the kernel simulator and what is built on it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from cortexmlx.errors import InvalidRequest

DEVELOPER_PARTS = (
    "cortexmlx.bench.studies",
    "cortexmlx.metal.agx",
    "cortexmlx.metal.compare",
    "cortexmlx.metal.cost",
    "cortexmlx.metal.cuda",
    "cortexmlx.metal.legal",
    "cortexmlx.metal.sim",
)
"""A wheel leaves these out. A wheel's modules import them through `developer_part` only."""


def developer_part(module: str, purpose: str) -> ModuleType:
    """Import and return `module`. Raise InvalidRequest, which names `purpose`, where this install lacks it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(DEVELOPER_PARTS):
            raise
        raise InvalidRequest(
            f"{purpose} needs the kernel simulator, which this install does not have: "
            "clone the repository and run `pip install -e '.[dev]'` in it"
        ) from None
