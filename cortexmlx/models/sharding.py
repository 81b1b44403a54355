"""Cut a model into parts for several hosts: find out how its class can be cut, before any weight is read, and load one
part.

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


class CutMode(Enum):
    """How a model is cut over the ranks: every layer's tensors, or between the layers (a pipeline)."""

    TENSOR = "tensor"
    """Each rank has a part of every layer's weights, and some of its heads: the class's own `shard`."""
    PIPELINE = "pipeline"
    """Each rank has some of the layers, rank 0 the last ones: the class's own `pipeline`."""


@dataclass(frozen=True)
class StandInGroup:
    """A stand-in for MLX's group of processes, seen from one rank: mlx-lm cuts models by its rank and size."""

    of_rank: int
    hosts: int

    def rank(self) -> int:
        """Return the number of this rank."""
        return self.of_rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self.hosts


def choose_cut_mode(model: Any, hosts: int, ways: Sequence[CutMode], name: str) -> CutMode:
    """Return the first of `ways` by which `model` can be cut for so many hosts. The model is neither evaluated nor
    changed. Raises HostRefused with what forbids it, and the numbers of hosts that would do.
    """
    why = []
    for way in ways:
        obstacle = find_cut_obstacle(model, hosts, way)
        if obstacle is None:
            return way
        why.append(obstacle)
    fit = possible_host_counts(model, ways)
    then = f"{_join_numbers(fit)} hosts would do" if fit else "run it on one host"
    raise HostRefused(f"{name} cannot be cut for {hosts} hosts: {'; '.join(why)}. {then[0].upper()}{then[1:]}.")


def possible_host_counts(model: Any, ways: Sequence[CutMode] = tuple(CutMode)) -> list[int]:
    """Return the numbers of hosts, up to `MOST_HOSTS`, for which the model can be cut in one of these ways."""
    numbers = range(2, MOST_HOSTS + 1)
    return [hosts for hosts in numbers if any(find_cut_obstacle(model, hosts, way) is None for way in ways)]


def find_cut_obstacle(model: Any, hosts: int, way: CutMode) -> str | None:
    """Return why the model cannot be cut this way for `hosts` hosts; None if it can be."""
    return _find_tensor_obstacle(model, hosts) if way is CutMode.TENSOR else _find_pipeline_obstacle(model, hosts)


def find_pipeline_module(model: Any) -> Any:
    """Return the module that mlx-lm can cut between its layers; None if the model has none."""
    return next((module for _, module in model.named_modules() if isinstance(module, PipelineMixin)), None)


def get_model_type(model: Any) -> str:
    """Return mlx-lm's name of the model's type, such as "llama"."""
    return str(getattr(model, "model_type", type(model).__module__.rpartition(".")[2]))


def _find_pipeline_obstacle(model: Any, hosts: int) -> str | None:
    """Return why mlx-lm's pipeline cannot divide the layers among `hosts` hosts; None if it can."""
    part = find_pipeline_module(model)
    if part is None:
        return f"mlx-lm has no pipeline for {get_model_type(model)!r}"
    if len(part.layers) < hosts:
        return f"a pipeline needs a layer for each host, and there are {len(part.layers)}"
    twin = _copy_modules(model)
    try:
        find_pipeline_module(twin).pipeline(StandInGroup(0, hosts))
    except Exception as error:  # mlx-lm raises anything for what cannot be divided
        return f"its layers cannot be divided by {hosts} ({one_line(error)})"
    gone = len(part.layers) - len(find_pipeline_module(twin).pipeline_layers)
    if len(make_prompt_cache(twin)) != len(make_prompt_cache(model)) - gone:
        return f"mlx-lm's pipeline is not for {get_model_type(model)!r}, whose caches it does not divide"
    return None


def _find_tensor_obstacle(model: Any, hosts: int) -> str | None:
    """Return what the `shard` of the model's class cannot divide by `hosts`; None if it divides everything."""
    if not hasattr(model, "shard"):
        return f"mlx-lm does not cut the tensors of {get_model_type(model)!r}"
    twin = _copy_modules(model)
    before = _integer_attributes(twin)
    try:
        twin.shard(StandInGroup(0, hosts))
    except Exception as error:  # mlx-lm and mlx raise anything for what cannot be divided
        failed: Exception | None = error
    else:
        failed = None
    after = _integer_attributes(twin)
    uneven = dict.fromkeys(
        f"{count} {_describe_count(place)}"
        for place, count in before.items()
        if not _is_divided(count, after.get(place, count), hosts) or (failed and place[1] in _HEADS and count % hosts)
    )
    if uneven:
        return f"{' and '.join(uneven)} cannot be divided by {hosts}"
    return None if failed is None else f"its tensors cannot be divided by {hosts} ({one_line(failed)})"


def _is_divided(count: int, now: int, hosts: int) -> bool:
    """Return whether a count was left alone or divided evenly. Fewer than there are ranks may also become one for
    each, which the class repeats.
    """
    repeated = now == 1 and 0 < count < hosts and hosts % count == 0
    return now == count or now * hosts == count or repeated


def _copy_modules(model: Any) -> Any:
    """Return a copy of the model's modules with lazy aliases of its arrays: mlx-lm changes some in place."""
    return copy.deepcopy(model, {id(array): mx.stop_gradient(array) for _, array in tree_flatten(model.parameters())})


def _integer_attributes(model: Any) -> dict[tuple[str, str], int]:
    """Return the integer attributes of the model's modules, by module path and attribute name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def _describe_count(place: tuple[str, str]) -> str:
    """Return the name of a count for messages: "attention heads", or the module and its attribute."""
    path, name = place
    return _HEADS.get(name) or f"({path.rpartition('.')[2]}.{name})"


def _join_numbers(numbers: Sequence[int]) -> str:
    """Return numbers as words, such as "2, 4 or 8"."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


# Load one rank's part of a model. At no time is more in memory than the part and the largest tensor of the files.
#
# The files' tensors are lazy arrays. The class's own code makes the part's arrays of them, lazily, too. Then one array
# after the other is evaluated, and what it was made of is dropped.


Group = mx.distributed.Group | StandInGroup


@dataclass(frozen=True)
class LoadedPart:
    """The part of a model that one rank has loaded, with the size of the whole model."""

    loaded: LoadedModel
    """Its weights and parameters are those of the part."""
    whole_bytes: int
    """Bytes that the weights of the whole model would take in memory."""
    whole_parameters: int
    """How many numbers those stand for."""


def load_part(
    name: str | Path,
    group: Group,
    ways: Sequence[CutMode] = tuple(CutMode),
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


def cut_model(model: Any, *, group: Group, ways: Sequence[CutMode], name: str) -> None:
    """Keep only this rank's part of a `model` whose weights are lazy, and evaluate it. A single rank keeps all of
    it.
    """
    if group.size() > 1:
        if choose_cut_mode(model, group.size(), ways, name) is CutMode.TENSOR:
            model.shard(group)
        else:
            find_pipeline_module(model).pipeline(group)
    evaluate_one_by_one(model)


def evaluate_one_by_one(model: Any) -> None:
    """Evaluate a model's arrays one by one, as copies, so that no array stays in memory because a slice was cut from
    it.
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
