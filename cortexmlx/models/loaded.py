"""A model in memory, ready for the runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer, loaded on the thread that will run it.

    `model` is one of mlx-lm's own modules, unedited; `tokenizer` is mlx-lm's TokenizerWrapper or a
    `cortexmlx.models.tokenizers.base.Tokenizer`; `config` is what config.json says, or its equivalent for a GGUF file.
    `weight_bytes` is what the weights take in memory, `parameters` how many numbers they stand for, `context_length`
    the model's own limit in tokens, `dtype` the type of activations ("float32", "float16", "bfloat16"). `notes` tell
    the user, one line each, what was done to the weights or could not be honoured. `adapter` is the folder of the
    adapter that is in the model, if there is one.
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

    @property
    def identity(self) -> str:
        """What keys and values depend on beside the tokens: those of the model with an adapter are others."""
        return str(self.path) if self.adapter is None else f"{self.path}\0{self.adapter.resolve()}"
