"""The arena is never copied: not by decode across many drains, not by attention through a view. And the check that
says so notices a writer or a reader that does copy.

A long step hides copies: MLX runs only a few operations ahead, so that a write finds the reads of the step before
done. So the model is a single attention layer, without an MLP behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from cortexmlx.attention.paged import AttentionParams, PagedKV, paged_attention
from cortexmlx.attention.reference import attend
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import TAIL_COLUMNS, AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.types.request import RequestState
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of, write_tiny

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
