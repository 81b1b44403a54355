"""The hash of a model's weights: of the files, or of the arrays if a program changed the arrays after loading."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from cortexmlx.disk.hashes import BytesSource, FileHash, HashCache, PieceHash

_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
"""The unsigned integer type of each item size in bytes. NumPy has no bfloat16."""

ArrayLocation = tuple[str, tuple[int, ...], Any, int]


class WeightsHash:
    """The hash of a model's weight files, computed in the background from loading on. Its value is None if a program
    has changed the arrays.

    `load_model` calls `begin` and `hold_arrays`. Whoever receives the model calls `check_arrays` before using the
    model. All calls are made on the thread that loads. Only the callback of `when_ready` runs on another thread.

    `open_cache` opens the hashes that were stored earlier: see `FileHash`.
    """

    def __init__(self, open_cache: Callable[[], HashCache | None]) -> None:
        self._open_cache = open_cache
        self._files: FileHash | None = None
        self._variant = ""
        self._held_arrays: dict[str, tuple[mx.array, ArrayLocation]] | None = None

    def begin(self, files: Sequence[Path], variant: str) -> None:
        """Begin to hash files that are about to be read. `variant` names what else determines the resulting arrays."""
        self._variant = variant
        self._files = FileHash(files, self._open_cache)

    def hold_arrays(self, model: Any) -> None:
        """Keep the model's arrays alive, and remember their memory addresses: writing into one then makes a new array
        elsewhere.
        """
        arrays: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
        self._held_arrays = {name: _locate_array(array) for name, array in arrays}

    def check_arrays(self, model: Any) -> None:
        """Drop the hash if the model's arrays are no longer the held ones, and release the held ones. Called before the
        engine changes arrays, which it does in the same way in every process.
        """
        held_arrays, self._held_arrays = self._held_arrays, None
        arrays: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
        current_locations = {name: _locate_array(array)[1] for name, array in arrays}
        if held_arrays is None or current_locations != {name: location for name, (_, location) in held_arrays.items()}:
            self.cancel()

    def has_held_arrays(self, model: Any) -> bool:
        """Return whether the model's arrays are still the held ones, or have the same bits. mlx-lm's Gemma 3n clips
        some of its weights in every pass, which makes new arrays.
        """
        held_arrays, arrays = self._held_arrays, dict(tree_flatten(model.parameters()))
        return (
            held_arrays is not None
            and held_arrays.keys() == arrays.keys()
            and all(_is_same_array(held_arrays[n], arrays[n]) for n in held_arrays)
        )

    @property
    def ready(self) -> bool:
        """Whether the hash is known, so that `value` returns at once."""
        return self._files is None or self._files.is_ready

    @property
    def hashed_fraction(self) -> float:
        """The fraction of the files' bytes that is hashed so far, from 0 to 1."""
        files = self._files
        return 1.0 if files is None else files.progress

    def value(self) -> str | None:
        """Wait for the hash and return it; None if the files may differ from what is in memory."""
        return self._format_hash(None if self._files is None or self._held_arrays is not None else self._files.digest())

    def when_ready(self, call: Callable[[str | None], None]) -> None:
        """Call `call` with the hash once it is `ready`: now, or later on a hashing thread. The hash is None if the
        files were changed or could not be read. After `cancel` it is not called.
        """
        assert self._files is not None  # else the value is known
        self._files.when_ready(lambda digest: call(self._format_hash(digest)))

    def _format_hash(self, digest: bytes | None) -> str | None:
        """Return the hash as text, combined with what else determines the arrays; None without a digest."""
        return None if digest is None else f"files {digest.hex()} {self._variant}"

    def cancel(self) -> None:
        """Stop hashing and release the model's arrays. The hash is None afterwards. Safe to call again."""
        self._held_arrays = None
        if self._files is not None:
            self._files.cancel()
            self._files = None


def hash_model_arrays(model: Any) -> str:
    """Return the hash of all arrays of a model as they are in memory, in the order of their names."""
    arrays: list[tuple[str, mx.array]] = sorted(tree_flatten(model.parameters()), key=lambda each: each[0])
    return f"arrays {hash_arrays([array for _, array in arrays])}"


def hash_arrays(arrays: Sequence[mx.array]) -> str:
    """Return the hash of the bytes of some arrays, in order."""
    views = [np.asarray(mx.contiguous(array).reshape(-1).view(mx.uint8)).data for array in arrays]
    return hashlib.sha256(b"".join(PieceHash([BytesSource(view) for view in views]).digests())).hexdigest()


def _is_same_array(held_array: tuple[mx.array, ArrayLocation], array: mx.array) -> bool:
    """Return whether an array is at the held one's location in memory, or has the same bits."""
    (old_array, held_location), (new_array, location) = held_array, _locate_array(array)
    return held_location == location or (
        held_location[:2] == location[:2] and bool(mx.array_equal(old_array, new_array))
    )


def _locate_array(array: mx.array) -> tuple[mx.array, ArrayLocation]:
    """Return an alias of the array, which keeps it alive, and its location: dtype, shape, strides and address."""
    alias = array.view(_WORDS[array.itemsize])
    interface = np.asarray(alias).__array_interface__
    return alias, (str(array.dtype), array.shape, interface["strides"], interface["data"][0])
