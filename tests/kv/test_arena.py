"""The arena's bytes: what is refused before MLX would write anywhere, and resizing that fails half-way."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cortexmlx.kv.arena as arena_module
from cortexmlx.errors import KVBlockError, MemoryRefused
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import KVSpec, LayerGroup
from support.effort import examples
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of


@pytest.mark.parametrize("slots", [[-2, 0], [0, 32], [31, 47], [2**31 - 1]])
def test_slots_outside_the_arena_are_refused(slots: list[int]) -> None:
    arena = KVArena([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 4, block_size=8)
    arena.check_slots(0, np.array([-1, 0, 31], np.int32))
    arena.check_slots(0, np.zeros(0, np.int32))
    with pytest.raises(KVBlockError, match="4 blocks of 8 tokens"):
        arena.check_slots(0, np.array(slots, np.int32))


@pytest.mark.parametrize("block", [-1, 5, 6])
def test_blocks_outside_the_arena_are_refused(block: int) -> None:
    arena = KVArena([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 4, block_size=8)
    arena.check_blocks(0, np.array([[0, 3], [1, arena.null_block(0)]], np.int32))
    with pytest.raises(KVBlockError, match="the arena, which has 4"):
        arena.check_blocks(0, np.array([0, block], np.int32))
    with pytest.raises(KVBlockError):
        arena.copy_blocks(0, np.array([0], np.int32), np.array([block], np.int32))


@pytest.mark.parametrize("layer", [0, 1])
def test_an_arena_that_fails_in_the_middle_of_growing_is_as_it_was(
    tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """A Metal allocation that fails raises, where the CPU build would crash."""
    driver = Driver(tiny("llama"), tokens=4096)
    arena, resized, calls = driver.core.runner.arena, arena_module._resize_array, []

    def failing(array: mx.array, slots: int, keep: int) -> mx.array:
        calls.append(slots)
        if len(calls) == 2 * layer + 2:
            raise RuntimeError("[metal::malloc] Unable to allocate")
        return resized(array, slots, keep)

    short = tokens_of(30, seed=1)
    assert driver.answers([short], 10) == [tuple(theirs("llama", short, 10))]
    before = arena.blocks
    monkeypatch.setattr(arena_module, "_resize_array", failing)
    with pytest.raises(MemoryRefused, match=f"stays at {before[0]} blocks"):
        arena.resize(2 * before[0])
    assert arena.blocks == before and {a.shape[1] for a in arena.arrays()} == {arena.slots_per_slab(0)}
    assert driver.answers([short], 10) == [tuple(theirs("llama", short, 10))]


def test_an_arena_gives_all_of_its_bytes_back_and_begins_anew_with_zeros() -> None:
    """Also where a write is planned that will never be computed."""
    arena = KVArena([LayerGroup(KVSpec(2, 64, 64, "float32"), (0, 1))], 512, 8)
    size, before = arena.nbytes, mx.get_active_memory()
    arena.fill(0, np.arange(100), 7.0)
    arena.write(1, slice(0, 4), *(mx.ones((2, 4, 64)) / 3 for _ in range(2)))
    arena.release()
    assert arena.nbytes == 0 and arena.blocks == (0,)
    assert before - mx.get_active_memory() > 0.99 * size
    arena.resize(3)
    assert arena.blocks == (3,) and arena.slots_per_slab(0) == 40
    assert not any(np.array(a).any() for a in arena.arrays())


@given(st.data(), st.integers(1, 6), st.sampled_from([1, 2, 8]))
@settings(max_examples=examples(40))
def test_the_slabs_hold_what_plain_arrays_hold(data: st.DataObject, blocks: int, size: int) -> None:
    """Writes, copies, resizes and fills of two layer groups, beside NumPy arrays with the same indices."""
    groups = [LayerGroup(KVSpec(2, 3, 1, "float32"), (0, 2)), LayerGroup(KVSpec(1, 2, 2, "float32"), (1,))]
    arena = KVArena(groups, blocks, size)
    plain = {layer: [np.array(a) for a in arena.slab(layer)] for layer in range(3)}
    rng = np.random.default_rng(blocks)
    for _ in range(data.draw(st.integers(1, 8))):
        what = data.draw(st.sampled_from(["write", "copy", "resize", "fill"]))
        group = data.draw(st.integers(0, 1))
        slots = np.array(data.draw(st.lists(st.integers(0, blocks * size - 1), unique=True, max_size=9)), np.int32)
        if what == "write":
            layer = data.draw(st.sampled_from(groups[group].layers))
            new = [rng.normal(size=(a.shape[0], len(slots), a.shape[2])).astype(np.float32) for a in plain[layer]]
            arena.write(layer, mx.array(slots), *map(mx.array, new))
            for array, values in zip(plain[layer], new, strict=True):
                array[:, slots] = values
        elif what == "copy":
            some = data.draw(st.permutations(range(blocks)))[: 2 * (blocks // 2)]
            sources, targets = np.array(some[::2], np.int32), np.array(some[1::2], np.int32)
            arena.copy_blocks(group, sources, targets)
            for layer in groups[group].layers:
                for array in plain[layer]:
                    by_block = array.reshape(array.shape[0], -1, size, array.shape[2])
                    by_block[:, targets] = by_block[:, sources]
        elif what == "fill":
            arena.fill(group, slots, 0.5)
            for layer in groups[group].layers:
                for array in plain[layer]:
                    array[:, slots] = 0.5
        else:
            keep, blocks = blocks, data.draw(st.integers(1, 8))
            arena.resize(blocks)
            for layer, arrays in plain.items():
                kept = [a[:, : min(keep, blocks) * size] for a in arrays]
                rest = (blocks + 2) * size - kept[0].shape[1]
                plain[layer] = [np.pad(a, [(0, 0), (0, rest), (0, 0)]) for a in kept]
    assert arena.null_block(0) == blocks and arena.nbytes == sum(a.nbytes for arrays in plain.values() for a in arrays)
    run = KVHandle(data.draw(st.integers(0, blocks - 1)), 1)
    for layer, arrays in plain.items():
        every = (arena.slab(layer), arena.view(layer, run, size), arena.slab_as_blocks(layer))
        for slab, view, matrices, array in zip(*every, arrays, strict=True):
            assert np.array_equal(np.array(slab), array)
            assert np.array_equal(np.array(view), array[:, run.start * size : run.stop * size])
            head, total = array.shape[0] - 1, blocks + 2
            assert np.array_equal(np.array(matrices[head * total + run.start]), np.array(view)[head])
        assert not any(np.array(a)[:, blocks * size : (blocks + 1) * size].any() for a in arena.slab(layer))


def test_a_view_is_of_tokens_that_the_run_has() -> None:
    arena = KVArena([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 4, 8)
    assert arena.view(0, KVHandle(1, 2), 16)[0].shape == (1, 16, 4)
    for tokens in (-1, 17):
        with pytest.raises(ValueError, match="a run of 2 blocks of 8 has no"):
            arena.view(0, KVHandle(1, 2), tokens)


def test_an_arena_that_is_refused_says_how_much_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes again, up to 256 MiB, must be left for the steps."""
    group, asked = LayerGroup(KVSpec(1, 4, 4, "float32"), (0, 1)), list[int]()
    monkeypatch.setattr(arena_module, "can_allocate", lambda size: asked.append(size))
    with pytest.raises(MemoryRefused, match=r"refuses 4 KiB .*--kv-memory"):
        KVArena([group], 6, 8)
    assert asked == [2 * 4096]


