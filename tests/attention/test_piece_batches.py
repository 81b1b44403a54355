"""Short pieces that are attended to together: what they give is what each gives alone, and float64's."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings

from cortexmlx.attention import reference
from cortexmlx.attention import reference_step as piece_batches
from cortexmlx.attention.paged import AttentionParams, PagedKV
from cortexmlx.attention.reference import attend
from cortexmlx.attention.reference_step import MAX_SHORT_TOKENS, PieceBatches, is_short
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece
from support.effort import examples
from support.kernels.attention_case import Case

NO_ROWS = (np.zeros((0, 0), np.int32), np.zeros(0, np.int32), ())


def step_of(pieces: list[tuple[int, int]], window: AttentionWindow | None = None) -> GroupStep:
    """A step of pieces, each (first, tokens), each in a run of its own of 128 blocks."""
    made, begin = [], 0
    for number, (first, tokens) in enumerate(pieces):
        made.append(PrefillPiece(begin, begin + tokens, first, KVHandle(128 * number, 128), None))
        begin += tokens
    return GroupStep(*NO_ROWS, tuple(made), window or AttentionWindow())


class Verification(Case):
    """Several rows that verify drafts: short pieces, some behind each other in length."""

    def __init__(self, draw: Any, attend: Any) -> None:
        super().__init__(draw, attend)
        self.tail_tokens = 0
        shape = st.tuples(st.integers(0, 30), st.integers(2, MAX_SHORT_TOKENS))
        self.prefilling = [draw(shape) for _ in range(draw(st.integers(2, 6)))]


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_any_short_pieces_are_softmax_attention(data: st.DataObject) -> None:
    Verification(data.draw, attend).run()


@given(st.data())
@settings(max_examples=examples(40), deadline=None)
def test_any_short_pieces_as_a_gpu_computes_them(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "rounds_coarsely", lambda queries, kv: False)
        Verification(data.draw, attend).run()


@pytest.mark.parametrize(
    ("dtype", "window", "softcap"),
    [
        ("float16", AttentionWindow(), None),
        ("bfloat16", AttentionWindow(11), 3.0),
        ("float16", AttentionWindow(16, chunked=True), 3.0),
        ("bfloat16", AttentionWindow(16, chunked=True), None),
    ],
)
def test_below_float32_a_piece_has_the_bits_that_it_has_alone(
    dtype: str, window: AttentionWindow, softcap: float | None
) -> None:
    """A CPU has one way there: a row's tokens may not depend on what is verified beside it."""
    kind, rng, size, heads = getattr(mx, dtype), np.random.default_rng(0), 8, 2
    arena = KVArena([LayerGroup(KVSpec(heads, 16, 16, dtype), (0,))], 32, size)
    arena.write(0, slice(0, 32 * size), *(mx.array(rng.normal(size=(heads, 256, 16))).astype(kind) for _ in range(2)))
    slots = (np.array([25, 17, 30])[:, None] * size + np.arange(size)).reshape(-1)[:21].astype(np.int32)
    pieces = (
        PrefillPiece(0, 3, 9, KVHandle(3, 2), None),
        PrefillPiece(3, 23, 30, KVHandle(8, 7), None),
        PrefillPiece(23, 27, 17, None, slots),
        PrefillPiece(27, 29, 0, KVHandle(20, 1), None),
        PrefillPiece(29, 31, 40, KVHandle(8, 7), None),
    )
    queries = mx.array(rng.normal(size=(31, 4, 1, 16))).astype(kind)
    kv = PagedKV(arena, 0, GroupStep(*NO_ROWS, pieces, window), None, 0, kind, attend)
    sinks = None if softcap else mx.array([0.5, -1.0, 2.0, 0.0]).astype(kind)
    together, apart = (
        mx.concatenate(reference.attend_pieces(queries, kv, AttentionParams(0.3, sinks, softcap), one_by_one=apart))
        for apart in (False, True)
    )
    assert len(kv.derived.get(PieceBatches, kv.step).batches) == 2
    assert mx.array_equal(together, apart)


