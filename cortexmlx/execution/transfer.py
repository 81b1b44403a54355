"""Moves blocks and states between the arena and the disk tier: as NumPy arrays of all layers, on the engine's thread.

A block of a group is one array `[layers, kv_heads, block_size, dim]` for each array of a slab: the slots of the block
in all layers. A state first says which of its slots have an array, `[slots]` uint8, and then has these arrays. NumPy
has no bfloat16: its bits are uint16 here.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from cortexmlx.disk.tier import STATE, PieceLoad
from cortexmlx.execution.boundary import Arrays, Shapes
from cortexmlx.execution.states import Batch, StateStore
from cortexmlx.kv.arena import KVArena

_NONE, _PLAIN, _BFLOAT16 = range(3)
"""What a slot of a state has."""


def copy_out(arena: KVArena, group: int, blocks: Sequence[int]) -> list[Arrays]:
    """Return copies of blocks of a group. Nothing may be in flight, as for a write. No view of the arena is left."""
    layers, size = arena.groups[group].layers, arena.block_size
    copies: list[list[np.ndarray]] = [[] for _ in blocks]
    for index, layer in enumerate(layers):
        for number, array in enumerate(arena.slab(layer)):
            numbers = _numbers(array)
            heads, _, dim = numbers.shape
            for copy, block in zip(copies, blocks, strict=True):
                if index == 0:
                    copy.append(np.empty((len(layers), heads, size, dim), numbers.dtype))
                copy[number][index] = numbers[:, block * size : (block + 1) * size]
    return [tuple(copy) for copy in copies]


def shapes_of(arena: KVArena, group: int) -> Shapes:
    """Return the shapes and dtypes of the arrays of a group's block."""
    layers = arena.groups[group].layers
    slab = [_numbers(array[:, :0]) for array in (arena.slab(layers[0]) if layers else ())]
    return tuple(((len(layers), len(a), arena.block_size, a.shape[-1]), a.dtype.str) for a in slab)


def load(arena: KVArena, states: StateStore, loads: Sequence[PieceLoad]) -> None:
    """Write blocks and snapshots to their places. Nothing may be in flight."""
    for group in range(len(arena.groups)):
        mine = [each for each in loads if each.group == group]
        if mine and arena.groups[group].layers:
            _load_blocks(arena, group, mine)
    for each in loads:
        if each.group == STATE:
            states.restore(each.target, _state(each.content.arrays))


def _load_blocks(arena: KVArena, group: int, loads: Sequence[PieceLoad]) -> None:
    blocks = np.array([each.target for each in loads], np.int32)
    arena.check_blocks(group, blocks)
    slots = (blocks[:, None] * arena.block_size + np.arange(arena.block_size, dtype=np.int32)).reshape(-1)
    run = bool((np.diff(blocks) == 1).all())
    where = slice(int(slots[0]), int(slots[-1]) + 1) if run else mx.array(slots)
    for index, layer in enumerate(arena.groups[group].layers):
        dtypes = [array.dtype for array in arena.slab(layer)]
        each = zip(*(load.content.arrays for load in loads), strict=True)
        values = [np.concatenate([array[index] for array in arrays], axis=1) for arrays in each]
        arena.write(layer, where, *(_array(v, dtype) for v, dtype in zip(values, dtypes, strict=True)))
        mx.eval(arena.slab(layer))


def copy_out_state(batch: Batch) -> Arrays:
    """Return a copy of the state of a snapshot."""
    slots = [array for leaf in batch.states for array in leaf]
    kinds = np.array([_NONE if a is None else _BFLOAT16 if a.dtype == mx.bfloat16 else _PLAIN for a in slots], np.uint8)
    return kinds, *(np.array(_numbers(array)) for array in slots if array is not None)


def _state(arrays: Arrays) -> list[mx.array | None]:
    """Return the arrays of all slots: the inverse of `copy_out_state`."""
    rest = (mx.array(array) for array in arrays[1:])
    return [
        None if kind == _NONE else next(rest) if kind == _PLAIN else next(rest).view(mx.bfloat16) for kind in arrays[0]
    ]


def _numbers(array: mx.array) -> np.ndarray:
    """Return a NumPy view of an array's memory. It must be gone before the next write."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _array(numbers: np.ndarray, dtype: mx.Dtype) -> mx.array:
    array = mx.array(numbers)
    return array if array.dtype == dtype else array.view(dtype)
