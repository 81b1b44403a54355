"""Block tables against plain lists: slots, runs, and what is cut off."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.table import BlockTable, SequenceBlocks, split_into_runs

BLOCKS = st.lists(st.integers(0, 40), unique=True, max_size=12)
"""Any order, and often a few that are consecutive."""


def table_of(blocks: list[int]) -> BlockTable:
    table = BlockTable()
    table.blocks = list(blocks)
    return table


@given(BLOCKS, st.sampled_from([1, 4, 8]), st.data())
def test_a_tokens_slot_is_its_place_in_its_block(blocks: list[int], size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(blocks) * size))
    count = data.draw(st.integers(0, len(blocks) * size - start))
    every = [block * size + offset for block in blocks for offset in range(size)]
    slots = table_of(blocks).slots(start, count, size)
    assert slots.tolist() == every[start : start + count]
    assert slots.dtype == np.int32 and slots.shape == (count,)


@given(st.lists(st.integers(0, 12), max_size=12))
def test_runs_are_the_blocks_in_their_order_and_as_long_as_they_can_be(blocks: list[int]) -> None:
    runs = split_into_runs(blocks)
    assert [block for run in runs for block in range(run.start, run.stop)] == blocks
    assert all(one.stop != other.start for one, other in pairwise(runs))


@given(BLOCKS, st.integers(0, 14))
def test_a_run_is_there_exactly_when_the_blocks_are_consecutive(blocks: list[int], count: int) -> None:
    first = blocks[:count]
    consecutive = bool(first) and first == list(range(first[0], first[0] + len(first)))
    assert table_of(blocks).find_run(0, count) == (KVHandle(first[0], len(first)) if consecutive else None)
    assert table_of(first).is_single_run() == (consecutive or not first)


@given(BLOCKS, st.integers(0, 14))
def test_what_is_cut_off_is_what_stood_behind(blocks: list[int], keep: int) -> None:
    table = table_of(blocks)
    assert table.remove_from(keep) == blocks[keep:]
    assert table.to_array().tolist() == blocks[:keep] and table.to_array().dtype == np.int32


def test_a_sequence_has_a_table_per_group_and_is_one_run_only_if_all_are() -> None:
    sequence = SequenceBlocks(2, PrefixCache(4).root())
    assert sequence.is_single_run(), "no blocks are not scattered"
    sequence.tables[0].blocks, sequence.tables[1].blocks = [4, 5, 6], [0, 7, 8]
    assert sequence.blocks_at(1) == (5, 7)
    assert sequence.describe() == "4+3 | 0+1 7+2"
    assert not sequence.is_single_run()
    sequence.tables[1].blocks = [1, 2, 3]
    assert sequence.is_single_run()
