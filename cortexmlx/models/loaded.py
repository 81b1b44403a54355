"""A model in memory, ready for the runner."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

_READ = {".gguf", ".jinja", ".json", ".model", ".safetensors", ".tiktoken", ".txt"}
"""How the files of a model's folder end."""

_WHOLE = 32 << 20
"""Bytes up to which a file is looked at as a whole; of a larger one `_PIECES` of `_PIECE` bytes all over it."""

_PIECES, _PIECE = 32, 4096


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer, loaded on the thread that will run it.

    `model` is one of mlx-lm's own modules, unedited; `tokenizer` is mlx-lm's TokenizerWrapper or a
    `cortexmlx.models.tokenizers.base.Tokenizer`; `config` is what config.json says, or its equivalent for a GGUF file.
    `weight_bytes` is what the weights take in memory, `parameters` how many numbers they stand for, `context_length`
    the model's own limit in tokens, `dtype` the type of activations ("float32", "float16", "bfloat16"). `notes` tell
    the user, one line each, what was done to the weights or could not be honoured. `adapter` is the folder of the
    adapter that is in the model, if there is one. `sampling` is what the model's makers recommend, as values of
    `SamplingParams`; empty if they recommend nothing.
    """

    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    name: str
    path: Path
    context_length: int
    weight_bytes: int
    parameters: int
    dtype: str
    notes: tuple[str, ...] = ()
    adapter: Path | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def identity(self) -> str:
        """A name of what it was read from, weights, configuration, tokenizer and adapter, wherever that lies: what is
        kept of it is of no use to a model with another.

        Of a file above 32 MiB it reads the size and 32 samples of 4 KiB. So it does not notice a change of such a file
        that keeps its size and lies between the samples. It is for records of apps and commands; a KV store knows a
        model by a hash of all its weights (`WeightsHash`), which may be known only later, or not at all.
        """
        digest = hashlib.blake2b(digest_size=16)
        for path in (self.path, self.adapter):
            digest.update(b"%d" % (path is None))
            for file in _files(path) if path is not None else ():
                with suppress(OSError):  # it is gone since the model was loaded
                    _add(digest, file)
        return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in _READ and file.is_file())


def _add(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    digest.update(b"\0%d\0" % size)
    with path.open("rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
            return
        for number in range(_PIECES):
            file.seek((size - _PIECE) * number // (_PIECES - 1))
            digest.update(file.read(_PIECE))
