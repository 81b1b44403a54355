"""Blocks and states out of the arena and back: the same bits, in the arena's own memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.disk.tier import STATE, PieceLoad
from cortexmlx.execution.paged_memory import block_shapes, copy_out_blocks, copy_out_state, load_pieces
from cortexmlx.execution.states import StateBatch, StateStore
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import KVSpec, LayerGroup

SIZE = 8


def filled(dtype: str, value_in_key: bool = False) -> KVArena:
    spec = KVSpec(2, 6, 4, dtype, value_in_key=value_in_key)
    arena = KVArena([LayerGroup(spec, (0, 2)), LayerGroup(KVSpec(1, 4, 4, dtype, 16), (1,))], [6, 4], SIZE)
    for layer in (0, 1, 2):
        slots = arena.slots_per_slab(arena.group_of[layer])
        values = [mx.random.normal((a.shape[0], slots, a.shape[2])).astype(a.dtype) for a in arena.slab(layer)]
        arena.write(layer, slice(0, slots), *values)
    mx.eval(arena.arrays())
    return arena


def piece(group: int, target: int, arrays: Any) -> PieceLoad:
    return PieceLoad(group, target, SimpleNamespace(arrays=arrays))


def at(arena: KVArena, layer: int, block: int) -> list[mx.array]:
    return [a[:, block * SIZE : (block + 1) * SIZE] for a in arena.slab(layer)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value_in_key", [False, True])
@pytest.mark.parametrize("targets", [[0, 1, 2], [5, 0, 3]])
def test_blocks_come_back_with_the_same_bits(dtype: str, value_in_key: bool, targets: list[int]) -> None:
    arena, other = filled(dtype, value_in_key), filled(dtype, value_in_key)
    untouched = [mx.array(a) for a in at(other, 2, 4)]
    copies = copy_out_blocks(arena, 0, [4, 1, 5])
    assert {tuple((a.shape, a.dtype.str) for a in arrays) for arrays in copies} == {block_shapes(other, 0)}
    assert block_shapes(other, 0) != block_shapes(other, 1)
    load_pieces(other, StateStore({}), [piece(0, t, arrays) for t, arrays in zip(targets, copies, strict=True)])
    for source, target in zip([4, 1, 5], targets, strict=True):
        for layer in (0, 2):
            pairs = zip(at(arena, layer, source), at(other, layer, target), strict=True)
            assert all(bool(mx.array_equal(a, b)) for a, b in pairs)
    assert all(bool(mx.array_equal(a, b)) for a, b in zip(at(other, 2, 4), untouched, strict=True))


def test_a_copy_is_a_copy_and_leaves_the_arena_free_to_be_written_in_place() -> None:
    arena = filled("bfloat16")
    (copy,) = copy_out_blocks(arena, 0, [1])
    before = [np.array(array) for array in copy]
    memory = mx.get_active_memory()
    arena.write(0, slice(0, SIZE), *(mx.zeros((2, SIZE, dim), mx.bfloat16) for dim in (6, 4)))
    mx.eval(arena.arrays())
    mx.reset_peak_memory()
    arena.write(0, slice(SIZE, 2 * SIZE), *(mx.zeros((2, SIZE, dim), mx.bfloat16) for dim in (6, 4)))
    mx.eval(arena.arrays())
    slab = sum(a.nbytes for a in arena.slab(0))
    assert mx.get_peak_memory() - memory < slab, "no second slab"
    assert all(np.array_equal(a, b) for a, b in zip(copy, before, strict=True))


def test_a_block_that_is_not_in_the_arena_is_refused() -> None:
    from cortexmlx.errors import KVBlockError

    arena = filled("float32")
    with pytest.raises(KVBlockError, match="do not all lie"):
        load_pieces(arena, StateStore({}), [piece(0, 99, copy_out_blocks(arena, 0, [1])[0])])


def test_a_state_comes_back_with_its_gaps_and_dtypes() -> None:
    arrays = (mx.random.normal((1, 3, 4)), mx.random.normal((1, 5)).astype(mx.bfloat16), mx.array([[7]]))
    batch = StateBatch(((arrays[0], None), (arrays[1], arrays[2])), 1)
    store = StateStore({0: 2, 3: 2})
    load_pieces(filled("float32"), store, [piece(STATE, 9, copy_out_state(batch))])
    back = store.snapshot(9)
    assert back is not None and back.states[0][1] is None
    for mine, theirs in zip(back.arrays(), arrays, strict=True):
        assert mine.dtype == theirs.dtype and bool(mx.array_equal(mine, theirs))
