"""Index arrays and masks against their definitions, position by position."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention.paged import PagedKV
from cortexmlx.attention.reference import attend
from cortexmlx.attention.reference_step import ReferenceStep
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import GroupStep, PrefillPiece

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
