"""The models of trials: one of each kind that speculates in a way of its own, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.engine.judge import greedy
from support.models.quantized_models import wide
from support.models.sighted import SightedJudge
from support.models.tiny import write_tiny


@dataclass(frozen=True)
class Kind:
    """A model, and how its keys and values are kept."""

    name: str
    folder: Path
    kv_bits: int | None = None
    adapter: Path | None = None
    """The adapter that its judge has."""


NAMES = (
    "llama",
    "windowed llama",
    "gemma3_text",
    "llama4",
    "gpt_oss",
    "deepseek_v3",
    "lfm2",
    "qwen3_5",
    "mamba",
    "mamba2",
    "rwkv7",
    "baichuan_m1",
    "kimi_linear",
    "8 bits",
    "4 bits",
    "4 bits in windows",
)
"""Everything, windows beside it, wider ones, chunks, sinks, latents; recurrent layers beside attention and alone, of
convolutions, delta nets, both kinds of mamba, RWKV, and in attention itself; quantized keys and values.
"""

_QUANTIZED = {"8 bits": ("llama", 8), "4 bits": ("llama", 4), "4 bits in windows": ("windowed llama", 4)}


def kinds(root: Path) -> Callable[[str], Kind]:
    """A function from one of `NAMES` to that kind, whose models are written to `root`."""

    @cache
    def kind(name: str) -> Kind:
        if name in _QUANTIZED:
            model, bits = _QUANTIZED[name]
            return Kind(name, wide(root / "wide", model), bits)
        folder = root / name.replace(" ", "-")
        return Kind(name, folder if folder.exists() else write_tiny(folder, name))

    return kind


@cache
def judge(folder: Path, adapter: Path | None = None) -> Any:
    """mlx-lm's own model of a folder, with its own layers for an adapter. It sees images if the folder has a tower."""
    import mlx_lm

    model = mlx_lm.load(str(folder), adapter_path=None if adapter is None else str(adapter))[0]
    return SightedJudge(model, folder) if (folder / "preprocessor_config.json").exists() else model


def alone(folder: Path, adapter: Path | None, prompt: list[int], tokens: int) -> list[int]:
    """mlx-lm's greedy tokens, with its own layers for the adapter."""
    import mlx_lm

    return greedy(judge(folder, adapter), mlx_lm.load(str(folder))[1], prompt, tokens)
