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

from cortexmlx.disk.folder import SECRET, absolute_path
from cortexmlx.disk.hashes import HashCache
from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.disk.store import KVStore, make_segment_store, start_store
from cortexmlx.disk.tier import model_identity
from cortexmlx.kv.spec import LayerGroup
from cortexmlx.models import LoadedModel
from cortexmlx.models.weights_hash import WeightsHash, hash_arrays, hash_model_arrays
from cortexmlx.types.arrays import dtype_name


class StoreSetup:
    """Opens the KV store of a model while threads still hash its weights. `weights` begins to hash them before they are
    loaded. `start` starts the store's threads. The model has no `identity` until the hash is known: `when_hashed` waits
    for that, and then `resolve_identity` returns the identity. `cancel` ends the hashing.
    """

    def __init__(self, path: str | Path, limit: int) -> None:
        self.weights = WeightsHash(self._hash_cache)
        self.identity: bytes | None = None
        """Names everything that keys and values depend on, except the tokens. No other folder has the same."""
        self.fingerprint = ""
        """The same for the same model in every folder; empty until the weights are hashed."""
        self.parts: dict[str, str] = {}
        """What the fingerprint is made of, to say in what two differ."""
        self.model = ""
        """The model's name, for people."""
        self._path = absolute_path(path)
        self._limit = limit
        self._description = ""
        self._files: str | None = None

    @cached_property
    def _segments(self) -> SegmentStore | str:
        """The segment store of the folder, opened at first use, or why there is none."""
        return make_segment_store(self._path, self._limit)

    def _hash_cache(self) -> HashCache | None:
        """Return the folder's file hash cache; None without a folder: loading a model alone must not create one."""
        folder_exists = "_segments" in self.__dict__ or os.path.exists(self._path / SECRET)
        segments = self._segments if folder_exists else None
        return HashCache(segments.path, segments.secret) if isinstance(segments, SegmentStore) else None

    def start(
        self,
        loaded: LoadedModel,
        groups: Sequence[LayerGroup],
        identity_parts: tuple[object, ...],
        on_room: Callable[[], None] = lambda: None,
    ) -> KVStore | str:
        """Start the store's threads and return the store. If that fails, log a warning and return why.

        Keys and values depend on the model, on what its layers keep (`groups`) and on `identity_parts`. Nobody waits
        for threads that hash files. `on_room`: see `KVStore`.
        """
        if isinstance(self._segments, str):
            self.cancel()
            return self._segments
        self.model, kv_bits = loaded.name, [group.spec.kv_bits for group in groups]
        self._description = hash_all_but_weights(loaded, tuple(groups), *identity_parts)
        self.parts = {
            "keys and values": "; ".join(f"{bits} bits" if bits else dtype_name(loaded.dtype) for bits in kv_bits),
            **dict(zip(("block size", "attention"), map(str, identity_parts), strict=True)),
            "device": str(mx.default_device()),
            "versions": _versions(),
            "model": hashlib.sha256(json.dumps(loaded.config, sort_keys=True, default=str).encode()).hexdigest(),
        }
        if self.weights.ready:
            self.identity = self._make_identity(self.weights.value() or hash_model_arrays(loaded.model))
        store = start_store(self._segments, loaded.name, on_room)
        if isinstance(store, str) or self.identity is not None:
            self.cancel()
        return store

    @property
    def progress(self) -> float:
        """The share of the weights that is hashed so far, from 0 to 1."""
        return self.weights.hashed_fraction

    def when_hashed(self, model: Any, call: Callable[[], None]) -> None:
        """Call `call`, perhaps on another thread, as soon as the weights are hashed. There must be no `identity` yet.
        The engine may not change the model's arrays after this call.
        """
        self.weights.hold_arrays(model)

        def on_hashed(files: str | None) -> None:
            self._files = files
            call()

        self.weights.when_ready(on_hashed)

    def resolve_identity(self, model: Any) -> bytes | str:
        """Return the model's identity, or why it has none, after `when_hashed` called. Only on the engine's thread."""
        is_unchanged = self.weights.has_held_arrays(model)
        self.cancel()
        if self._files is None:
            return "the model's files were changed, or could not be read, while they were hashed"
        if not is_unchanged:
            return "the model's weights were changed in memory while their files were hashed"
        self.identity = self._make_identity(self._files)
        return self.identity

    def _make_identity(self, weights: str) -> bytes:
        """Return the identity of the model with this hash of its weights, keyed with the folder's secret."""
        assert isinstance(self._segments, SegmentStore)
        self.fingerprint = fingerprint(self._description, weights)
        self.parts["weights"] = weights
        return model_identity(self.fingerprint, self._segments.secret)

    def cancel(self) -> None:
        """Stop hashing, and release the model. Safe to call again."""
        self.weights.cancel()


