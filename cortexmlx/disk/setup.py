"""StoreSetup: opens the store of a model in this process, while threads still hash the files of its weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from cortexmlx.disk.folder import SECRET, absolute
from cortexmlx.disk.hashes import KeptHashes
from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.disk.store import KVStore, open_segment_store, start_store
from cortexmlx.kv.spec import LayerGroup
from cortexmlx.models import LoadedModel
from cortexmlx.models.weights_hash import WeightsHash, hash_of_arrays, hash_of_model


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
        self._description = ""
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
        self._description = describe_model(loaded, tuple(groups), *others)
        if self.weights.ready:
            self.identity = self._identity_of(self.weights.value() or hash_of_model(loaded.model))
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
        self.identity = self._identity_of(self._files)
        return self.identity

    def _identity_of(self, weights: str) -> bytes:
        assert isinstance(self._segments, SegmentStore)
        name = fingerprint(self._description, weights).encode()
        return hashlib.blake2b(name, key=self._segments.secret, digest_size=32).digest()

    def cancel(self) -> None:
        """Stop hashing, and release the model. Safe to call again."""
        self.weights.cancel()


# -- everything that keys and values depend on, except the tokens: the same in every process ---------------------------


def fingerprint(described: str, weights: str) -> str:
    """Return the name of a model with this description (`describe_model`) and this hash of its `weights`.

    The hash is that of the files from which the weights were read, an adapter's too, if memory is known to hold what
    the files say (`WeightsHash`). Otherwise it is that of the arrays (`hash_of_model`).
    """
    return hashlib.sha256(f"{described}\n{weights}".encode()).hexdigest()


def describe_model(loaded: LoadedModel, *others: object) -> str:
    """Return a name for everything of a model in memory except the numbers of its weights. Two models have the same
    name only if all of this is the same:

    - the name, shape and dtype of every array, so conversion and quantization count;
    - the type of every layer with its plain settings, such as an adapter's scale, and arrays that are no parameters,
      such as rotary frequencies;
    - the configuration, the dtype of activations, the device, and the versions of cortexmlx, mlx and mlx-lm, each of
      which rounds in its own way;
    - `others`.
    """
    digest = hashlib.sha256()
    for package in ("cortexmlx", "mlx", "mlx-lm"):
        digest.update(f"{package} {version(package)}\n".encode())
    said = json.dumps(loaded.config, sort_keys=True, default=str)
    digest.update(f"{mx.default_device()}\n{loaded.dtype}\n{said}\n{others!r}\n".encode())
    parameters: list[tuple[str, mx.array]] = sorted(tree_flatten(loaded.model.parameters()), key=lambda each: each[0])
    for name, array in parameters:
        digest.update(f"{name!r} {array.shape} {array.dtype}\n".encode())
    known = {id(array) for _, array in parameters}
    for name, module in sorted(loaded.model.named_modules(), key=lambda each: each[0]):
        settings = {**vars(module), **{f"[{key}]": value for key, value in module.items()}}
        plain = {key: _as_text(value, known) for key, value in settings.items()}
        digest.update(f"{name!r} {_qualified_name(type(module))} {sorted(plain.items())}\n".encode())
    return digest.hexdigest()


def _as_text(value: Any, known: set[int]) -> str:
    """Return a setting as text that is the same in every process. Layers and parameters are described elsewhere."""
    if value is None or isinstance(value, bool | int | float | str | Enum):
        return repr(value)
    if isinstance(value, mx.array):
        return "" if id(value) in known else f"{value.shape} {value.dtype} {hash_of_arrays([value])}"
    if isinstance(value, dict) and not hasattr(value, "parameters"):
        return str(sorted((repr(key), _as_text(each, known)) for key, each in value.items()))
    if isinstance(value, list | tuple):
        return str([_as_text(each, known) for each in value])
    if isinstance(value, set | frozenset):
        return str(sorted(_as_text(each, known) for each in value))
    if dataclasses.is_dataclass(value):
        return _as_text(vars(value), known)
    return _qualified_name(value if hasattr(value, "__qualname__") else type(value))


def _qualified_name(what: Any) -> str:
    """Return the name of a class or a function."""
    return f"{getattr(what, '__module__', '')}.{what.__qualname__}"
