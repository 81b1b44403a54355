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

MAX_HOSTS = 16
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


def choose_cut_mode(model: Any, hosts: int, modes: Sequence[CutMode], name: str) -> CutMode:
    """Return the first of `modes` by which `model` can be cut for `hosts` hosts. The model is neither evaluated nor
    changed. Raises HostRefused, which says what forbids it, and which numbers of hosts are possible.
    """
    obstacles = []
    for mode in modes:
        obstacle = find_cut_obstacle(model, hosts, mode)
        if obstacle is None:
            return mode
        obstacles.append(obstacle)
    possible_counts = possible_host_counts(model, modes)
    advice = f"{_join_numbers(possible_counts)} hosts would do" if possible_counts else "run it on one host"
    raise HostRefused(
        f"{name} cannot be cut for {hosts} hosts: {'; '.join(obstacles)}. {advice[0].upper()}{advice[1:]}."
    )


def possible_host_counts(model: Any, modes: Sequence[CutMode] = tuple(CutMode)) -> list[int]:
    """Return the numbers of hosts, up to `MAX_HOSTS`, for which the model can be cut in one of these ways."""
    numbers = range(2, MAX_HOSTS + 1)
    return [hosts for hosts in numbers if any(find_cut_obstacle(model, hosts, mode) is None for mode in modes)]


def find_cut_obstacle(model: Any, hosts: int, mode: CutMode) -> str | None:
    """Return why the model cannot be cut this way for `hosts` hosts; None if it can be."""
    return _find_tensor_obstacle(model, hosts) if mode is CutMode.TENSOR else _find_pipeline_obstacle(model, hosts)


def find_pipeline_module(model: Any) -> Any:
    """Return the module that mlx-lm can cut between its layers; None if the model has none."""
    return next((module for _, module in model.named_modules() if isinstance(module, PipelineMixin)), None)


def get_model_type(model: Any) -> str:
    """Return mlx-lm's name of the model's type, such as "llama"."""
    return str(getattr(model, "model_type", type(model).__module__.rpartition(".")[2]))


def _find_pipeline_obstacle(model: Any, hosts: int) -> str | None:
    """Return why mlx-lm's pipeline cannot divide the layers among `hosts` hosts; None if it can."""
    pipeline_module = find_pipeline_module(model)
    if pipeline_module is None:
        return f"mlx-lm has no pipeline for {get_model_type(model)!r}"
    if len(pipeline_module.layers) < hosts:
        return f"a pipeline needs a layer for each host, and there are {len(pipeline_module.layers)}"
    model_copy = _copy_modules(model)
    try:
        find_pipeline_module(model_copy).pipeline(StandInGroup(0, hosts))
    except Exception as error:  # mlx-lm raises anything for what cannot be divided
        return f"its layers cannot be divided by {hosts} ({one_line(error)})"
    removed_layers = len(pipeline_module.layers) - len(find_pipeline_module(model_copy).pipeline_layers)
    if len(make_prompt_cache(model_copy)) != len(make_prompt_cache(model)) - removed_layers:
        return f"mlx-lm's pipeline is not for {get_model_type(model)!r}, whose caches it does not divide"
    return None


def _find_tensor_obstacle(model: Any, hosts: int) -> str | None:
    """Return what the `shard` of the model's class cannot divide by `hosts`; None if it divides everything."""
    if not hasattr(model, "shard"):
        return f"mlx-lm does not cut the tensors of {get_model_type(model)!r}"
    model_copy = _copy_modules(model)
    old_counts = _integer_attributes(model_copy)
    try:
        model_copy.shard(StandInGroup(0, hosts))
    except Exception as error:  # mlx-lm and mlx raise anything for what cannot be divided
        failure: Exception | None = error
    else:
        failure = None
    new_counts = _integer_attributes(model_copy)
    uneven_counts = dict.fromkeys(
        f"{count} {_describe_count(attribute)}"
        for attribute, count in old_counts.items()
        if not _is_evenly_divided(count, new_counts.get(attribute, count), hosts)
        or (failure and attribute[1] in _HEADS and count % hosts)
    )
    if uneven_counts:
        return f"{' and '.join(uneven_counts)} cannot be divided by {hosts}"
    return None if failure is None else f"its tensors cannot be divided by {hosts} ({one_line(failure)})"


def _is_evenly_divided(count: int, new_count: int, hosts: int) -> bool:
    """Return whether a count was kept, or divided evenly, or set to 1 by a class that repeats what is too few."""
    is_repeated = new_count == 1 and 0 < count < hosts and hosts % count == 0
    return new_count == count or new_count * hosts == count or is_repeated


def _copy_modules(model: Any) -> Any:
    """Return a copy of the model's modules with lazy aliases of its arrays: mlx-lm changes some arrays in place."""
    return copy.deepcopy(model, {id(array): mx.stop_gradient(array) for _, array in tree_flatten(model.parameters())})


def _integer_attributes(model: Any) -> dict[tuple[str, str], int]:
    """Return the integer attributes of the model's modules, by module path and attribute name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def _describe_count(attribute: tuple[str, str]) -> str:
    """Return the name of a count for messages: "attention heads", or the module and its attribute."""
    path, name = attribute
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
    modes: Sequence[CutMode] = tuple(CutMode),
    *,
    adapter: str | Path | None = None,
    dequantize: bool | None = None,
) -> LoadedPart:
    """Load this rank's part of the model `name`, cut in the first of `modes` that is possible, without asking other
    ranks. The other arguments and the errors are those of `load_model`.

    A GGUF file is read as a whole before it is cut.

    Raises HostRefused for a model that cannot be cut for so many hosts, before its weights are read, and for an
    adapter.
    """
    if adapter is not None:
        raise HostRefused(f"the adapter {adapter} cannot be cut: fuse it with `mlx_lm.fuse`, and give the fused model")
    model_sizes: list[tuple[int, int]] = []

    def measure_and_cut(model: Any) -> None:
        model_sizes.append((weights.weight_bytes(model), weights.parameter_count(model)))
        cut_model(model, group=group, modes=modes, name=str(name))

    loaded = load_model(name, dequantize=dequantize, evaluate_part=measure_and_cut)
    return LoadedPart(loaded, *model_sizes[0])


def cut_model(model: Any, *, group: Group, modes: Sequence[CutMode], name: str) -> None:
    """Keep only this rank's part of a `model` whose weights are lazy, and evaluate it. A single rank keeps all."""
    if group.size() > 1:
        if choose_cut_mode(model, group.size(), modes, name) is CutMode.TENSOR:
            model.shard(group)
        else:
            find_pipeline_module(model).pipeline(group)
    evaluate_one_by_one(model)


def evaluate_one_by_one(model: Any) -> None:
    """Evaluate a model's arrays one by one, as copies, so that no array stays in memory because of a slice of it."""
    previous_limit = mx.set_cache_limit(0)
    try:
        for _, module in model.named_modules():
            for name in [name for name, value in module.items() if isinstance(value, mx.array)]:
                module[name] = mx.contiguous(module[name], allow_col_major=True)
                mx.eval(module[name])
    finally:
        mx.set_cache_limit(previous_limit)
    mx.eval(model.parameters())
