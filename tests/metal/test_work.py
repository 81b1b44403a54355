"""The work list and the block tables that the kernels read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.errors import KVBlockError
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.kv.step import PrefillPiece
from cortexmlx.metal.work import EVERYTHING, PREFILL_ITEM, make_prefill_work_list, make_work_list, pad_tables
from support.effort import examples


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.integers(0, 1500), min_size=1, max_size=20),
    st.integers(0, 16),
    st.none() | st.integers(1, 1600),
    st.booleans(),
    st.sampled_from([64, 256]),
    st.integers(1, 8),
)
def test_work_items_cover_each_visible_token_once(
    lengths: list[int], tail_tokens: int, window: int | None, chunked: bool, partition: int, queries: int
) -> None:
    arena, queries = np.array(lengths, np.int32), 1 if chunked else queries
    work = make_work_list(arena, tail_tokens, AttentionWindow(window, chunked), partition, queries)
    assert work.plan.dtype == np.int32 and len(work.plan) >= 8
    parts = work.plan[: 4 * work.rows].reshape(-1, 4)
    items = work.plan[4 * work.rows : 4 * work.rows + 4 * work.items].reshape(-1, 4)
    assert parts[:, 1].sum() == work.items
    for row, (first_item, count, sees_from, sees_to) in enumerate(parts):
        mine = items[first_item : first_item + count]
        assert (mine[:, 0] == row).all() and (mine[:, 3] == lengths[row]).all() and count >= 1
        end = lengths[row] + tail_tokens
        shown = end if window is None else (end - 1) % window + 1 if chunked and end else window
        start = max(0, end - shown - (queries - 1))
        assert (sees_from, sees_to) == (max(0, end - shown), end)
        assert [t for _, a, b, _ in mine for t in range(a, b)] == list(range(start, end))
        assert all(a // partition == (b - 1) // partition for _, a, b, _ in mine if a < b)
        if end > start:
            assert (mine[:, 1] < mine[:, 2]).all(), "no empty work"


def test_several_query_tokens_in_two_chunks_are_refused() -> None:
    with pytest.raises(KVBlockError, match=r"2 newest tokens .* two chunks"):
        make_work_list(np.array([9], np.int32), 0, AttentionWindow(8, chunked=True), 256, query_tokens=2)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 2), (7, 1), (8, 1), (2, 9)])
def test_small_tables_are_padded_to_eight_numbers(rows: int, blocks: int) -> None:
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    padded = pad_tables(tables)
    assert padded.size >= 8 and np.array_equal(padded[:, :blocks], tables)


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300), st.booleans()), min_size=1, max_size=6),
    st.one_of(
        st.builds(AttentionWindow, st.none() | st.integers(1, 400)),
        st.builds(AttentionWindow, st.integers(1, 12).map(lambda blocks: 32 * blocks), st.just(True)),
    ),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([8, 32]),
    st.integers(0, 9),
)
def test_prefill_items_have_each_query_once_in_whole_tiles_of_its_row(
    rows: list[tuple[int, int, bool]], attention_window: AttentionWindow, tile: int, block: int, singles: int
) -> None:
    pieces, begin, random = [], singles, np.random.default_rng(0)
    for first, count, run in rows:
        blocks = random.permutation(1000)[: -(-(first + count) // block)]
        position = np.arange(first + count)
        slots = (blocks[position // block] * block + position % block).astype(np.int32)
        where = (KVHandle(7, len(blocks)), None) if run else (None, slots)
        pieces.append(PrefillPiece(begin, begin + count, first, *where))
        begin += count
    work = make_prefill_work_list(pieces, block, attention_window, tile)
    assert work.plan.dtype == work.tables.dtype == np.int32 and min(len(work.plan), len(work.tables)) >= 8
    items = work.plan[: len(PREFILL_ITEM) * work.items].view(PREFILL_ITEM)
    seen: dict[int, tuple[int, int]] = {}
    for item in items:
        assert item["begin"] // tile == (item["end"] - 1) // tile and item["begin"] < item["end"]
        assert item["reach"] == (EVERYTHING if attention_window.chunked else attention_window.tokens or EVERYTHING)
        for token in range(item["begin"], item["end"]):
            block_there = work.tables[item["blocks"] + token // block]
            assert seen.setdefault(int(item["origin"] + token), (token, int(block_there))) == (token, block_there)
    wanted = []
    for piece in pieces:
        position = np.arange(piece.first, piece.tokens)
        at = 7 + position // block if piece.slots is None else piece.slots[position] // block
        place = position % attention_window.tokens if attention_window.chunked and attention_window.tokens else position
        wanted += zip(place.tolist(), at.tolist(), strict=True)
    assert [seen[n] for n in range(len(seen))] == wanted and sum(items["end"] - items["begin"]) == len(wanted)
    sees = np.minimum(items["end"], items["reach"] + items["end"] - items["begin"])
    assert (np.diff(sees) <= 0).all(), "what takes longest begins first"
