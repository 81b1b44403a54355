"""An engine that says it has adapters, and remembers which one each request names. The model alone answers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any


class Adapted:
    """An engine with adapters of these names."""

    def __init__(self, engine: Any, *names: str) -> None:
        self._engine = engine
        self.adapters: Any = MappingProxyType(dict.fromkeys(names))
        self.asked: list[str | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, *prompt: Any, adapter: str | None = None, **options: Any) -> Any:
        """As the engine's."""
        self.asked.append(adapter)
        return self._engine.submit(*prompt, **options)
