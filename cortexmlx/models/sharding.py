"""How a model's class can be cut into parts, asked of the class itself before any weight is read.

A model whose weights are lazy is copied: the modules, not what their arrays hold. mlx-lm's own code cuts the copy for a
group that does not exist. What cannot be divided raises there, or is rounded down, which shows in the counts that the
class keeps (heads, channels).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.pipeline import PipelineMixin

from cortexmlx.errors import HostRefused
from cortexmlx.models import weights
from cortexmlx.models.load import load_model
from cortexmlx.models.loaded import LoadedModel
from cortexmlx.models.messages import one_line
from cortexmlx.models.weights_hash import WeightsHash
from cortexmlx.types.progress import OnProgress

MOST_HOSTS = 16
"""How many hosts are tried to say which numbers would do."""


_HEADS = dict.fromkeys(("n_heads", "num_attention_heads", "num_heads"), "attention heads") | dict.fromkeys(
    ("n_kv_heads", "num_key_value_heads", "num_kv_heads"), "key-value heads"
)
"""The names that classes give to their numbers of heads."""


class Way(Enum):
    """A way to cut a model."""

    TENSOR = "tensor"
    """Each rank has a part of every layer's weights, and some of its heads: the class's own `shard`."""
    PIPELINE = "pipeline"
    """Each rank has some of the layers, rank 0 the last ones: the class's own `pipeline`."""


@dataclass(frozen=True)
class PlannedGroup:
    """A group that does not exist, seen from one of its ranks. mlx-lm cuts by these two numbers."""

    of_rank: int
    hosts: int

    def rank(self) -> int:
        """Return this rank."""
        return self.of_rank

    def size(self) -> int:
        """Return how many ranks there are."""
        return self.hosts


def choose_way(model: Any, hosts: int, ways: Sequence[Way], name: str) -> Way:
    """Return the first of `ways` by which `model` can be cut for so many hosts. Nothing is evaluated, and the model is
    not changed. Raises HostRefused, with what forbids it and the numbers of hosts that would do.
    """
    why = []
    for way in ways:
        obstacle = obstacle_to(model, hosts, way)
        if obstacle is None:
            return way
        why.append(obstacle)
    fit = hosts_that_fit(model, ways)
    then = f"{_listed(fit)} hosts would do" if fit else "run it on one host"
    raise HostRefused(f"{name} cannot be cut for {hosts} hosts: {'; '.join(why)}. {then[0].upper()}{then[1:]}.")


def hosts_that_fit(model: Any, ways: Sequence[Way] = tuple(Way)) -> list[int]:
    """Return the numbers of hosts, up to `MOST_HOSTS`, for which the model can be cut in one of these ways."""
    numbers = range(2, MOST_HOSTS + 1)
    return [hosts for hosts in numbers if any(obstacle_to(model, hosts, way) is None for way in ways)]


def obstacle_to(model: Any, hosts: int, way: Way) -> str | None:
    """Return what forbids to cut the model in this way; None if nothing does."""
    return _uneven(model, hosts) if way is Way.TENSOR else _too_few_layers(model, hosts)


def pipelined_part(model: Any) -> Any:
    """Return the module that has the layers, if it can be cut between them; else None."""
    return next((module for _, module in model.named_modules() if isinstance(module, PipelineMixin)), None)


def kind_of(model: Any) -> str:
    """Return the model's type, as mlx-lm calls it."""
    return str(getattr(model, "model_type", type(model).__module__.rpartition(".")[2]))


def _too_few_layers(model: Any, hosts: int) -> str | None:
    part = pipelined_part(model)
    if part is None:
        return f"mlx-lm has no pipeline for {kind_of(model)!r}"
    if len(part.layers) < hosts:
        return f"a pipeline needs a layer for each host, and there are {len(part.layers)}"
    twin = _twin(model)
    try:
        pipelined_part(twin).pipeline(PlannedGroup(0, hosts))
    except Exception as error:  # mlx-lm raises anything for what cannot be divided
        return f"its layers cannot be divided by {hosts} ({one_line(error)})"
    gone = len(part.layers) - len(pipelined_part(twin).pipeline_layers)
    if len(make_prompt_cache(twin)) != len(make_prompt_cache(model)) - gone:
        return f"mlx-lm's pipeline is not for {kind_of(model)!r}, whose caches it does not divide"
    return None


def _uneven(model: Any, hosts: int) -> str | None:
    """Return what the class's `shard` does not divide evenly."""
    if not hasattr(model, "shard"):
        return f"mlx-lm does not cut the tensors of {kind_of(model)!r}"
    twin = _twin(model)
    before = _counts(twin)
    try:
        twin.shard(PlannedGroup(0, hosts))
    except Exception as error:  # mlx-lm and mlx raise anything for what cannot be divided
        failed: Exception | None = error
    else:
        failed = None
    after = _counts(twin)
    uneven = dict.fromkeys(
        f"{count} {_words(place)}"
        for place, count in before.items()
        if not _divided(count, after.get(place, count), hosts) or (failed and place[1] in _HEADS and count % hosts)
    )
    if uneven:
        return f"{' and '.join(uneven)} cannot be divided by {hosts}"
    return None if failed is None else f"its tensors cannot be divided by {hosts} ({one_line(failed)})"


def _divided(count: int, now: int, hosts: int) -> bool:
    """Return whether a count was left alone, or divided evenly; or whether each rank has one of fewer than there are
    ranks, which the class repeats.
    """
    repeated = now == 1 and 0 < count < hosts and hosts % count == 0
    return now == count or now * hosts == count or repeated


def _twin(model: Any) -> Any:
    """Return a copy of the model's modules. Its arrays are lazy aliases: mlx-lm changes some in place."""
    return copy.deepcopy(model, {id(array): mx.stop_gradient(array) for _, array in tree_flatten(model.parameters())})


def _counts(model: Any) -> dict[tuple[str, str], int]:
    """Return the whole numbers that the model's modules keep, by the path and the name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def _words(place: tuple[str, str]) -> str:
    path, name = place
    return _HEADS.get(name) or f"({path.rpartition('.')[2]}.{name})"


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


# Load one rank's part of a model. At no time is more in memory than the part and the largest tensor of the files.
#
# The files' tensors are lazy arrays. The class's own code makes the part's arrays of them, lazily, too. Then one array
# after the other is evaluated, and what it was made of is dropped.


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
