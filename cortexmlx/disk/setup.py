"""StoreSetup: opens the store of a model in this process, while threads still hash the files of its weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from cortexmlx.disk.fingerprint import described, fingerprint
from cortexmlx.disk.folder import SECRET, absolute
from cortexmlx.disk.hashes import KeptHashes
from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.disk.store import KVStore, open_segment_store, start_store
from cortexmlx.kv.spec import LayerGroup
from cortexmlx.models import LoadedModel
from cortexmlx.models.weights_hash import WeightsHash, hash_of_model


class StoreSetup:
    """Opens the store in a folder for a model in this process, in three steps. `weights` hashes the weights from before
    they are loaded. `start` starts the store's threads. Until the hash is known, the model has no `identity`:
    `when_known` says that it can be had, and `settle` returns it. `cancel` ends the hashing.
    """

    def __init__(self, path: str | Path, limit: int) -> None:
        self.weights = WeightsHash(self._hashes)
        self.identity: bytes | None = None
        """Names everything that keys and values depend on, except the tokens. No other folder has the same."""
        self._path = absolute(path)
        self._limit = limit
        self._described = ""
        self._files: str | None = None

    @cached_property
    def _segments(self) -> SegmentStore | str:
        return open_segment_store(self._path, self._limit)

    def _hashes(self) -> KeptHashes | None:
        """Return the hashes kept in the folder. The folder is not created for them, since a model that is only loaded
        may store nothing.
        """
        there = "_segments" in self.__dict__ or os.path.exists(self._path / SECRET)
        segments = self._segments if there else None
        return KeptHashes(segments.path, segments.secret) if isinstance(segments, SegmentStore) else None

    def start(
        self,
        loaded: LoadedModel,
        groups: Sequence[LayerGroup],
        others: tuple[object, ...],
        on_room: Callable[[], None] = lambda: None,
    ) -> KVStore | str:
        """Start the store's threads and return the store. If there can be none, a warning is logged; return why.

        Keys and values depend on the model, on what its layers keep (`groups`) and on `others`. Nobody waits for
        threads that hash files. `on_room`: see `KVStore`.
        """
        if isinstance(self._segments, str):
            self.cancel()
            return self._segments
        self._described = described(loaded, tuple(groups), *others)
        if self.weights.ready:
            self.identity = self._named(self.weights.value() or hash_of_model(loaded.model))
        store = start_store(self._segments, loaded.name, on_room)
        if isinstance(store, str) or self.identity is not None:
            self.cancel()
        return store

    @property
    def share(self) -> float:
        """Which part of the weights is hashed, from 0 to 1."""
        return self.weights.share

    def when_known(self, model: Any, call: Callable[[], None]) -> None:
        """Have `call` called, perhaps on another thread, when `settle` would wait for nothing. There must be no
        `identity` yet. The engine may not change the model's arrays after this call.
        """
        self.weights.hold(model)

        def ready(files: str | None) -> None:
            self._files = files
            call()

        self.weights.when_ready(ready)

    def settle(self, model: Any) -> bytes | str:
        """Return the identity, or why there is none, once `when_known` has called. Call it on the engine's thread."""
        same = self.weights.still_held(model)
        self.cancel()
        if self._files is None:
            return "the model's files were changed, or could not be read, while they were hashed"
        if not same:
            return "the model's weights were changed in memory while their files were hashed"
        self.identity = self._named(self._files)
        return self.identity

    def _named(self, weights: str) -> bytes:
        assert isinstance(self._segments, SegmentStore)
        name = fingerprint(self._described, weights).encode()
        return hashlib.blake2b(name, key=self._segments.secret, digest_size=32).digest()

    def cancel(self) -> None:
        """Stop hashing, and release the model. Safe to call again."""
        self.weights.cancel()
