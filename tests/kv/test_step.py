"""A step whose rows attend to listed blocks: the same as rows that have only those tokens.

What else is in the module is plain data; the shadow arena of the scheduler's tests judges who fills it in.
"""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from cortexmlx.errors import KVBlockError
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.kv.step import GroupStep, PrefillPiece, restrict_to_blocks

SIZE, NULL = 4, 900
PIECE = PrefillPiece(3, 9, 0, KVHandle(0, 2), None)


def step_of(lengths: list[int], window: int | None = None, chunked: bool = False) -> GroupStep:
    """Row r's block at place p is number 100 * r + p, in one run."""
    counts = [-(-n // SIZE) for n in lengths]
    tables = np.full((len(lengths), max(counts, default=0)), NULL, np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = 100 * row + np.arange(count)
    runs = tuple(KVHandle(100 * row, count) for row, count in enumerate(counts))
    return GroupStep(tables, np.array(lengths, np.int32), runs, (PIECE,), AttentionWindow(window, chunked))


def tokens_of(step: GroupStep, row: int) -> list[tuple[int, int]]:
    """What a row reads, in order: (block, offset)."""
    return [(int(step.tables[row, t // SIZE]), t % SIZE) for t in range(int(step.lengths[row]))]


@given(st.data())
def test_a_row_reads_the_tokens_of_its_listed_blocks_in_order(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    whole = step_of(lengths)
    lists = []
    for length in lengths:
        chosen = data.draw(st.sets(st.integers(0, -(-length // SIZE) - 1)))
        lists.append(np.array(sorted(chosen), np.int32))
    step = restrict_to_blocks(whole, lists, SIZE, NULL)
    assert step.tables.shape[1] == max(map(len, lists)) and step.tables.dtype == step.lengths.dtype == np.int32
    for row, places in enumerate(lists):
        wanted = {100 * row + int(place) for place in places}
        assert tokens_of(step, row) == [token for token in tokens_of(whole, row) if token[0] in wanted]
        assert (step.tables[row, len(places) :] == NULL).all()
        assert step.runs[row] == (whole.runs[row] if tokens_of(step, row) == tokens_of(whole, row) else None)
    assert step.listed and not whole.listed and step.pieces == (PIECE,) and step.attention_window == AttentionWindow()


def test_all_blocks_are_the_step_itself() -> None:
    whole = step_of([1, 8, 9, 30])
    step = restrict_to_blocks(whole, [np.arange(n, dtype=np.int32) for n in (1, 2, 3, 8)], SIZE, NULL)
    assert np.array_equal(step.tables, whole.tables) and np.array_equal(step.lengths, whole.lengths)
    assert step.runs == whole.runs


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ([2, 0], "row 1's list [2, 0] does not name some of its 3 blocks in ascending order"),
        ([0, 0], "list [0, 0]"),
        ([1, 3], "3 blocks"),
        ([-1, 2], "list [-1, 2]"),
    ],
)
def test_a_list_that_is_none_is_refused(places: list[int], says: str) -> None:
    """Out of order, the partly filled last block would be taken for a full one: somebody else's bytes."""
    with pytest.raises(KVBlockError) as refused:
        restrict_to_blocks(step_of([4, 9]), [np.array([0]), np.array(places)], SIZE, NULL)
    assert says in str(refused.value)


def test_every_row_needs_a_list_and_windows_and_chunks_have_none() -> None:
    with pytest.raises(KVBlockError, match="1 lists of blocks for 2 rows"):
        restrict_to_blocks(step_of([4, 9]), [np.array([0])], SIZE, NULL)
    with pytest.raises(KVBlockError, match="window of 6 tokens"):
        restrict_to_blocks(step_of([9], window=6), [np.array([0])], SIZE, NULL)
    with pytest.raises(KVBlockError, match="chunks of 6 tokens"):
        restrict_to_blocks(step_of([9], window=6, chunked=True), [np.array([0])], SIZE, NULL)
