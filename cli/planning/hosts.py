"""The part of a model that each of several hosts has. The skeleton is cut by mlx-lm's own code, as the workers cut
it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from cortexmlx.cli.planning.figures import EXPANDED, MachineFigures
from cortexmlx.cli.planning.machine import TargetMachine
from cortexmlx.cli.planning.skeleton import Skeleton, model_as_loaded, probe_caches
from cortexmlx.errors import HostRefused
from cortexmlx.kv import sizing
from cortexmlx.kv.spec import quantize_groups


@dataclass(frozen=True)
class HostFigures:
    """The memory of one host's part of a model, in bytes."""

    rank: int
    layers: int
    """Layers of which it has a part, or the whole."""
    weight_bytes: int
    kv_bytes_per_token: int
    free_bytes: int
    """What weights, tails, states and logits leave for keys and values."""
    fits: int | None
    """Tokens of the longest single sequence. None if its length costs nothing."""


@dataclass(frozen=True)
class DistributedFigures:
    """The memory of a model that is cut for several hosts."""

    hosts: int
    way: str | None
    """"tensor": each has a part of every layer. "pipeline": each has some of the layers. None: it cannot be cut."""
    refusal: str | None
    """Why it cannot be cut for so many hosts."""
    would_do: tuple[int, ...]
    """The numbers of hosts for which it can be cut."""
    ranks: tuple[HostFigures, ...]


def plan_hosts(
    name: str,
    skeleton: Skeleton,
    machine: TargetMachine,
    figures: MachineFigures,
    load: sizing.ArenaDemand,
    hosts: int,
    kv: tuple[int | None, int | None] = (None, None),
) -> DistributedFigures:
    """Compute what each of `hosts` machines like `machine` has. `kv` are the bits and the group size of quantized keys
    and values. `figures` says in which form a machine has the weights.
    """
    from cortexmlx.models.sharding import CutMode, choose_cut_mode, possible_host_counts
    from cortexmlx.models.weights import weight_bytes

    reason = skeleton.refusal or (skeleton.notes[0] if skeleton.most_rows is not None else None)
    if reason is not None:
        return DistributedFigures(hosts, None, f"{name} cannot run on several hosts: {reason}", (), ())
    would_do = tuple(possible_host_counts(skeleton.model))
    try:
        cut_mode = choose_cut_mode(skeleton.model, hosts, tuple(CutMode), name)
    except HostRefused as refused:
        return DistributedFigures(hosts, None, str(refused), would_do, ())
    model = model_as_loaded(skeleton, machine.on_cpu, figures.weights_as == EXPANDED)
    dtype = "float32" if machine.on_cpu else skeleton.dtype
    all_groups = skeleton.widened_groups if machine.on_cpu else skeleton.groups
    ranks: list[HostFigures] = []
    for rank in range(hosts):
        if cut_mode is CutMode.TENSOR and ranks:  # all parts are as large: what cannot be divided evenly is refused
            ranks.append(replace(ranks[0], rank=rank))
            continue
        if cut_mode is CutMode.TENSOR:
            part = _cut_tensors(model, hosts)
            groups = quantize_groups(probe_caches(part, dtype)[1], *kv)
        else:
            part, layers = _cut_layers(model, hosts, rank)
            parts = ((group, tuple(layer for layer in group.layers if layer in layers)) for group in all_groups)
            groups = tuple(replace(group, layers=group_layers) for group, group_layers in parts if group_layers)
        weights = weight_bytes(part)
        free = machine.working_set - sizing.reserved_bytes(groups, load.rows, skeleton.vocab_size, weights)
        ranks.append(
            HostFigures(
                rank=rank,
                layers=len({layer for group in groups for layer in group.layers}),
                weight_bytes=weights,
                kv_bytes_per_token=sizing.bytes_per_token(groups),
                free_bytes=max(free, 0),
                fits=sizing.tokens_that_fit(groups, max(free, 0)),
            )
        )
    return DistributedFigures(hosts, cut_mode.value, None, would_do, tuple(ranks))


def _copy_modules(model: Any) -> Any:
    """Return a copy of a model's modules, which share its arrays: sharding by mlx-lm changes modules in place."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    return copy.deepcopy(model, {id(array): mx.stop_gradient(array) for _, array in tree_flatten(model.parameters())})


def _cut_tensors(model: Any, hosts: int) -> Any:
    """Shard the tensors of every layer, and return one host's part. Its outputs have the right shapes only."""
    import mlx.core as mx

    from cortexmlx.models.sharding import StandInGroup

    part = _copy_modules(model)
    part.shard(StandInGroup(0, hosts))
    single_group = mx.distributed.init()
    for _, module in part.named_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, StandInGroup):
                setattr(module, name, single_group)  # a sum over one rank has the shape of any
    return part


def _cut_layers(model: Any, hosts: int, rank: int) -> tuple[Any, range]:
    """Divide the layers among the hosts. Return one host's part, and which layers it has."""
    from cortexmlx.models.sharding import StandInGroup, find_pipeline_module

    part = _copy_modules(model)
    pipeline_module = find_pipeline_module(part)
    pipeline_module.pipeline(StandInGroup(rank, hosts))
    return part, range(pipeline_module.start_idx, pipeline_module.end_idx)
