"""The arena's bytes: what is refused before MLX would write anywhere, and resizing that fails half-way."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import cortexmlx.kv.arena as arena_module
from cortexmlx.errors import KVBlockError, MemoryRefused
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import KVSpec, LayerGroup
from support.core_driver import Driver
from support.tiny import tokens_of


@pytest.mark.parametrize("slots", [[-2, 0], [0, 32], [31, 47], [2**31 - 1]])
def test_slots_outside_the_arena_are_refused(slots: list[int]) -> None:
    arena = KVArena([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 4, block_size=8)
    arena.check_slots(np.array([-1, 0, 31], np.int32))
    arena.check_slots(np.zeros(0, np.int32))
    with pytest.raises(KVBlockError, match="4 blocks of 8 tokens"):
        arena.check_slots(np.array(slots, np.int32))


@pytest.mark.parametrize("block", [-1, 5, 6])
def test_blocks_outside_the_arena_are_refused(block: int) -> None:
    arena = KVArena([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 4, block_size=8)
    arena.check_blocks(np.array([[0, 3], [1, arena.null_block]], np.int32))
    with pytest.raises(KVBlockError, match="the arena, which has 4"):
        arena.check_blocks(np.array([0, block], np.int32))
    with pytest.raises(KVBlockError):
        arena.copy_blocks(0, np.array([0], np.int32), np.array([block], np.int32))


@pytest.mark.parametrize("layer", [0, 1])
def test_an_arena_that_fails_in_the_middle_of_growing_is_as_it_was(
    tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """A Metal allocation that fails raises, where the CPU build would crash."""
    driver = Driver(tiny("llama"), tokens=4096)
    arena, resized, calls = driver.core.arena, arena_module._resized, []

    def failing(array: mx.array, slots: int, keep: int) -> mx.array:
        calls.append(slots)
        if len(calls) == 2 * layer + 2:
            raise RuntimeError("[metal::malloc] Unable to allocate")
        return resized(array, slots, keep)

    short = tokens_of(30, seed=1)
    assert driver.answers([short], 10) == [tuple(theirs("llama", short, 10))]
    before = arena.blocks
    monkeypatch.setattr(arena_module, "_resized", failing)
    with pytest.raises(MemoryRefused, match=f"stays at {before} blocks"):
        arena.resize(2 * before)
    assert arena.blocks == before and {a.shape[1] for a in arena.arrays()} == {arena.slots}
    assert driver.answers([short], 10) == [tuple(theirs("llama", short, 10))]
