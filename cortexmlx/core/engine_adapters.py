"""HasAdapters: loads and unloads the adapters of an engine, on any thread but the engine's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cortexmlx.core.arguments import MOST_CHARACTERS, is_name
from cortexmlx.core.worker import Worker
from cortexmlx.errors import InvalidRequest
from cortexmlx.models.adapters.low_rank import AdapterInfo, read_low_rank


class HasAdapters:
    """The part of an engine that is about adapters per request."""

    _worker: Worker

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The adapters that requests can name, by name, as they are now."""
        self._worker.check_process()
        return self._worker.core.adapters.infos

    def _load_adapters(self, folders: Mapping[str, str | Path] | None) -> None:
        """Load the adapters of an engine that opens."""
        for name, path in (folders or {}).items():
            self.load_adapter(name, path)

    def load_adapter(self, name: str, path: str | Path) -> AdapterInfo:
        """Load a LoRA adapter from a folder of mlx-lm or PEFT, so that requests can name it, and return what it is.

        The folder is read on this thread, while requests run. They wait only while the engine copies the numbers. If
        the name stands for another adapter, new requests get this one, and running ones keep theirs. The other one does
        not count among `max_adapters` then, if it has neither another name nor requests; `adapter_memory` must hold
        both for a moment. The same content is in memory once, whatever its names.

        Raises AdapterRefused for what cannot be served per request, with the reason: DoRA, whole layers, embeddings,
        experts, the layer that gives the logits, an adapter of another model, or one beyond `max_adapters`,
        `max_adapter_rank` or `adapter_memory`. Raises ModelNotFound, ModelCorrupt, MemoryRefused, InvalidRequest or
        EngineClosed.
        """
        name = _checked_name(name)
        if not isinstance(path, (str, Path)):
            raise InvalidRequest(f"the adapter {name!r} is {path!r:.80}, but must be the path of a folder")
        self._worker.check_open()
        self._worker.check_elsewhere()
        limits = self._worker.core.adapters.limits
        content = read_low_rank(name, path, limits.rank, limits.bytes)
        return self._worker.ask(lambda core: core.adapters.load(name, content))

    def unload_adapter(self, name: str) -> None:
        """Let no further request name an adapter. Returns at once: requests that have it go on with it, and its memory
        is given back when the last of them has ended. Raises UnknownAdapter, InvalidRequest or EngineClosed.
        """
        name = _checked_name(name)
        self._worker.ask(lambda core: core.adapters.unload(name))


def _checked_name(name: str) -> str:
    """Return an adapter's name as a plain `str`. Raises InvalidRequest if an adapter cannot have this name."""
    if not is_name(name):
        raise InvalidRequest(
            f"an adapter's name is {name!r:.80}, but must be a text of 1 to {MOST_CHARACTERS:,} characters"
        )
    return str.__str__(name)  # as in requests: a subclass, such as an Enum, could say, compare or hash another one
