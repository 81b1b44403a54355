"""Load one rank's part of a model. At no time is more in memory than the part and the largest tensor of the files.

The files' tensors are lazy arrays. The class's own code makes the part's arrays of them, lazily, too. Then one array
after the other is evaluated, and what it was made of is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from cortexmlx.errors import HostRefused
from cortexmlx.models import weights
from cortexmlx.models.load import load_model
from cortexmlx.models.loaded import LoadedModel
from cortexmlx.models.sharding.ways import PlannedGroup, Way, choose_way, pipelined_part
from cortexmlx.models.weights_hash import WeightsHash
from cortexmlx.types.progress import OnProgress

Group = mx.distributed.Group | PlannedGroup


@dataclass(frozen=True)
class LoadedPart:
    """A rank's part of a model."""

    loaded: LoadedModel
    """Its weights and parameters are those of the part."""
    whole_bytes: int
    """Bytes that the weights of the whole model would take in memory."""
    whole_parameters: int
    """How many numbers those stand for."""


def load_part(
    name: str | Path,
    group: Group,
    ways: Sequence[Way] = tuple(Way),
    *,
    adapter: str | Path | None = None,
    dequantize: bool | None = None,
    on_progress: OnProgress | None = None,
    weights_hash: WeightsHash | None = None,
) -> LoadedPart:
    """Load this rank's part of the model `name`, cut in the first of `ways` that is possible. The other arguments, and
    what is raised, are those of `load_model`. No rank is asked anything.

    A GGUF file is read as a whole before it is cut.

    Raises HostRefused for a model that cannot be cut for so many hosts, before its weights are read, and for an
    adapter.
    """
    if adapter is not None:
        raise HostRefused(f"the adapter {adapter} cannot be cut: fuse it with `mlx_lm.fuse`, and give the fused model")
    whole: list[tuple[int, int]] = []

    def cut(model: Any) -> None:
        whole.append((weights.weight_bytes(model), weights.parameter_count(model)))
        cut_model(model, group=group, ways=ways, name=str(name))

    loaded = load_model(name, dequantize=dequantize, on_progress=on_progress, weights_hash=weights_hash, cut=cut)
    return LoadedPart(loaded, *whole[0])


def cut_model(model: Any, *, group: Group, ways: Sequence[Way], name: str) -> None:
    """Leave this rank's part of a `model` whose weights are lazy, and evaluate it. One rank has all of it."""
    if group.size() > 1:
        if choose_way(model, group.size(), ways, name) is Way.TENSOR:
            model.shard(group)
        else:
            pipelined_part(model).pipeline(group)
    evaluate(model)


def evaluate(model: Any) -> None:
    """Evaluate a model's arrays, one after the other, so that nothing but the arrays themselves stays in memory: a
    slice would hold what it was cut from.
    """
    kept = mx.set_cache_limit(0)
    try:
        for _, module in model.named_modules():
            for name in [name for name, value in module.items() if isinstance(value, mx.array)]:
                module[name] = mx.contiguous(module[name], allow_col_major=True)
                mx.eval(module[name])
    finally:
        mx.set_cache_limit(kept)
    mx.eval(model.parameters())