def test_long_pieces_and_lone_ones_are_computed_one_by_one() -> None:
    step = step_of([(0, MAX_SHORT_TOKENS + 1), (50, 3), (0, MAX_SHORT_TOKENS), (9, 4), (9, 400)])
    cut = PieceBatches(step)
    assert [is_short(piece) for piece in step.pieces] == [False, True, True, True, False]
    assert [batch.flat.tolist() for batch in cut.batches] == [[[17, 18, 19, 19], [36, 37, 38, 39]]]
    assert [piece.begin for piece in cut.lone_pieces] == [20, 0, 40]
    found = [17, 18, 19, 19, 36, 37, 38, 39, *range(20, 36), *range(17), *range(40, 440)]
    assert cut.order is not None and [found[i] for i in cut.order.tolist()] == list(range(440))


def test_a_lone_short_piece_is_multiplied_where_it_is_if_it_is_scattered() -> None:
    """As it is when a prompt's blocks were found in the prefix cache: a copy of its tokens costs more than a batch."""
    run, scattered = (
        PrefillPiece(0, 3, 5, KVHandle(0, 1), None),
        PrefillPiece(0, 3, 5, None, np.arange(8, dtype=np.int32)),
    )
    for piece, batches in ((run, 0), (scattered, 1)):
        cut = PieceBatches(GroupStep(*NO_ROWS, (piece,), AttentionWindow()))
        assert len(cut.batches) == batches and len(cut.lone_pieces) == 1 - batches and cut.order is None


def test_equal_pieces_in_order_are_neither_gathered_nor_reordered() -> None:
    """Up to `MIN_SEEN_TOKENS` tokens, what they see sorts nothing."""
    cut = PieceBatches(step_of([(30, 4), (80, 4), (7, 4)]))
    assert cut.order is None and cut.lone_pieces == []
    assert [batch.flat.tolist() for batch in cut.batches] == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(2, 30)), min_size=1, max_size=12), st.booleans())
@settings(deadline=None)
def test_filling_up_at_most_quadruples_a_piece_and_every_token_has_its_place(
    shapes: list[tuple[int, int]], windowed: bool
) -> None:
    window = AttentionWindow(900 if windowed else None)
    step = step_of(shapes, window)
    cut = PieceBatches(step)
    for batch in cut.batches:
        pieces = [p for p in step.pieces if p.begin in batch.flat[:, 0]]
        sees = [max(piece_batches.MIN_SEEN_TOKENS, p.tokens - window.oldest_visible(p.first)) for p in pieces]
        assert len(pieces) > 1 and all(map(is_short, pieces)) and max(sees) <= 2 * min(sees)
        assert all(batch.width <= 2 * (p.end - p.begin) for p in pieces)
    found = [flat for batch in cut.batches for flat in batch.flat.reshape(-1)]
    found += [flat for piece in cut.lone_pieces for flat in range(piece.begin, piece.end)]
    tokens = step.pieces[-1].end
    assert (found if cut.order is None else [found[i] for i in cut.order.tolist()]) == list(range(tokens))


def test_a_step_of_many_pieces_takes_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows that verify are one softmax in each layer, not eight."""
    calls: list[int] = []
    real = reference._attend_batch
    monkeypatch.setattr(reference, "_attend_batch", lambda *given: calls.append(1) or real(*given))
    monkeypatch.setattr(reference, "_attend_piece", None)
    arena = KVArena([LayerGroup(KVSpec(1, 8, 8, "float32"), (0,))], 8 * 128, 8)
    kv = PagedKV(arena, 0, step_of([(20 * i, 5 + i % 3) for i in range(8)]), None, 0, mx.float32, attend)
    out = attend(mx.zeros((kv.step.pieces[-1].end, 2, 1, 8)), kv, AttentionParams(1.0))
    assert calls == [1] and out.shape[0] == kv.step.pieces[-1].end
