"""Pinned beginnings go last, whatever became of their blocks meanwhile, and have no more than their share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cortexmlx.errors import InvalidRequest, KVCacheFull, PinRefused
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pinned_prefixes import PinnedPrefixes
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.snapshots import SnapshotRegistry
from cortexmlx.kv.spec import KVSpec, LayerGroup
from support.effort import examples

SIZE = 4
FULL = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))
WINDOW = LayerGroup(KVSpec(1, 4, 4, "float32", window=6), (1,))


def text(length: int, seed: int = 0) -> list[int]:
    return [1000 * seed + i for i in range(length)]


class Talk:
    """Texts that are computed and left in a cache, one after the other."""

    def __init__(self, *groups: LayerGroup, blocks: int = 12, **options: Any) -> None:
        self.cache = KVCache(BlockPools(groups or (FULL,), blocks, SIZE, **options))
        self.pins = PinnedPrefixes(self.cache)
        self.count = 0

    def tell(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Compute a text as a job does; returns how much of it was cached."""
        self.count += 1
        keys = self.cache.prefix.keys(tokens, salt)
        match = self.cache.match(tokens, keys, len(tokens) - 1, salt)
        self.cache.allocate_for(self.count, len(tokens), match=match)
        found = self.cache.tables.length(self.count)
        for _ in range(found, len(tokens)):
            self.cache.reserve(self.count, self.cache.tables.length(self.count) + 1)
            self.cache.append(self.count, 1)
            self.cache.register(self.count, tokens, self.cache.tables.length(self.count), keys)
        self.cache.cache_and_free(self.count, tokens, len(tokens), keys)
        self.cache.check_invariants()
        return found


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW,)])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pinned_text_outlives_all_others(groups: Any, when: str) -> None:
    talk = Talk(*groups, blocks=12)
    if when == "after":
        talk.tell(text(17))
    number, tokens = talk.pins.add(text(17), None)
    assert tokens == 16
    talk.tell(text(17))
    for seed in range(1, 9):
        talk.tell(text(20, seed))
    assert talk.tell([*text(16), 7, 7]) == 16
    talk.pins.remove(number)
    for seed in range(1, 9):
        talk.tell(text(20, seed))
    assert talk.tell([*text(16), 7, 7]) == 0


def test_it_goes_before_a_sequence_is_refused_and_is_pinned_again_when_it_is_computed_again() -> None:
    talk = Talk(blocks=8)
    talk.pins.add(text(16), None)
    talk.tell(text(17))
    assert talk.pins.blocks == 4
    talk.cache.allocate_for(99, 7 * SIZE)
    assert talk.pins.blocks == 1, "ends first"
    with pytest.raises(KVCacheFull):
        talk.cache.allocate_for(98, 2 * SIZE)
    talk.cache.free(99)
    talk.tell(text(17))
    assert talk.pins.blocks == 4
    talk.tell(text(15, seed=1))
    talk.tell(text(15, seed=2))
    assert talk.tell(text(17)) == 16


def test_pins_have_their_share_and_not_more() -> None:
    talk = Talk(FULL, WINDOW, blocks=(12, 8))
    with pytest.raises(InvalidRequest, match="whole blocks of 4 tokens, and this has 3 tokens"):
        talk.pins.add(text(3), None)
    first, _ = talk.pins.add(text(20), None)
    assert [len(talk.cache.pools.pinned_keys(group)) for group in (0, 1)] == [5, 2], "the window sees its newest blocks"
    with pytest.raises(
        PinRefused, match=r"takes 2 blocks of 4 tokens beside 5 that are pinned, and pins may have 6 of"
    ):
        talk.pins.add(text(8, seed=1), None)
    talk.pins.add(text(20), None)
    assert len(talk.pins) == 2, "the same again takes nothing"
    talk.pins.add(text(4, seed=1), None)
    talk.pins.remove(first)
    assert len(talk.cache.pools.pinned_keys(0)) == 6, "another pin still holds what one held"
    talk.pins.remove(first)
    assert len(talk.pins) == 2


def test_each_salt_has_pins_of_its_own() -> None:
    talk = Talk(blocks=20)
    talk.pins.add(text(16), "one")
    talk.tell(text(17), "other")
    assert talk.pins.blocks == 0
    talk.tell(text(17), "one")
    assert talk.pins.blocks == 4


def test_pins_move_to_an_empty_cache() -> None:
    talk, other = Talk(), Talk()
    talk.pins.add(text(16), None)
    talk.tell(text(17))
    talk.pins.move_to_cache(other.cache)
    assert talk.pins.blocks == 0 and len(talk.pins) == 1
    other.tell(text(17))
    assert talk.pins.blocks == 4


def test_a_pinned_state_goes_last_and_states_have_their_share() -> None:
    talk = Talk(snapshots=SnapshotRegistry(4), blocks=40)
    snapshots = talk.cache.states.snapshots
    assert snapshots is not None
    number, _ = talk.pins.add(text(16), None)
    talk.tell(text(17))
    talk.pins.pin_state(number)
    entry = talk.cache.prefix.get(talk.cache.prefix.keys(text(16))[-1])
    assert entry is not None and not entry.states
    pinned = snapshots.make(entry.states, SIZE)
    assert pinned is not None
    talk.pins.pin_state(number)
    homes: list[dict[int, int]] = [{} for _ in range(9)]
    for home in homes:
        snapshots.make(home, 1)
    assert pinned in snapshots.numbers() and len(snapshots) == 4
    talk.pins.add(text(16, seed=1), None)
    with pytest.raises(PinRefused, match="2 texts are pinned, and the memory for recurrent states has room for 2"):
        talk.pins.add(text(16, seed=2), None)
    talk.pins.remove(number)
    for _ in range(4):
        snapshots.make({}, 1)
    assert pinned not in snapshots.numbers()


class PinnedTexts(RuleBasedStateMachine):
    """Texts come, are pinned and unpinned, rows take memory; what is pinned goes only when nothing else is left."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = Talk(FULL, WINDOW, blocks=(24, 24))
        self.held: dict[int, int] = {}

    @rule(seed=st.integers(0, 5), length=st.integers(1, 30))
    def tell(self, seed: int, length: int) -> None:
        try:
            self.talk.tell(text(length, seed))
        except KVCacheFull:
            if self.talk.count in self.talk.cache.tables.sequences:
                self.talk.cache.free(self.talk.count)

    @rule(seed=st.integers(0, 5), length=st.integers(4, 30))
    def pin(self, seed: int, length: int) -> None:
        try:
            number, _ = self.talk.pins.add(text(length, seed), None)
        except PinRefused:
            return
        self.held[number] = length

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[number]
        self.talk.pins.remove(number)

    @rule(blocks=st.integers(1, 20))
    def take_memory(self, blocks: int) -> None:
        cache, pools = self.talk.cache, self.talk.cache.pools
        before, others = self.talk.pins.blocks, [p.evictable - len(p.pinned) + p.allocator.free_blocks for p in pools]
        try:
            cache.allocate_for(-1, blocks * SIZE)
        except KVCacheFull:
            return
        if all(blocks <= other for other in others):
            assert self.talk.pins.blocks == before, "a pinned block went though others were there"
        cache.free(-1)

    @invariant()
    def all_fits(self) -> None:
        self.talk.cache.check_invariants()
        if not self.held:
            assert not any(self.talk.cache.pools.pinned_keys(group) for group in (0, 1))


TestPinnedTexts = PinnedTexts.TestCase
TestPinnedTexts.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestPinnedTextsAtLength(PinnedTexts.TestCase):
    settings = settings(max_examples=examples(500), stateful_step_count=50, deadline=None)
