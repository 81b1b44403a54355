"""The reference backend against float64 NumPy, token by token: any tables, lengths, windows, sinks, caps, slopes and
dtypes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from mlx_lm.models.cache import RotatingKVCache

from cortexmlx.attention import reference
from cortexmlx.attention.paged import AttentionParams, PagedKV, paged_attention
from cortexmlx.attention.reference import attend
from cortexmlx.attention.reference_step import ReferenceStep
from cortexmlx.attention.softmax import Softmax
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import TAIL_COLUMNS, AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece
from support.effort import examples
from support.kernels.attention_case import TOLERANCE, Case, softmax_attention


@given(st.data())
@settings(max_examples=examples(120), deadline=None)
def test_any_step_is_softmax_attention(data: st.DataObject) -> None:
    Case(data.draw, attend).run()


@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_latents_of_several_heads_are_attended_to_below_float32(dtype: str, tail: int) -> None:
    """Each stored head's rest of the keys goes with the query heads of its group, and the scores add up."""
    chosen = [7, 8, (2, 3), (12, 8, True), dtype, dtype, None, False, None, False, False, tail]
    chosen += [2, 9, 20, *([] if tail else [1, (5, 9)]), False, False]
    given = iter(chosen)
    Case(lambda _: next(given), attend).run()
    assert next(given, None) is None, "everything that was chosen is part of the case"


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_any_step_as_a_gpu_computes_it(data: st.DataObject) -> None:
    """Below float32 a CPU takes MLX's attention for every row; a GPU takes the products of blocks and views."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "rounds_coarsely", lambda queries, kv: False)
        Case(data.draw, attend).run()


def test_few_scores_take_mlxs_own_softmax_unless_something_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where operations cost more than arithmetic, one operation. A sink, a cap or slopes are no part of that one."""
    made: list[float] = []
    monkeypatch.setattr(reference, "Softmax", lambda *args: made.append(args[0]) or Softmax(*args))
    monkeypatch.setattr(reference, "MAX_SIMPLE_SCORES", 2 * 20)
    arena = KVArena([LayerGroup(KVSpec(1, 8, 8, "float32"), (0,))], 4, 16)
    for length, sinks, cap, slopes, powers in [
        (20, None, None, None, 0),
        (21, None, None, None, 1),
        (20, mx.zeros(2), None, None, 1),
        (20, None, 2.0, None, 1),
        (20, None, None, mx.zeros(2), 1),
    ]:
        made.clear()
        run = KVHandle(0, 2)
        step = GroupStep(np.array([[0, 1]], np.int32), np.array([length], np.int32), (run,), (), AttentionWindow())
        kv = PagedKV(arena, 0, step, None, 0, mx.float32, attend)
        paged_attention(mx.zeros((1, 2, 1, 8)), kv, AttentionParams(1.0, sinks=sinks, softcap=cap, slopes=slopes))
        assert len(made) == powers


