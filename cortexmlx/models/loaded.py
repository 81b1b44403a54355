"""A model in memory, ready for the runner."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cortexmlx.errors import ModelCorrupt

_HASHED_SUFFIXES = {".gguf", ".jinja", ".json", ".model", ".safetensors", ".tiktoken", ".txt"}
"""The suffixes of the files in a model's folder that are hashed."""

_WHOLE_FILE_BYTES = 32 << 20
"""The size in bytes up to which a whole file is hashed. Of a larger file `_PIECES` samples of `_PIECE` bytes are
hashed.
"""

_PIECES, _PIECE = 32, 4096


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer, loaded on the thread that will run the model, with what is known of both."""

    model: Any = field(repr=False)
    """An instance of one of mlx-lm's model classes, unedited. None if its parts are in the processes of hosts."""
    tokenizer: Any = field(repr=False)
    """mlx-lm's TokenizerWrapper, or a `cortexmlx.models.tokenizers.base.Tokenizer`."""
    config: dict[str, Any] = field(repr=False)
    """The content of config.json, or its equivalent for a GGUF file."""
    name: str
    path: Path
    context_length: int
    """The model's own limit in tokens."""
    weight_bytes: int
    """Bytes that the weights take in memory."""
    parameters: int
    """How many numbers the weights stand for."""
    dtype: str
    """The type of the activations: "float32", "float16" or "bfloat16"."""
    notes: tuple[str, ...] = ()
    """Lines for the user: what was done to the weights, and which settings could not be honoured."""
    adapter: Path | None = None
    """The folder of the adapter that was put into the model; None without one."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The values of `SamplingParams` that the model's makers recommend; empty if they recommend none."""

    @cached_property
    def identity(self) -> str:
        """A hash of the content of the model's files, wherever they are: weights, configuration, tokenizer and
        adapter. Records that were made with a model are valid only for a model with the same identity.

        Of a file above 32 MiB only the size and 32 samples of 4 KiB are hashed. So a change that keeps the size and
        lies between the samples goes unnoticed. The identity is for records of apps and commands. A KV store identifies
        a model by a hash of all its weights (`WeightsHash`), which may be known later, or never.
        """
        digest = hashlib.blake2b(digest_size=16)
        for path in (self.path, self.adapter):
            digest.update(b"%d" % (path is None))
            for file in _files_to_hash(path) if path is not None else ():
                with suppress(OSError):  # the file was removed after the model was loaded
                    _hash_file(digest, file)
        return digest.hexdigest()


def check_logits(loaded: LoadedModel) -> int:
    """Compute one token and return the width of the logits. Raises ModelCorrupt for NaN logits, which sampling would
    turn into the first token of the vocabulary again and again.
    """
    import mlx.core as mx

    logits = loaded.model(mx.zeros((1, 1), mx.int32))
    if mx.any(mx.isnan(logits)).item():
        raise ModelCorrupt(
            f"{loaded.name} produces NaN logits: its weights are damaged, or its configuration is not "
            "theirs. Download it again."
        )
    return int(logits.shape[-1])


def _files_to_hash(path: Path) -> list[Path]:
    """Return the files at a model's or adapter's path that determine its identity, sorted."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in _HASHED_SUFFIXES and file.is_file())


def _hash_file(digest: Any, path: Path) -> None:
    """Add a file to the hash: its size, and all its bytes or samples of them."""
    size = path.stat().st_size
    digest.update(b"\0%d\0" % size)
    with path.open("rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            digest.update(file.read())
            return
        for number in range(_PIECES):
            file.seek((size - _PIECE) * number // (_PIECES - 1))
            digest.update(file.read(_PIECE))
