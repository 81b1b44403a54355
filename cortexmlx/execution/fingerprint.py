"""What a model's keys and values depend on beside the tokens, as a name that is the same in every process."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from cortexmlx.models.loaded import LoadedModel

_ROW = 1 << 16
"""Words of 4 bytes that are summed to one."""

_ROWS_AT_ONCE = 128
"""Rows whose products are in memory at once: 32 MiB."""


def fingerprint(loaded: LoadedModel, *others: object) -> str:
    """A name of the model as it is in memory: its weights with an adapter's, whatever file they came from, its
    configuration, what else its layers hold (an adapter's scale is a plain number), and the versions and the device
    that compute with it, for each rounds in its own way. `others` is what else counts.

    Of the weights it takes one number for each 256 KiB, the sum of their words, each times an odd number of its own,
    modulo 2**32: a change of one word always changes it, and others do but once in 2**32 times. It reads all weights
    once: about as long as a step takes.
    """
    digest = hashlib.sha256()
    for package in ("cortexmlx", "mlx", "mlx-lm"):
        digest.update(f"{package} {version(package)}\n".encode())
    said = json.dumps(loaded.config, sort_keys=True, default=str)
    digest.update(f"{mx.default_device()}\n{loaded.dtype}\n{said}\n{others!r}\n".encode())
    factors = mx.array(np.random.default_rng(0).integers(0, 1 << 31, _ROW, np.uint32) * 2 + 1)
    parameters: list[tuple[str, mx.array]] = tree_flatten(loaded.model.parameters())
    for name, array in sorted(parameters, key=lambda each: each[0]):
        digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
        digest.update(_sums(array, factors))
    for name, module in sorted(loaded.model.named_modules(), key=lambda each: each[0]):
        plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        digest.update(f"{name} {type(module).__name__} {sorted(plain.items())}\n".encode())
    return digest.hexdigest()


def _sums(array: mx.array, factors: mx.array) -> bytes:
    words = array.reshape(-1).view(mx.uint8)
    words = mx.pad(words, [(0, -words.size % 4)]).view(mx.uint32)
    whole = words.size // _ROW
    sums = []
    for begin in range(0, whole, _ROWS_AT_ONCE):
        rows = words[begin * _ROW : min(begin + _ROWS_AT_ONCE, whole) * _ROW].reshape(-1, _ROW)
        sums.append(np.array((rows * factors).sum(axis=1)).tobytes())
    rest = words[whole * _ROW :]
    sums.append(np.array((rest * factors[: rest.size]).sum()).tobytes())
    return b"".join(sums)