@pytest.mark.parametrize("length", [200, 3000])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gpus_errors_are_those_of_mlxs_attention(
    dtype: str, rows: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of blocks, of views and of the tail below float32, beside MLX's attention of all tokens in one piece."""
    monkeypatch.setattr(reference, "rounds_coarsely", lambda queries, kv: False)
    heads, group, dim, size, tail = 2, 2, 64, 16, 5
    kind, rng = getattr(mx, dtype), np.random.default_rng(length)
    blocks = -(-length // size)
    queries = mx.array(rng.normal(size=(rows, heads * group, 1, dim))).astype(kind)
    keys, values = (mx.array(rng.normal(size=(rows, heads, length + tail, dim))).astype(kind) for _ in range(2))
    arena = KVArena([LayerGroup(KVSpec(heads, dim, dim, dtype), (0,))], blocks * rows, size)
    for row in range(rows):
        place = slice(row * blocks * size, row * blocks * size + length)
        arena.write(0, place, keys[row, :, :length], values[row, :, :length])
    mx.eval(arena.arrays())
    runs = tuple(KVHandle(row * blocks, blocks) for row in range(rows))
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    step = GroupStep(tables, np.full(rows, length, np.int32), runs, (), AttentionWindow())
    columns = [(0, 0), (0, 0), (0, TAIL_COLUMNS - tail), (0, 0)]
    newest = tuple(mx.pad(a[:, :, length:], columns) for a in (keys, values))
    kv = PagedKV(arena, 0, step, newest, tail, kind, attend)

    q, k, v = (np.array(a.astype(mx.float32), float) for a in (queries, keys, values))
    wanted = np.stack(
        [
            softmax_attention(q[row, head, 0], k[row, head // group], v[row, head // group], dim**-0.5, None, None)
            for row in range(rows)
            for head in range(heads * group)
        ]
    )
    errors = []
    for found in (
        paged_attention(queries, kv, AttentionParams(dim**-0.5)),
        mx.fast.scaled_dot_product_attention(queries, keys, values, scale=dim**-0.5),
    ):
        errors.append(np.median(abs(np.array(found.astype(mx.float32), float).reshape(wanted.shape) - wanted)))
    assert errors[0] <= 1.15 * errors[1]


class Prefill:
    """A window layer's prefill in chunks, in one run or in scattered blocks, with nothing else in the arena."""

    def __init__(self, tokens: int, window: int, dtype: str, scattered: bool, heads: int = 2, dim: int = 16) -> None:
        self.kind, self.window, self.heads, self.dim, self.size = getattr(mx, dtype), window, heads, dim, 16
        rng, blocks = np.random.default_rng(tokens), -(-tokens // self.size)
        self.queries = mx.array(rng.normal(size=(tokens, 2 * heads, 1, dim))).astype(self.kind)
        self.keys, self.values = (mx.array(rng.normal(size=(heads, tokens, dim))).astype(self.kind) for _ in range(2))
        self.arena = KVArena([LayerGroup(KVSpec(heads, dim, dim, dtype, window), (0,))], blocks, self.size)
        table = rng.permutation(blocks) if scattered else np.arange(blocks)
        slots = (table[:, None] * self.size + np.arange(self.size)).reshape(-1)[:tokens].astype(np.int32)
        self.slots, self.run = (slots, None) if scattered else (None, KVHandle(0, blocks))
        self.arena.write(0, mx.array(slots), self.keys, self.values)
        mx.eval(self.arena.arrays(), self.queries, self.keys, self.values)

    def chunk(self, first: int, last: int, **options: Any) -> mx.array:
        """Attention of the tokens `first .. last`, `[tokens, query_heads, 1, dim]`."""
        slots = None if self.slots is None else self.slots[:last]
        nothing = np.zeros((0, 0), np.int32)
        pieces = (PrefillPiece(0, last - first, first, self.run, slots),)
        step = GroupStep(nothing, np.zeros(0, np.int32), (), pieces, AttentionWindow(self.window))
        kv = PagedKV(self.arena, 0, step, None, 0, self.kind, attend)
        return paged_attention(self.queries[first:last], kv, AttentionParams(self.dim**-0.5, **options))


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_a_window_layers_prefill_takes_does_not_depend_on_the_prefix(dtype: str, scattered: bool) -> None:
    """Neither a mask nor a copy of keys and values as long as the prefix: below float32 MLX's attention, else ours."""
    count, window = 32, 48
    layer = Prefill(16384, window, dtype, scattered)

    peaks = []
    for first in (1024, 16384 - count):
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(layer.chunk(first, first + count))
        peaks.append(mx.get_peak_memory() - before)
    # When MLX frees what is no longer needed is a matter of time, and may double it; the prefix is 15 times as long.
    assert peaks[1] <= 4 * peaks[0]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("window", [70, 1000])
def test_slopes_of_a_piece_of_many_stretches_count_from_each_query(window: int, dtype: str) -> None:
    """Beside sinks, which tell where a query is; a softmax alone would not notice if all distances were off."""
    first, last = 20, 190
    assert last - first > 2 * reference.QUERIES_PER_CHUNK
    layer, group = Prefill(200, window, dtype, scattered=True), 2
    slopes, sinks = mx.array([0.5, 0.02, 0.1, 0.0]), mx.array([1.0, 3.0, -2.0, 0.5])
    found = np.array(layer.chunk(first, last, slopes=slopes, sinks=sinks).astype(mx.float32))
    q, k, v = (np.array(a.astype(mx.float32), float) for a in (layer.queries, layer.keys, layer.values))
    for query in (first, first + 1, 83, 84, 85, 147, 148, last - 1):
        seen = slice(max(0, query + 1 - window), query + 1)
        for head in range(4):
            keys, values = k[head // group, seen], v[head // group, seen]
            sink, slope = float(sinks[head].item()), float(slopes[head].item())
            wanted = softmax_attention(q[query, head, 0], keys, values, layer.dim**-0.5, sink, None, slope)
            np.testing.assert_allclose(found[query - first, head, 0], wanted, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_window_layers_chunks_are_bitwise_what_mlx_lms_rotating_cache_gives(dtype: str, scattered: bool) -> None:
    """Its cache keeps what a chunk's oldest query sees, and so do we: the same products, summed in the same order."""
    layer = Prefill(200, 40, dtype, scattered)
    theirs, begin = RotatingKVCache(layer.window), 0
    for count in (13, 27, 1, 64, 39, 56):
        last = begin + count
        mask = theirs.make_mask(count)
        keys, values = theirs.update_and_fetch(*(a[None, :, begin:last] for a in (layer.keys, layer.values)))
        queries = layer.queries[begin:last].swapaxes(0, 2)
        wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=layer.dim**-0.5, mask=mask)
        assert mx.array_equal(layer.chunk(begin, last), wanted.swapaxes(0, 2)), (begin, last)
        begin = last


def test_a_window_layer_needs_no_mask_where_causal_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunks up to the window, and single tokens anywhere: nothing is left out but the future."""
    masks: list[Any] = []
    attention = mx.fast.scaled_dot_product_attention

    def noted(*arrays: mx.array, mask: Any, **options: Any) -> mx.array:
        masks.append(mask if isinstance(mask, str) else mask.shape)
        return attention(*arrays, mask=mask, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    layer = Prefill(200, 40, "float16", scattered=False)
    for first, last in ((0, 40), (10, 40), (150, 151), (0, 41), (150, 152)):
        layer.chunk(first, last)
    assert masks == ["causal", "causal", "causal", (41, 41), (2, 41)]


def test_a_row_far_below_zero_keeps_its_softmax() -> None:
    """A running maximum that starts at 0 or an epsilon in the denominator would lose rows whose logits are all -40."""
    arena = KVArena([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 4, 8)
    keys = mx.broadcast_to(mx.array([[-40.0, 0, 0, 0]]), (1, 8, 4))
    values = mx.arange(32, dtype=mx.float32).reshape(1, 8, 4)
    arena.write(0, slice(8, 16), keys, values)
    q = mx.broadcast_to(mx.array([1.0, 0, 0, 0]), (2, 1, 1, 4))
    for run in (KVHandle(1, 1), None):
        step = GroupStep(np.array([[1], [1]], np.int32), np.array([8, 3], np.int32), (run, run), (), AttentionWindow())
        out = paged_attention(q, PagedKV(arena, 0, step, None, 0, mx.float32, attend), AttentionParams(1.0))
        np.testing.assert_allclose(np.array(out)[:, 0, 0], [[14, 15, 16, 17], [4, 5, 6, 7]], rtol=1e-5)


# -- Index arrays and masks against their definitions, position by position -------------------------------------------


SIZE, BLOCKS, HEADS = 4, 6, 2


def step_of(lengths: list[int], attention_window: AttentionWindow, pieces: tuple[PrefillPiece, ...] = ()) -> GroupStep:
    tables = np.full((len(lengths), 3), BLOCKS, np.int32)
    for row, length in enumerate(lengths):
        count = -(-length // SIZE)
        tables[row, :count] = [(row + 2 * i) % BLOCKS for i in range(count)]
    return GroupStep(tables, np.array(lengths, np.int32), (None,) * len(lengths), pieces, attention_window)


def kv_of(step: GroupStep, tail_tokens: int) -> PagedKV:
    arena = KVArena([LayerGroup(KVSpec(HEADS, 4, 4, "float32"), (0,))], BLOCKS, SIZE)
    return PagedKV(arena, 0, step, None, tail_tokens, mx.float32, attend)


WINDOWS = [AttentionWindow(), *(AttentionWindow(n, chunked) for n in (1, 3, 4, 7, 20) for chunked in (False, True))]


def looks_at(query: int, seen: int, attention_window: AttentionWindow) -> bool:
    """The definition: up to itself, and no further back than the window, which counts the token itself, or the chunk's
    beginning.
    """
    if attention_window.tokens is not None and attention_window.chunked:
        return seen <= query and seen // attention_window.tokens == query // attention_window.tokens
    return seen <= query and (attention_window.tokens is None or query - seen < attention_window.tokens)


@pytest.mark.parametrize("attention_window", WINDOWS)
@pytest.mark.parametrize("tail", [0, 1, 5, 16])
def test_a_row_sees_its_tokens_in_the_arena_and_its_columns_of_the_tail(
    attention_window: AttentionWindow, tail: int
) -> None:
    """Which tokens it sees are told by the blocks that the index names, and by the place of the columns in them."""
    lengths = [1, 4, 9, 12]
    kv = kv_of(step_of(lengths, attention_window), tail)
    index = ReferenceStep.from_handle(kv).row_index(HEADS, BLOCKS + 2, SIZE)
    visible, blocks = np.array(index.visible_mask(kv))[:, 0, 0], np.array(index.block)[:, 0]
    assert visible.shape == (4, index.blocks * SIZE + tail) and blocks.shape == (4, index.blocks)
    for row, length in enumerate(lengths):
        newest = length + tail - 1
        slots = (blocks[row][:, None] * SIZE + np.arange(SIZE)).reshape(-1)
        wanted = [p for p in range(length) if looks_at(newest, p, attention_window)]
        table = kv.step.tables[row]
        assert slots[visible[row, : len(slots)]].tolist() == [table[p // SIZE] * SIZE + p % SIZE for p in wanted]
        assert visible[row, len(slots) :].tolist() == [
            looks_at(newest, length + c, attention_window) for c in range(tail)
        ]


@pytest.mark.parametrize(
    ("attention_window", "blocks"),
    [(AttentionWindow(3), 2), (AttentionWindow(1), 1), (AttentionWindow(4, chunked=True), 1), (AttentionWindow(), 3)],
)
def test_what_lies_in_front_of_all_that_a_window_of_steps_sees_is_not_multiplied(
    attention_window: AttentionWindow, blocks: int
) -> None:
    """The row of 12 tokens ends a block and the one of 9 begins one, so that three tokens lie in two blocks."""
    step = step_of([9, 12], attention_window)
    index = ReferenceStep(step).row_index(HEADS, BLOCKS + 2, SIZE)
    assert index.blocks == blocks and np.array(index.block)[1, 0, -1] == step.tables[1, 2]


def test_visible_columns_follow_the_tail_of_each_step_of_a_window() -> None:
    step = step_of([5, 8], AttentionWindow(6))
    index = ReferenceStep(step).row_index(HEADS, BLOCKS + 2, SIZE)
    widths = [index.visible_mask(kv_of(step, tail)).shape[-1] for tail in (1, 2, 3, 2)]
    assert widths == [index.blocks * SIZE + tail for tail in (1, 2, 3, 2)]


def test_distances_count_from_each_rows_newest_token() -> None:
    """Also in the steps of a decode window, whose tail grows."""
    lengths, step = [5, 8], step_of([5, 8], AttentionWindow(6))
    index = ReferenceStep(step).row_index(HEADS, BLOCKS + 2, SIZE)
    for tail in (1, 3, 0):
        kv = kv_of(step, tail)
        distance, visible = np.array(index.token_distances(kv)), np.array(index.visible_mask(kv))
        assert distance.dtype == np.float32 and distance.shape == visible.shape
        for row, length in enumerate(lengths):
            seen = distance[row, 0, 0][visible[row, 0, 0]]
            assert seen.tolist() == list(range(-min(5, length + tail - 1), 1))


def test_distances_of_a_pieces_queries() -> None:
    found = np.array(ReferenceStep.token_distances(first=5, last=8, oldest_token=3))
    assert found.tolist() == [[t - p for t in range(3, 8)] for p in range(5, 8)]


def test_a_heads_blocks_are_matrices_one_after_the_other() -> None:
    """Matrix `head * all blocks + block` of the slab, and the row and head that it is multiplied with."""
    step = step_of([9, 12], AttentionWindow())
    index = ReferenceStep(step).row_index(HEADS, BLOCKS + 2, SIZE)
    block, row_head, each = (np.array(a) for a in (index.block, index.row_head, index.weights_index))
    flat = 0
    for row in range(2):
        for head in range(HEADS):
            for place in range(3):
                assert block[row, head, place] == head * (BLOCKS + 2) + step.tables[row, place]
                assert row_head[row, head, place] == row * HEADS + head
                assert each[row, head, place] == flat
                flat += 1


@pytest.mark.parametrize("attention_window", WINDOWS)
@pytest.mark.parametrize(("first", "count"), [(0, 6), (5, 3), (11, 1)])
def test_what_a_pieces_queries_may_see(attention_window: AttentionWindow, first: int, count: int) -> None:
    piece = PrefillPiece(0, count, first, None, np.arange(first + count, dtype=np.int32))
    step = ReferenceStep(step_of([], attention_window, (piece,)))
    queries = range(first, first + count)
    seen = [[looks_at(q, p, attention_window) for p in range(piece.tokens)] for q in queries]
    anybody = [p for p in range(piece.tokens) if any(row[p] for row in seen)]
    assert step.oldest_token(piece) == anybody[0] and np.array(step.slots(piece)).tolist() == anybody
    mask, causal = step.mask(piece), [[p <= q for p in anybody] for q in queries]
    within = [row[anybody[0] :] for row in seen]
    assert (mask == "causal") if within == causal else (np.array(mask).tolist() == within)
    added = np.array(step.additive_mask(first, first + count, anybody[0], mx.float32))
    assert np.array_equal(added == 0, np.array(seen)[:, anybody[0] :]) and set(added.reshape(-1)) <= {0.0, -np.inf}


def test_arrays_are_made_once_for_all_layers() -> None:
    pieces = (
        PrefillPiece(0, 3, 0, None, np.array([4, 1, 7], np.int32)),
        PrefillPiece(3, 5, 6, None, np.arange(8, dtype=np.int32)),
    )
    kv = kv_of(step_of([4], AttentionWindow(2), pieces), 0)
    step = ReferenceStep.from_handle(kv)
    assert ReferenceStep.from_handle(kv) is step
    assert [np.array(step.slots(p)).tolist() for p in pieces] == [[4, 1, 7], [5, 6, 7]]
    assert step.slots(pieces[0]) is step.slots(pieces[0]) and step.mask(pieces[1]) is step.mask(pieces[1])
    assert step.row_index(HEADS, BLOCKS + 2, SIZE) is step.row_index(HEADS, BLOCKS + 2, SIZE)
