"""What the parts of a model, on the ranks of a group, are together: layer groups, blocks and snapshots. Without mlx."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cortexmlx.kv.sizing import Load, arena_blocks, bytes_per_token, row_bytes, split_memory
from cortexmlx.kv.spec import AttentionWindow, Counts, LayerGroup, paged

Part = tuple[LayerGroup, ...]
"""The layer groups of one rank."""


def in_one_order(parts: Iterable[Sequence[LayerGroup]]) -> tuple[Part, ...]:
    """Return the layer groups of each rank, all ranks with the same groups in the same order. A rank that has no layer
    of some group gets that group without layers.
    """
    parts = [tuple(part) for part in parts]
    specs = list(dict.fromkeys(group.spec for part in parts for group in part))
    layers = [{group.spec: group.layers for group in part} for part in parts]
    return tuple(tuple(LayerGroup(spec, own.get(spec, ())) for spec in specs) for own in layers)


def together(parts: Sequence[Part]) -> Part:
    """Return the groups of all ranks, with the layers of all ranks. So the bytes of a group are those on all ranks.
    `parts` are in one order.
    """
    return tuple(
        LayerGroup(same[0].spec, tuple(layer for group in same for layer in group.layers))
        for same in zip(*parts, strict=True)
    )


@dataclass(frozen=True)
class Room:
    """What all ranks have room for."""

    blocks: Counts
    """How many blocks each group may have, by the rank that has the least room for them."""
    snapshots: int | None
    """How many snapshots of a row's state; None if the model has no states."""


def room_of_all(parts: Sequence[Part], memory: Sequence[int], load: Load, context: int) -> Room:
    """Return what fits into `memory[rank]` bytes of every rank, for rows of at most `context` tokens. `parts` are in
    one order. Raises InvalidRequest if no block fits on some rank.

    All ranks have the same block tables. So the smallest number of blocks counts, and groups that see equally far have
    equally many (`BlockPools`), also if they are on different ranks.
    """
    groups = paged(together(parts))
    states = [split_memory(part, bytes_, load.rows) for part, bytes_ in zip(parts, memory, strict=True)]
    snapshots = [count for part, (_, count) in zip(parts, states, strict=True) if row_bytes(part)]
    most: dict[AttentionWindow, int] = {}
    for part, (bytes_, _) in zip(parts, states, strict=True):
        own = [group for group in part if bytes_per_token([group])]
        for group, count in zip(own, arena_blocks(bytes_, own, load) if own else (), strict=True):
            window = group.spec.attention_window
            most[window] = min(count, most.get(window, count))
    unbounded = load.rows * -(-context // load.block_size)
    blocks = tuple(most.get(group.spec.attention_window, unbounded) for group in groups)
    return Room(blocks, min(snapshots) if snapshots else None)
