"""OpenEngines: models whose engines a program has opened. They stay the program's to close."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cortexmlx.server.loading.lease import Lease

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


class OpenEngines:
    """One engine, which has the name of its model, or several by their names."""

    def __init__(self, engines: Engine | Mapping[str, Engine]) -> None:
        self._given = engines
        self._context: dict[str, int] = {}

    @cached_property
    def _engines(self) -> Mapping[str, Engine]:
        given = self._given
        return dict(given) if isinstance(given, Mapping) else {public_name(given.info.name): given}

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(self._engines)

    def context_length(self, name: str) -> int:
        """Return how many tokens a prompt and its answer may have."""
        return self._context.setdefault(name, self._engines[name].longest_request)

    def adapters(self, name: str) -> tuple[str, ...]:
        """Return the names of the adapters that are loaded now."""
        return tuple(self._engines[name].adapters)

    def is_loaded(self, name: str) -> bool:
        """Return True."""
        return True

    def loaded(self) -> list[tuple[str, Engine]]:
        """Return all engines by name."""
        return list(self._engines.items())

    def is_ready(self, name: str) -> bool:
        """Return True."""
        return True

    def ask(self, name: str, settled: Callable[[], None]) -> _Settled:
        """Return a wait that is settled."""
        return _Settled(Lease(self._engines[name], name))


class _Settled:
    settled = True

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def lease(self) -> Lease:
        return self._lease

    def leave(self) -> None:
        """Nothing ends: the engine is the program's."""


def public_name(model: str | Path) -> str:
    """Return what clients call a model: of a folder or a file the last part of its path, since the rest is nobody's
    business.
    """
    path = Path(os.path.expanduser(model))
    if path.is_absolute() or os.path.exists(path):  # which is False for what no path can be
        return Path(os.path.abspath(path)).name.removesuffix(".gguf") or "model"
    return str(model)
