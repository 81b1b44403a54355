"""A fingerprint of everything that keys and values depend on, except the tokens. It is the same in every process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from enum import Enum
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from cortexmlx.models.loaded import LoadedModel
from cortexmlx.models.weights_hash import hash_of_arrays


def fingerprint(described: str, weights: str) -> str:
    """Return the name of a model with this description (`described`) and this hash of its `weights`.

    The hash is that of the files from which the weights were read, an adapter's too, if memory is known to hold what
    the files say (`WeightsHash`). Otherwise it is that of the arrays (`hash_of_model`).
    """
    return hashlib.sha256(f"{described}\n{weights}".encode()).hexdigest()


def described(loaded: LoadedModel, *others: object) -> str:
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
        plain = {key: _plain(value, known) for key, value in settings.items()}
        digest.update(f"{name!r} {_name(type(module))} {sorted(plain.items())}\n".encode())
    return digest.hexdigest()


def _plain(value: Any, known: set[int]) -> str:
    """Return a setting as text that is the same in every process. Layers and parameters are described elsewhere."""
    if value is None or isinstance(value, bool | int | float | str | Enum):
        return repr(value)
    if isinstance(value, mx.array):
        return "" if id(value) in known else f"{value.shape} {value.dtype} {hash_of_arrays([value])}"
    if isinstance(value, dict) and not hasattr(value, "parameters"):
        return str(sorted((repr(key), _plain(each, known)) for key, each in value.items()))
    if isinstance(value, list | tuple):
        return str([_plain(each, known) for each in value])
    if isinstance(value, set | frozenset):
        return str(sorted(_plain(each, known) for each in value))
    if dataclasses.is_dataclass(value):
        return _plain(vars(value), known)
    return _name(value if hasattr(value, "__qualname__") else type(value))


def _name(what: Any) -> str:
    """Return the name of a class or a function."""
    return f"{getattr(what, '__module__', '')}.{what.__qualname__}"
