"""The work list and the block tables that the kernels read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.metal.work import padded_tables, work_list


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 1500), min_size=1, max_size=20),
    st.integers(0, 16),
    st.none() | st.integers(1, 1600),
    st.sampled_from([64, 256]),
    st.integers(1, 8),
)
def test_work_items_cover_each_visible_token_once(
    lengths: list[int], tail_tokens: int, window: int | None, partition: int, queries: int
) -> None:
    arena = np.array(lengths, np.int32)
    work = work_list(arena, tail_tokens, window, partition, queries)
    assert work.plan.dtype == np.int32 and len(work.plan) >= 8
    parts = work.plan[: 4 * work.rows].reshape(-1, 4)
    items = work.plan[4 * work.rows : 4 * work.rows + 4 * work.items].reshape(-1, 4)
    assert parts[:, 1].sum() == work.items
    for row, (first_item, count, sees_from, sees_to) in enumerate(parts):
        mine = items[first_item : first_item + count]
        assert (mine[:, 0] == row).all() and (mine[:, 3] == lengths[row]).all() and count >= 1
        end = lengths[row] + tail_tokens
        start = 0 if window is None else max(0, end - window - (queries - 1))
        assert (max(0, sees_from), sees_to) == (0 if window is None else max(0, end - window), end)
        assert [t for _, a, b, _ in mine for t in range(a, b)] == list(range(start, end))
        assert all(a // partition == (b - 1) // partition for _, a, b, _ in mine if a < b)
        if end > start:
            assert (mine[:, 1] < mine[:, 2]).all(), "no empty work"


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 2), (7, 1), (8, 1), (2, 9)])
def test_small_tables_are_padded_to_eight_numbers(rows: int, blocks: int) -> None:
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    padded = padded_tables(tables)
    assert padded.size >= 8 and np.array_equal(padded[:, :blocks], tables)
