"""The adapters of an engine without a model: names, and which of them each request had."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cortexmlx.errors import EmbeddingRefused, ModelNotFound, UnknownAdapter
from cortexmlx.models.adapters.low_rank import AdapterInfo


class FakeAdapters:
    """The part of a fake engine that is about adapters, and embeddings, of which it makes none. `adapted` has the
    adapter of each request.
    """

    options: Any

    def embed(self, texts: Any, **options: Any) -> Any:
        """As the engine's, for a model that is none for embeddings."""
        raise EmbeddingRefused("fake is no embedding model")

    @property
    def adapted(self) -> list[str | None]:
        return self.__dict__.setdefault("_adapted", [])

    @property
    def loaded(self) -> dict[str, AdapterInfo]:
        return self.__dict__.setdefault("_loaded", {})

    @property
    def adapters(self) -> dict[str, Any]:
        """What `--adapters` named, and what was loaded since."""
        return dict.fromkeys(self.options.adapters or {}) | self.loaded

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """As the engine's. A folder that is called missing is not there."""
        if "missing" in str(path):
            raise ModelNotFound(f"no adapter folder {path}")
        self.loaded[name] = AdapterInfo(name, 4, (), 8192, "d1", str(path), None)
        return self.loaded[name]

    def note_adapter(self, name: str | None) -> None:
        """Keep which adapter a request has."""
        if name is not None and name not in self.adapters:
            raise UnknownAdapter(f"no adapter {name!r}")
        self.adapted.append(name)


def with_each(check: Callable[..., Any], adapter: Any) -> Callable[..., Any]:
    """`check` with the same adapter for all prompts, or the next one for each."""
    if adapter is None or isinstance(adapter, str):
        return partial(check, adapter=adapter)
    each = iter(adapter)
    return lambda *prompt: check(*prompt, adapter=next(each))
