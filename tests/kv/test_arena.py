"""The arena's bytes: what is refused before MLX would write anywhere, and resizing that fails half-way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cortexmlx.kv.arena as arena_module
from cortexmlx.attention.paged import AttentionParams, PagedKV, paged_attention
from cortexmlx.attention.reference import attend
from cortexmlx.errors import KVBlockError, MemoryRefused
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import QUANTIZED_PARTS, KVArena, Quantization
from cortexmlx.kv.spec import TAIL_COLUMNS, AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.types.request import RequestState
from support.effort import examples
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of, write_tiny


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


# The arena is never copied: not by decode across many drains, not by attention through a view. And the check that
# says so notices a writer or a reader that does copy.


HEADS, DIM, ROWS = 4, 64, 8
SLACK = 8 << 20
TAIL_BYTES = 2 * ROWS * HEADS * TAIL_COLUMNS * DIM * 4
SMALL, LARGE = 16_384, 65_536


def growth(work: Callable[[], Any]) -> int:
    """By how many bytes the peak of memory rises above what is there before."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    mx.synchronize()
    return int(mx.get_peak_memory()) - before


class OnlyAttention(nn.Module):  # type: ignore[misc]
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.use_sliding, self.self_attn = layer.use_sliding, layer.self_attn

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        out: mx.array = self.self_attn(x, mask, cache)
        return out


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models") / "wide"
    shape = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM}
    return write_tiny(folder, "one layer", max_position_embeddings=SMALL, **shape)


def decoding(folder: Any, tokens: int, **params: Any) -> Driver:
    """A crowd of decoding rows on an arena of `tokens` tokens that does not grow any more. Their contexts are long, so
    that attention is still in flight when the next step is built.
    """
    driver = Driver(folder, tokens=tokens, max_rows=ROWS, block_size=32, prefill_budget=4096)
    body = driver.core.loaded.model.model
    body.layers[0] = OnlyAttention(body.layers[0])
    driver.core.cache.pools.grow(driver.core.cache.pools.max_blocks)
    handles = [driver.add(tokens_of(1750 + 9 * i, seed=i), 200, **params) for i in range(ROWS)]
    while any(handle.state is not RequestState.DECODING for handle in handles):
        driver.step()
    assert driver.core.runner.arena.nbytes >= tokens * 2 * HEADS * DIM * 4
    return driver


def read_everything(tokens: mx.array, logits: mx.array) -> mx.array:
    mx.eval(logits, tokens)
    mx.synchronize()
    return logits


@pytest.mark.parametrize(
    "processors", [[], pytest.param([read_everything], marks=pytest.mark.slow)], ids=["plain", "processors"]
)
def test_prompts_and_decode_across_drains_copy_nothing_of_the_arena(one_layer: Any, processors: list[Any]) -> None:
    """Processors that evaluate a step's logits while the step is being built run its writes there and then."""
    driver = decoding(one_layer, LARGE, logits_processors=processors)

    def more_prompts() -> None:
        driver.core.cancel(1)
        for i in range(3):
            driver.add(tokens_of(100 + i, seed=50 + i), 5, logits_processors=processors)
            driver.step(TAIL_COLUMNS + 1)

    assert growth(more_prompts) <= 3 * TAIL_BYTES + SLACK


# -- attention through views and block tables -------------------------------------------------------------------------

BLOCK = 32
BLOCKS = 1024


@pytest.fixture(scope="module")
def arena() -> KVArena:
    arena = KVArena([LayerGroup(KVSpec(HEADS, DIM, DIM, "float32"), (0,))], BLOCKS, BLOCK)
    arena.fill(0, np.arange(BLOCKS * BLOCK), 0.5)
    return arena


def paged(arena: KVArena, tables: Any, lengths: Any, runs: Any, pieces: tuple[PrefillPiece, ...] = ()) -> PagedKV:
    step = GroupStep(np.array(tables, np.int32), np.array(lengths, np.int32), tuple(runs), pieces, AttentionWindow())
    return PagedKV(arena, 0, step, None, 0, mx.float32, attend)


def attention(kv: PagedKV, queries: int) -> Callable[[], None]:
    q = mx.ones((queries, HEADS, 1, DIM))
    mx.eval(q)
    return lambda: mx.eval(paged_attention(q, kv, AttentionParams(0.1)))


