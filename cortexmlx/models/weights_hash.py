"""The hash of a model's weights: of the files, or of the arrays if a program changed the arrays after loading."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from cortexmlx.disk.hashes import BytesSource, FileHash, KeptHashes, PieceHash

_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
"""The unsigned integer type of each item size in bytes. NumPy has no bfloat16."""

ArrayLocation = tuple[str, tuple[int, ...], Any, int]


class WeightsHash:
    """The hash of one model's weights.

    `load_model` calls `begin` and `hold`. Whoever receives the model calls `check` before using the model. All calls
    are made on the thread that loads. Only the callback of `when_ready` runs on another thread.

    `kept` opens the hashes that were stored earlier: see `FileHash`.
    """

    def __init__(self, kept: Callable[[], KeptHashes | None]) -> None:
        self._kept = kept
        self._files: FileHash | None = None
        self._how = ""
        self._held: dict[str, tuple[mx.array, ArrayLocation]] | None = None

    def begin(self, files: Sequence[Path], how: str) -> None:
        """Begin to hash files that are about to be read. `how` names what else determines the numbers that are made
        from them.
        """
        self._how = how
        self._files = FileHash(files, self._kept)

    def hold(self, model: Any) -> None:
        """Remember where the model's arrays are in memory. Each array is kept alive, so writing into it makes a new
        array elsewhere.
        """
        arrays: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
        self._held = {name: _held(array) for name, array in arrays}

    def check(self, model: Any) -> None:
        """Check that the model's arrays are still the held ones, and release them. If they are not, there is no hash.
        What the engine makes of the arrays after loading is the same in every process.
        """
        held, self._held = self._held, None
        arrays: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
        now = {name: _held(array)[1] for name, array in arrays}
        if held is None or now != {name: place for name, (_, place) in held.items()}:
            self.cancel()

    def still_held(self, model: Any) -> bool:
        """Return whether the model's arrays are the held ones, or have the same bits. mlx-lm's Gemma 3n clips some of
        its weights in every pass, which makes new arrays.
        """
        held, arrays = self._held, dict(tree_flatten(model.parameters()))
        return held is not None and held.keys() == arrays.keys() and all(_same(held[n], arrays[n]) for n in held)

    @property
    def ready(self) -> bool:
        """Whether `value` returns without waiting for a thread."""
        return self._files is None or self._files.ready

    @property
    def share(self) -> float:
        """The fraction of the files' bytes that is hashed, from 0 to 1."""
        files = self._files
        return 1.0 if files is None else files.share

    def value(self) -> str | None:
        """Wait for the hash and return it; None if the files may differ from what is in memory."""
        return self._named(None if self._files is None or self._held is not None else self._files.digest())

    def when_ready(self, call: Callable[[str | None], None]) -> None:
        """Call `call` with the hash once it is `ready`: at once if it is ready now, otherwise on a hashing thread. The
        hash is None if the files were changed or could not be read. After `cancel` it is not called.
        """
        assert self._files is not None  # else the value is known
        self._files.when_ready(lambda digest: call(self._named(digest)))

    def _named(self, digest: bytes | None) -> str | None:
        return None if digest is None else f"files {digest.hex()} {self._how}"

    def cancel(self) -> None:
        """Stop hashing and release the model. The value is None afterwards. Safe to call again."""
        self._held = None
        if self._files is not None:
            self._files.cancel()
            self._files = None


def hash_of_model(model: Any) -> str:
    """Wait for the hash of a model's arrays as they are in memory, in the order of their names, and return it."""
    arrays: list[tuple[str, mx.array]] = sorted(tree_flatten(model.parameters()), key=lambda each: each[0])
    return f"arrays {hash_of_arrays([array for _, array in arrays])}"


def hash_of_arrays(arrays: Sequence[mx.array]) -> str:
    """Return the hash of the bytes of some arrays, in order."""
    views = [np.asarray(mx.contiguous(array).reshape(-1).view(mx.uint8)).data for array in arrays]
    return hashlib.sha256(b"".join(PieceHash([BytesSource(view) for view in views]).digests())).hexdigest()


def _same(held: tuple[mx.array, ArrayLocation], array: mx.array) -> bool:
    (before, held_location), (now, location) = held, _held(array)
    return held_location == location or (held_location[:2] == location[:2] and bool(mx.array_equal(before, now)))


def _held(array: mx.array) -> tuple[mx.array, ArrayLocation]:
    """Return a second array on the same bytes, and their location: dtype, shape, strides and address."""
    words = array.view(_WORDS[array.itemsize])
    about = np.asarray(words).__array_interface__
    return words, (str(array.dtype), array.shape, about["strides"], about["data"][0])