def test_blocks_are_copied_after_the_command_buffers_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Metal `mx.eval` returns before a command buffer lets go of its inputs. A write that comes sooner copies slabs,
    which no CPU shows.
    """
    arena, order = KVArena([LayerGroup(KVSpec(1, 4, 4, "float32"), (0, 1))], 4, 8), list[str]()
    for name, function in (("eval", mx.eval), ("synchronize", mx.synchronize)):
        monkeypatch.setattr(mx, name, lambda *a, name=name, function=function: (order.append(name), function(*a))[1])
    write = arena.write
    monkeypatch.setattr(arena, "write", lambda *a: (order.append("write"), write(*a))[1])
    arena.copy_blocks(0, np.array([0], np.int32), np.array([2], np.int32))
    assert order == ["eval", "synchronize", "write", "write"]


def test_no_resized_slab_takes_another_arrays_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX would copy a slab in a buffer that is too large for it at its first write."""
    arena = KVArena([LayerGroup(KVSpec(2, 64, 64, "float32"), (0, 1, 2))], 64, 8)
    resized, cached = arena_module._resize_array, list[int]()

    def watched(array: mx.array, slots: int, keep: int) -> mx.array:
        cached.append(mx.get_cache_memory())
        return resized(array, slots, keep)

    other = mx.ones(arena.slab(0)[0].size + 1024)
    mx.eval(other)
    del other
    monkeypatch.setattr(arena_module, "_resize_array", watched)
    arena.resize(62)
    assert len(cached) == 6 and max(cached) < arena.slab(0)[0].nbytes // 4
