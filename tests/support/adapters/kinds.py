"""The models of trials with adapters, each with five adapters of its own, as mlx-lm's training writes them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cortexmlx.errors import AdapterRefused
from cortexmlx.models.adapters.low_rank import LowRankAdapter, read_low_rank_adapter
from support.engine.core_driver import Driver
from support.models.adapters import write_adapter
from support.models.quantized_models import wide
from support.models.tiny import write_tiny
from support.speculation.kinds import Kind

RANKS = (4, 6, 16, 33, 64)
"""The first two share tables, and so do the last two: their tables have the same rank, and the same targets."""
FAMILIES = (0, 0, 1, 2, 2)
"""Which set of targets each adapter has."""
_RECURRENT = ("lfm2", "mamba", "qwen3_next")
_FOUR_BITS = "llama of 4 bits"
NAMES = (
    "llama",
    "windowed llama",
    "gemma3_text",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    *_RECURRENT,
    _FOUR_BITS,
    "8 bits",
)
"""Everything, windows beside it, experts, latents; recurrent layers beside attention and alone; quantized weights;
quantized keys and values.
"""


@dataclass(frozen=True)
class Adapted:
    """A kind of model, and the folders of its adapters."""

    kind: Kind
    adapters: tuple[Path, ...]


def adapted_kinds(root: Path) -> Callable[[str], Adapted]:
    """A function from one of `NAMES` to that kind, whose files are written to `root`."""

    @cache
    def of(name: str) -> Adapted:
        folder = root / name.replace(" ", "-")
        bits = None
        if name == "8 bits":
            folder, bits = wide(root / "wide", "llama"), 8
        elif name == _FOUR_BITS:
            write_four_bits(folder)
        else:
            write_tiny(folder, name)
        kind = Kind(name, folder, bits)
        return Adapted(kind, adapters_of(root / f"adapters of {name}", folder))

    return of


def write_four_bits(folder: Path) -> Path:
    """A llama whose weights are quantized."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    write_tiny(folder, "llama", hidden_size=64, intermediate_size=64, head_dim=16)
    model, config = load_model(folder)
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    written = config | {"quantization": {"group_size": 32, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def content(folder: Path) -> LowRankAdapter:
    """The numbers of an adapter."""
    return read_low_rank_adapter(folder.name, folder, 1 << 10, 1 << 30)


def adapters_of(root: Path, model: Path) -> tuple[Path, ...]:
    """Adapters of random sets of all layers that may have one."""
    dice = random.Random(root.name)
    keys = _keys(root / "every", model)
    families = [tuple(sorted(dice.sample(keys, dice.randint(1, len(keys))))) for _ in range(3)]
    families[1] = tuple(keys)
    folders = []
    for number, (rank, family) in enumerate(zip(RANKS, FAMILIES, strict=True)):
        scale = 8.0 / rank
        folder = root / str(number)
        folders.append(
            write_adapter(folder, model, keys=families[family], num_layers=9, scale=scale, rank=rank, seed=number)
        )
    return tuple(folders)


def _keys(root: Path, model: Path) -> list[str]:
    """The linear layers of a model's layers that may have an adapter per request, by their names in a layer."""
    import mlx.nn as nn
    from mlx_lm.utils import load_model

    network: Any = load_model(model, lazy=True)[0]
    linear = (nn.Linear, nn.QuantizedLinear)
    keys = sorted({k for layer in network.layers for k, m in layer.named_modules() if isinstance(m, linear)})
    driver = Driver(model)
    tables = driver.core.model.adapter_set()
    fit = []
    for number, key in enumerate(keys):
        adapter = content(write_adapter(root / str(number), model, keys=(key,), num_layers=9))
        try:
            tables.check(key, adapter)
        except AdapterRefused:
            continue
        fit.append(key)
    driver.core.release()
    return fit