# -- everything that keys and values depend on, except the tokens: the same in every process ---------------------------


def fingerprint(description: str, weights: str) -> str:
    """Return the hash that names a model, from its `description` (`hash_all_but_weights`) and its `weights`' hash.

    The hash is that of the files from which the weights were read, if memory is known to hold what they say
    (`WeightsHash`), else of the arrays (`hash_model_arrays`). An adapter that was opened with the model counts, too;
    those of requests are in `Job.block_salt`.
    """
    return hashlib.sha256(f"{description}\n{weights}".encode()).hexdigest()


def hash_all_but_weights(loaded: LoadedModel, *identity_parts: object) -> str:
    """Return a hash of everything about a model in memory except the values of its weights. Two models have the same
    hash only if all of this is the same:

    - the name, shape and dtype of every array, so conversion and quantization count;
    - the type of every layer with its plain settings, such as an adapter's scale, and arrays that are no parameters,
      such as rotary frequencies;
    - the configuration, the dtype of activations, the device, and the versions of cortexmlx, mlx and mlx-lm, each of
      which rounds in its own way;
    - `identity_parts`.
    """
    digest = hashlib.sha256(_versions().encode())
    config_json = json.dumps(loaded.config, sort_keys=True, default=str)
    digest.update(f"{mx.default_device()}\n{loaded.dtype}\n{config_json}\n{identity_parts!r}\n".encode())
    parameters: list[tuple[str, mx.array]] = sorted(tree_flatten(loaded.model.parameters()), key=lambda each: each[0])
    for name, array in parameters:
        digest.update(f"{name!r} {array.shape} {array.dtype}\n".encode())
    parameter_ids = {id(array) for _, array in parameters}
    for name, module in sorted(loaded.model.named_modules(), key=lambda each: each[0]):
        settings = {**vars(module), **{f"[{key}]": value for key, value in module.items()}}
        setting_texts = {key: _setting_text(value, parameter_ids) for key, value in settings.items()}
        digest.update(f"{name!r} {_qualified_name(type(module))} {sorted(setting_texts.items())}\n".encode())
    return digest.hexdigest()


def _versions() -> str:
    """Return the versions of the packages that decide how numbers are computed and rounded."""
    return ", ".join(f"{package} {version(package)}" for package in ("cortexmlx", "mlx", "mlx-lm"))


def _setting_text(value: Any, parameter_ids: set[int]) -> str:
    """Return a layer's setting as text, the same in every process; without parameters, which the caller hashes."""
    if value is None or isinstance(value, bool | int | float | str | Enum):
        return repr(value)
    if isinstance(value, mx.array):
        return "" if id(value) in parameter_ids else f"{value.shape} {value.dtype} {hash_arrays([value])}"
    if isinstance(value, dict) and not hasattr(value, "parameters"):
        return str(sorted((repr(key), _setting_text(each, parameter_ids)) for key, each in value.items()))
    if isinstance(value, list | tuple):
        return str([_setting_text(each, parameter_ids) for each in value])
    if isinstance(value, set | frozenset):
        return str(sorted(_setting_text(each, parameter_ids) for each in value))
    if dataclasses.is_dataclass(value):
        return _setting_text(vars(value), parameter_ids)
    return _qualified_name(value if hasattr(value, "__qualname__") else type(value))


def _qualified_name(class_or_function: Any) -> str:
    """Return the name of a class or a function."""
    return f"{getattr(class_or_function, '__module__', '')}.{class_or_function.__qualname__}"
