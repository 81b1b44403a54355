"""Snapshots go from sequences to cached blocks and back, and sequences begin with them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.snapshots import NO_STATE_OPS, RowSnapshot, SnapshotRegistry
from cortexmlx.kv.spec import KVSpec, LayerGroup

SIZE = 4
TEXT = list(range(100, 140))


def cache_of(blocks: int = 20, snapshots: int = 9) -> KVCache:
    group = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))
    return KVCache(BlockPools([group], blocks, SIZE, snapshots=SnapshotRegistry(snapshots)))


def computed(cache: KVCache, seq: int, text: Sequence[int], kept: Sequence[int], stored: int | None = None) -> None:
    """A sequence of a text, begun with what is cached, with snapshots at some places; `stored` of it are in blocks."""
    begin(cache, seq, text)
    cache.append(seq, len(text) - cache.tables.length(seq))
    for place in kept:
        assert cache.states.make_snapshot(seq, place)
    cache.register(seq, text, len(text) if stored is None else stored)


def begin(cache: KVCache, seq: int, text: Sequence[int]) -> tuple[int, int | None]:
    match = cache.match(text, cache.prefix.keys(text), len(text) - 1)
    cache.allocate_for(seq, len(text), match=match)
    cache.check_invariants()
    return cache.tables.length(seq), match.snapshot


@pytest.mark.parametrize(("length", "wanted"), [(5, 4), (8, 7), (10, 9), (20, 10)])
def test_a_snapshot_goes_with_its_block_to_the_prefix_cache(length: int, wanted: int) -> None:
    cache = cache_of()
    computed(cache, 1, TEXT[:10], (4, 7, 9, 10))
    cache.check_invariants()
    assert [len(home) for home in cache.prefix.states] == [1, 1]
    cache.cache_and_free(1, TEXT[:10], 10)
    cache.check_invariants()
    assert [sorted(home) for home in cache.prefix.states] == [[4], [3], [1, 2]]
    assert begin(cache, 2, TEXT[:length])[0] == wanted


def test_what_is_not_stored_goes_with_its_sequence() -> None:
    cache = cache_of()
    computed(cache, 1, TEXT[:10], (4, 9, 10), stored=9)
    cache.cache_and_free(1, TEXT[:10], 9)
    cache.check_invariants()
    assert begin(cache, 2, TEXT[:20])[0] == 9
    computed(cache, 3, TEXT[20:30], (4, 10))
    before = len(cache.states.take_ops().drops)
    cache.free(3)
    cache.check_invariants()
    assert (before, len(cache.states.take_ops().drops)) == (1, 1)


def test_a_block_that_is_evicted_takes_its_snapshots_along() -> None:
    cache = cache_of()
    computed(cache, 1, TEXT[:10], (4, 9))
    cache.cache_and_free(1, TEXT[:10], 10)
    cache.pools.drop_cached(1)
    cache.check_invariants()
    assert begin(cache, 2, TEXT[:20])[0] == 4
    cache.free(2)
    cache.pools.drop_cached()
    assert not cache.states.snapshots and len(cache.states.take_ops().drops) == 2


def test_who_takes_a_partial_block_over_keeps_the_snapshots_within_it() -> None:
    """The block's entry is gone while the sequence has it, and its text's other end with it."""
    cache = cache_of()
    computed(cache, 1, TEXT[:7], (5, 6, 7))
    cache.cache_and_free(1, TEXT[:7], 7)
    blocks = cache.pools.unused_entries
    text = [*TEXT[:6], 1, 2, 3, 4]
    assert begin(cache, 2, text)[0] == 6 and cache.pools.unused_entries == blocks - 2
    cache.append(2, 4)
    cache.cache_and_free(2, text, 10)
    cache.check_invariants()
    assert begin(cache, 3, TEXT[:6])[0] == 5
    cache.free(3)
    assert begin(cache, 4, TEXT[:8])[0] == 6, "the end of the first text is written over"


def test_without_room_for_a_copy_a_text_begins_at_the_end_of_a_block() -> None:
    cache = cache_of(blocks=4)
    computed(cache, 1, TEXT[:8], (4, 6))
    cache.cache_and_free(1, TEXT[:8], 8)
    assert begin(cache, 2, [*TEXT[:7], 1, 2, 3, 4, 5, 6, 7])[0] == 4


def test_a_block_of_another_that_was_evicted_is_no_home() -> None:
    """Two compute the same: the second's block is a double of the first's, and goes by its name."""
    cache = cache_of()
    cache.allocate_for(1, 4)
    cache.allocate_for(2, 8)
    for seq, length in ((1, 4), (2, 8)):
        cache.append(seq, length)
        cache.register(seq, TEXT[:length], 4)
    cache.free(1)
    cache.pools.drop_cached()
    assert cache.states.make_snapshot(2, 4) is None and not cache.states.can_fork(2, 4)
    cache.check_invariants()
    assert cache.states.make_snapshot(2, 6)
    cache.check_invariants()


def test_a_fork_begins_where_its_parent_has_a_snapshot() -> None:
    cache = cache_of()
    computed(cache, 1, TEXT[:10], (6, 10))
    for place, able in ((0, True), (6, True), (7, False), (8, False), (10, True)):
        assert cache.states.can_fork(1, place) is able
    cache.fork(1, 2, 6)
    row = (2, 0)
    cache.states.begin_row(row, 2)
    (begun,) = cache.states.take_ops().begins
    assert (begun.row, begun.tokens) == (row, 6)


def test_a_row_that_goes_leaves_its_state_behind() -> None:
    cache = cache_of()
    computed(cache, 1, TEXT[:10], ())
    cache.states.end_row((1, 0), 1, 9)
    cache.cache_and_free(1, TEXT[:10], 9)
    ops = cache.states.take_ops()
    assert ([(s.row, s.tokens) for s in ops.saves], ops.ends) == ([((1, 0), 9)], ((1, 0),))
    assert begin(cache, 2, TEXT[:20]) == (9, ops.saves[0].snapshot)
    cache.states.end_row((2, 0), 2, 0)
    assert cache.states.take_ops().saves == ()


def test_a_model_without_states_begins_wherever_its_blocks_are() -> None:
    cache = KVCache(BlockPools([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 20, SIZE))
    begin(cache, 1, TEXT[:10])
    cache.append(1, 10)
    cache.states.end_row((1, 0), 1, 10)
    cache.cache_and_free(1, TEXT[:10], 10)
    assert begin(cache, 2, TEXT[:8]) == (7, None)
    cache.states.begin_row((2, 0), 2)
    assert cache.states.take_ops((RowSnapshot((2, 0), 3, 1),)) == NO_STATE_OPS and not cache.states.has_states
    assert cache.states.can_fork(2, 5)
    with pytest.raises(AssertionError):
        cache.states.check_invariants([{1: 1}])


def test_a_copy_begins_with_a_snapshot_that_its_own_blocks_drive_out() -> None:
    """The parent has doubles of cached blocks. Its snapshot hangs at those, which nobody owns."""
    cache = cache_of(blocks=5)
    computed(cache, 1, TEXT[:8], ())
    cache.cache_and_free(1, TEXT[:8], 8)
    computed(cache, 2, TEXT[:8], (7,))
    cache.allocate_for(3, SIZE)
    assert cache.can_fork(2, 7)
    cache.fork(2, 4, 7)
    cache.check_invariants()
    assert not cache.states.snapshots, "there was no other room for the copy"
    cache.states.begin_row((4, 0), 4)
    (begin,) = (ops := cache.states.take_ops()).begins
    assert begin.tokens == 7 and ops.drops == (begin.snapshot,)