def test_a_view_is_no_copy(arena: KVArena) -> None:
    keys, values = arena.view(0, KVHandle(3, 900), 28_000)
    assert growth(lambda: mx.eval(keys, values)) < 1 << 16
    assert keys.shape == (HEADS, 28_000, DIM)


def test_decode_attention_of_a_lone_run_copies_neither_keys_nor_values(arena: KVArena) -> None:
    length = 900 * BLOCK
    kv = paged(arena, [np.arange(900)], [length], [KVHandle(0, 900)])
    assert growth(attention(kv, 1)) < HEADS * length * DIM * 4 // 8


def test_decode_attention_through_block_tables_copies_neither_keys_nor_values(arena: KVArena) -> None:
    tables = np.random.default_rng(0).permutation(BLOCKS)[:800].reshape(4, 200)
    kv = paged(arena, tables, [200 * BLOCK] * 4, [None] * 4)
    assert growth(attention(kv, 4)) < HEADS * 800 * BLOCK * DIM * 4 // 8


def test_prefill_attention_of_a_run_copies_neither_keys_nor_values(arena: KVArena) -> None:
    length, count = 900 * BLOCK, 4
    piece = PrefillPiece(0, count, length - count, KVHandle(0, 900), None)
    kv = paged(arena, np.zeros((0, 0)), [], [], (piece,))
    assert growth(attention(kv, count)) < HEADS * length * DIM * 4 // 4


def test_a_view_kept_across_a_write_is_caught_by_the_check(arena: KVArena) -> None:
    slots = mx.array(np.arange(8, dtype=np.int32))
    new = mx.ones((HEADS, 8, DIM))
    mx.eval(slots, new)

    def write() -> None:
        arena.write(0, slots, new, new)
        mx.eval(arena.arrays())

    assert growth(write) < 1 << 20
    view = arena.view(0, KVHandle(0, 1), 8)
    assert growth(write) >= arena.nbytes
    del view
    assert growth(write) < 1 << 20


def test_the_engine_keeps_no_view_across_its_writes(one_layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every view that attention asks for is dead when the arena is written next."""
    import weakref

    views: list[Any] = []
    seen = 0
    view, write = KVArena.view, KVArena.write

    def watched_view(self: KVArena, *args: Any) -> Any:
        nonlocal seen
        seen += 1
        slabs = view(self, *args)
        views.extend(weakref.ref(a) for a in slabs)
        return slabs

    def watched_write(self: KVArena, *args: Any) -> None:
        assert all(ref() is None for ref in views), "a view outlived its step"
        views.clear()
        write(self, *args)

    monkeypatch.setattr(KVArena, "view", watched_view)
    monkeypatch.setattr(KVArena, "write", watched_write)
    driver = Driver(one_layer, tokens=2048, max_rows=2)
    driver.answers([tokens_of(40)], 40)
    driver.answers([tokens_of(50), tokens_of(60)], 40)
    assert seen > 10, "views must be used for this test to say anything"


# -- Quantized arrays and what they stand for, against the definition in float64 --------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [32, 64])
def test_several_arrays_become_three_each_and_come_back_within_a_step(bits: int, group: int) -> None:
    form = Quantization(bits, group)
    random = np.random.default_rng(bits + group)
    keys, values = (random.standard_normal((2, 5, dim)).astype(np.float32) for dim in (64, 128))
    parts = form.quantize(mx.array(keys), mx.array(values))
    assert len(parts) == 2 * QUANTIZED_PARTS
    assert [p.shape[-1] for p in parts] == [n for d in (64, 128) for n in (d * bits // 32, d // group, d // group)]
    for numbers, back, scales in zip((keys, values), form.dequantize(parts), (parts[1], parts[4]), strict=True):
        steps = np.repeat(np.abs(np.array(scales)), group, axis=-1)
        assert (np.abs(np.array(back) - numbers) <= 1.1 * steps).all(), "MLX moves the scale so that 0 is a code"
    codes = np.array(parts[0]).view(np.uint8)[0, 0]
    first = codes[0] & (1 << bits) - 1
    meant = float(np.array(parts[1])[0, 0, 0]) * int(first) + float(np.array(parts[2])[0, 0, 0])
    assert meant == pytest.approx(float(np.array(form.dequantize(parts[:QUANTIZED_PARTS])[0])[0, 0, 0]), abs=1e-6)
