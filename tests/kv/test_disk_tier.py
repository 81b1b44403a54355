"""The disk tier: which pieces a text needs to begin, when reading them is worth it, and what is to be stored."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cortexmlx.disk.tier import STATE, DiskLoad, DiskTier
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.snapshots import SnapshotRegistry
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup

SIZE = 4
ALL = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))
TEXT = list(range(100, 140))


def seeing(window: int, chunked: bool = False) -> LayerGroup:
    return LayerGroup(KVSpec(1, 4, 4, "float32", window, chunked=chunked), (1,))


def tier_of(*groups: LayerGroup, states: bool = False) -> DiskTier:
    return DiskTier(groups, SIZE, states, lambda load: None, b"")


def load_of(tier: DiskTier, blocks: int = 0, seconds: float = 1.0, tokens: int = 40) -> DiskLoad:
    text = TEXT[:tokens]
    load = tier.make_load(text, PrefixCache(SIZE).keys(text), blocks, blocks * SIZE, len(text) - 1, seconds)
    assert load is not None
    return load


@given(
    st.sampled_from([None, 3, 4, 5, 9, 13]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
    st.sets(st.tuples(st.integers(0, 8), st.sampled_from([0, 1, STATE]))),
)
def test_a_text_begins_as_far_as_every_block_that_its_next_token_sees_is_there(
    window: int | None, chunked: bool, states: bool, blocks: int, gone: set[tuple[int, int]]
) -> None:
    """Against the plain definition, place by place."""
    groups = (ALL,) if window is None else (ALL, seeing(window, chunked))
    tier = tier_of(*groups, states=states)
    load = load_of(tier, blocks)
    every = {(p, g): tier.piece_key(load.keys[p - blocks], g) for p in range(blocks, 9) for g in tier.all_groups}
    assert set(load.requested_pieces()) == set(every.values())
    there = {key for place, key in every.items() if place not in gone}

    def begins(end: int) -> bool:
        next_token = end * SIZE
        for group, each in enumerate(groups):
            oldest = AttentionWindow(each.spec.window, each.spec.chunked).oldest_visible(next_token) if group else 0
            seen = {position // SIZE for position in range(oldest, next_token)}
            if any((place, group) in gone for place in seen if place >= blocks):
                return False
        return not states or (end - 1, STATE) not in gone

    right = max((end for end in range(blocks + 1, 10) if begins(end)), default=blocks)
    assert load.reusable_blocks(there) == right
    chosen = load.choose_pieces(dict.fromkeys(there, 1), 1e9)
    assert set(chosen) <= there and load.reusable_blocks(chosen) == right, "what is chosen is enough"


def test_another_model_has_other_keys() -> None:
    lowers = [DiskTier((ALL, seeing(9)), SIZE, True, lambda load: None, name) for name in (b"one", b"two")]
    one, other = (set(load_of(tier).requested_pieces()) for tier in lowers)
    assert len(one) == len(other) == 9 * 3 and not one & other


def test_nothing_is_asked_for_before_the_model_is_known() -> None:
    """Entries wait; their pieces get the keys that they would have had."""
    late, cache = DiskTier((ALL,), SIZE, False, lambda load: None, None), KVCache(BlockPools([ALL], 64, SIZE))
    keys = PrefixCache(SIZE).keys(TEXT)
    assert late.make_load(TEXT, keys, 0, 0, 39, 1.0) is None
    cached(late, cache, 1, TEXT[:10])
    late.identity = b"one"
    at_once = DiskTier((ALL,), SIZE, False, lambda load: None, b"one")
    assert load_of(late).requested_pieces() == load_of(at_once).requested_pieces()
    assert [late.piece_key(entry.key, 0) for entry in late.pop_entries()] == list(load_of(at_once).requested_pieces())[
        :2
    ]


def test_the_last_token_is_always_computed() -> None:
    assert len(load_of(tier_of(ALL), tokens=40).keys) == 9
    assert len(load_of(tier_of(ALL), tokens=41 - 4).keys) == 9
    tier = tier_of(ALL)
    assert tier.make_load(TEXT[:4], PrefixCache(SIZE).keys(TEXT[:4]), 0, 0, 3, None) is None


@pytest.mark.parametrize(("seconds", "worth"), [(0.9, False), (1.1, True)])
def test_what_takes_longer_than_computing_is_not_read(seconds: float, worth: bool) -> None:
    """36 tokens in 9 blocks of 4,000 bytes, at 1,000 bytes a second: 36 seconds and what asking takes."""
    load = load_of(tier_of(ALL), seconds=seconds)
    there = dict.fromkeys(load.requested_pieces(), 4000)
    assert bool(load.choose_pieces(there, 1000.0)) is worth


def cached(tier: DiskTier, cache: KVCache, seq: int, tokens: list[int]) -> None:
    cache.disk_tier = tier
    cache.allocate_for(seq, len(tokens))
    cache.append(seq, len(tokens))
    cache.cache_and_free(seq, tokens, len(tokens))


def test_each_whole_block_is_to_be_stored_once() -> None:
    tier, cache = tier_of(ALL), KVCache(BlockPools([ALL], 64, SIZE))
    cached(tier, cache, 1, TEXT[:10])
    cached(tier, cache, 2, TEXT[:14])
    entries = list(tier.pop_entries())
    assert [entry.tokens for entry in entries] == [tuple(TEXT[i : i + 4]) for i in (0, 4, 8)]
    for entry in entries:
        assert [group for group, _ in tier.unstored_pieces(entry)] == [0]
        tier.mark_stored(entry, 0)
    cached(tier, cache, 3, TEXT[:14])
    assert list(tier.pop_entries()) == []


def test_what_is_evicted_before_it_is_stored_is_counted() -> None:
    lost: list[int] = []
    tier, cache = (
        DiskTier((ALL,), SIZE, False, lambda load: None, b"", lost.append),
        KVCache(BlockPools([ALL], 64, SIZE)),
    )
    cached(tier, cache, 1, TEXT[:12])
    cache.pools.drop_cached(1)
    assert len(list(tier.pop_entries())) == 2 and sum(lost) == 1


def test_a_text_that_its_row_does_not_go_on_with_is_not_stored_but_what_others_have_of_it_is() -> None:
    tier, cache = tier_of(ALL), KVCache(BlockPools([ALL], 64, SIZE))
    cached(tier, cache, 0, TEXT[:4])
    for seq, tokens in ((1, TEXT[:12]), (2, TEXT[:6])):
        keys = cache.prefix.keys(tokens)
        cache.allocate_for(seq, len(tokens), match=cache.match(tokens, keys, len(tokens) - 1))
        cache.append(seq, len(tokens) - cache.tables.length(seq))
    cache.cache_and_free(1, TEXT[:12], 12, evict_first=True)
    assert [entry.tokens for entry in tier.pop_entries()] == [tuple(TEXT[:4])]


def test_a_state_is_a_piece_of_the_block_that_it_stands_behind() -> None:
    tier, cache = tier_of(ALL, states=True), KVCache(BlockPools([ALL], 64, SIZE, snapshots=SnapshotRegistry(4)))
    cache.disk_tier = tier
    cache.allocate_for(1, 10)
    cache.append(1, 10)
    name = cache.states.make_snapshot(1, 8)
    cache.cache_and_free(1, TEXT[:10], 10)
    assert [dict(tier.unstored_pieces(entry)).get(STATE) for entry in tier.pop_entries()] == [None, name]


def test_a_load_continues_only_the_text_that_it_was_requested_for() -> None:
    """The same tokens after another beginning have other keys, and other tokens may have the same keys."""
    load, keys = load_of(tier_of(ALL), blocks=2), PrefixCache(SIZE).keys(TEXT)
    content: Any = None
    load.pieces = dict.fromkeys(load.requested_pieces(), content)
    assert load.blocks_after_load == 9 and load.can_continue(TEXT, keys, 2, 39) and load.can_continue(TEXT, keys, 8, 39)
    other = [1, *TEXT[1:]]
    assert not load.can_continue(other, PrefixCache(SIZE).keys(other), 2, 39), "another beginning"
    assert not load.can_continue([*TEXT[:20], 1, *TEXT[21:]], keys, 2, 39), "other tokens under the same keys"
    assert not load.can_continue(TEXT, keys, 2, 35), "longer than the text may begin with"
    assert not load.can_continue(TEXT, keys, 1, 39) and not load.can_continue(TEXT, keys, 9, 39), (
        "a gap, or nothing new"
    )


def test_tokens_in_memory_are_not_counted_as_computed() -> None:
    load = load_of(tier_of(ALL), blocks=2)
    assert load.compute_seconds == 28.0, "7 blocks of 4 tokens, a second each"
