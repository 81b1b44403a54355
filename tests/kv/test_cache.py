"""The cache's books against a plain model: who owns which block, all groups or none, nothing changed by a refusal."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import KVSpec, LayerGroup
from support.effort import examples
from support.scheduling.blocks import cached_text, capacity, check_block_map


def groups(count: int) -> tuple[LayerGroup, ...]:
    return tuple(LayerGroup(KVSpec(1, 4 + i, 4, "float32"), (i,)) for i in range(count))


class CacheMachine(RuleBasedStateMachine):
    """Every token of every sequence is written to a plain array of slots; forks copy what the cache says. In the end
    every sequence must find its own tokens.
    """

    sequences = Bundle("sequences")

    @initialize(
        count=st.integers(1, 3),
        blocks=st.integers(1, 12),
        more=st.sampled_from([0, 0, 1, 6]),
        block_size=st.sampled_from([1, 2, 4, 8]),
    )
    def begin(self, count: int, blocks: int, more: int, block_size: int) -> None:
        self.cache = KVCache(BlockPools(groups(count), blocks, block_size, max_blocks=blocks + more))
        self.slots = [np.full(blocks * block_size, -1) for _ in range(count)]
        self.tokens: dict[int, list[int]] = {}
        self.room: dict[int, int] = {}
        self.born = 0
        self.written = 0

    def books(self) -> Any:
        """Everything that a refused call must leave as it was."""
        tables = {s: [self.cache.tables.block_table(s, g).tolist() for g in self.each_group()] for s in self.tokens}
        lengths = {s: self.cache.tables.length(s) for s in self.tokens}
        return (
            tables,
            lengths,
            self.cache.stats(),
            [self.cache.pools[g].allocator.block_map() for g in self.each_group()],
        )

    def each_group(self) -> range:
        return range(len(self.cache.groups))

    def resize(self) -> None:
        """The slots follow the size of the cache, which grows on demand."""
        for group, blocks in enumerate(self.cache.pools.blocks):
            size = blocks * self.cache.block_size
            self.slots[group] = np.concatenate([self.slots[group], np.full(size, -1)])[:size]

    def owned(self) -> set[int]:
        return {b for s in self.tokens for b in self.cache.tables.block_table(s, 0).tolist()}

    @rule(target=sequences, tokens=st.integers(0, 30), headroom=st.integers(0, 20))
    def allocate(self, tokens: int, headroom: int) -> int:
        self.born += 1
        need = -(-tokens // self.cache.block_size)
        fits = need <= self.cache.pools.max_blocks[0] - len(self.owned())
        before = self.books()
        try:
            assert self.cache.allocate_for(self.born, tokens, headroom) == ()
            assert fits
            self.tokens[self.born] = []
            self.resize()
            held = capacity(self.cache, self.born)
            assert need * self.cache.block_size <= held < tokens + headroom + self.cache.block_size
            last_needed = max(need - 1, 0) * self.cache.block_size
            together = self.cache.tables.find_run(self.born, 0, held, last_needed)
            assert held == need * self.cache.block_size or together is not None, "headroom is in a run of its own"
        except KVCacheFull as error:
            assert not fits and str(need) in str(error)
            assert self.books() == before
        return self.born

    @rule(seq=sequences, more=st.integers(0, 12))
    def append(self, seq: int, more: int) -> None:
        if seq not in self.tokens:
            with pytest.raises(KeyError):
                self.cache.tables.length(seq)
            return
        length = len(self.tokens[seq])
        need = self.cache.tables.blocks_for(length + more) - len(self.cache.tables.block_table(seq, 0))
        fits = need <= self.cache.pools.max_blocks[0] - len(self.owned())
        before = self.books()
        try:
            self.cache.append(seq, more)
            assert fits
        except KVCacheFull:
            assert not fits and self.books() == before
            return
        self.resize()
        values = list(range(self.written, self.written + more))
        self.written += more
        owners = Counter(b for s in self.tokens for b in self.cache.tables.block_table(s, 0).tolist())
        for group in self.each_group():
            slots = self.cache.tables.slots(seq, group, length, more)
            self.slots[group][slots] = values
            if group == 0:
                assert all(owners[s // self.cache.block_size] == 1 for s in slots), "a shared block is written"
        self.tokens[seq] += values

    @rule(seq=sequences, tokens=st.integers(0, 40))
    def reserve(self, seq: int, tokens: int) -> None:
        if seq not in self.tokens:
            return
        before = self.books()
        try:
            self.cache.reserve(seq, tokens)
            self.resize()
            assert capacity(self.cache, seq) >= tokens
        except KVCacheFull:
            assert self.books() == before

    @rule(target=sequences, parent=sequences, part=st.floats(0, 1))
    def fork(self, parent: int, part: float) -> int:
        self.born += 1
        if parent not in self.tokens:
            return self.born
        length = len(self.tokens[parent])
        cut = None if part > 0.8 else int(part * length)
        kept = length if cut is None else cut
        before = self.books()
        try:
            copies = self.cache.fork(parent, self.born, cut)
        except KVCacheFull:
            assert self.books() == before
            assert kept % self.cache.block_size and len(self.owned()) == self.cache.pools.max_blocks[0]
            return self.born
        assert len(copies) == (len(self.cache.groups) if kept % self.cache.block_size else 0)
        self.resize()
        size = self.cache.block_size
        for copy in copies:
            content = self.slots[copy.group][copy.source * size : (copy.source + 1) * size].copy()
            self.slots[copy.group][copy.target * size : (copy.target + 1) * size] = content
        self.tokens[self.born] = self.tokens[parent][:kept]
        return self.born

    @rule(seq=sequences)
    def free(self, seq: int) -> None:
        if self.tokens.pop(seq, None) is not None:
            self.cache.free(seq)

    @rule(seq=sequences, tokens=st.integers(0, 20))
    def give_back(self, seq: int, tokens: int) -> None:
        if seq not in self.tokens:
            return
        free = self.cache.stats().free_blocks
        freed = self.cache.free_spare_blocks(seq, tokens)
        assert self.cache.stats().free_blocks == free + freed
        kept = max(len(self.tokens[seq]), tokens)
        assert capacity(self.cache, seq) <= self.cache.tables.blocks_for(kept) * self.cache.block_size

    @rule()
    def compact(self) -> None:
        size = self.cache.block_size
        for copy in self.cache.compact():
            slots = self.slots[copy.group]
            slots[copy.target * size : (copy.target + 1) * size] = slots[copy.source * size : (copy.source + 1) * size]
        assert all(self.cache.pools[g].allocator.fragmentation() == 0 for g in self.each_group())

    @rule(least=st.integers(1, 12))
    def shrink(self, least: int) -> None:
        gone = self.cache.pools.shrink(least)
        assert gone == 0 or min(self.cache.pools.blocks) >= least
        self.resize()

    @invariant()
    def everybody_finds_their_own_tokens(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        check_block_map(self.cache)
        for seq, tokens in self.tokens.items():
            assert self.cache.tables.length(seq) == len(tokens)
            for group in self.each_group():
                slots = self.cache.tables.slots(seq, group, 0, len(tokens))
                assert self.slots[group][slots].tolist() == tokens
                run = self.cache.tables.find_run(seq, group, len(tokens))
                if run is not None:
                    start = run.start * self.cache.block_size
                    assert slots.tolist() == list(range(start, start + len(tokens)))
        stats = self.cache.stats()
        owners = Counter(b for s in self.tokens for b in self.cache.tables.block_table(s, 0).tolist())
        assert stats.used_blocks == sum(len(self.owned_in(g)) for g in self.each_group())
        assert stats.used_blocks + stats.free_blocks == stats.total_blocks
        assert stats.shared_blocks == len(self.cache.groups) * sum(n > 1 for n in owners.values())
        assert stats.tokens == sum(map(len, self.tokens.values())) and stats.sequences == len(self.tokens)

    def owned_in(self, group: int) -> set[int]:
        return {b for s in self.tokens for b in self.cache.tables.block_table(s, group).tolist()}

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for seq in list(self.tokens):
                self.cache.free(seq)
            stats = self.cache.stats()
            assert stats.free_blocks == stats.total_blocks


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=examples(50), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_headroom_that_fits_beside_the_last_needed_block_is_taken_though_the_sequence_is_scattered() -> None:
    machine = CacheMachine()
    machine.begin(count=1, blocks=6, more=0, block_size=8)
    first = machine.allocate(tokens=9, headroom=0)
    machine.allocate(tokens=1, headroom=0)
    machine.give_back(seq=first, tokens=0)
    last = machine.allocate(tokens=30, headroom=3)  # of the free runs, one has three blocks and one two
    assert machine.cache.tables.block_table(last, 0).tolist() == [3, 4, 5, 0, 1]


def test_a_second_group_that_is_full_leaves_the_first_as_it_was() -> None:
    cache = KVCache(BlockPools(groups(2), 4, 8))
    cache.pools[1].allocator.allocate(3)
    with pytest.raises(KVCacheFull, match="2 more blocks of 8 tokens are needed, 1 of 4 are free"):
        cache.allocate_for(1, 16)
    assert (cache.pools[0].allocator.free_blocks, cache.pools[1].allocator.free_blocks) == (4, 1)
    cache.allocate_for(2, 8)
    with pytest.raises(KVCacheFull):
        cache.append(2, 9)
    assert (cache.tables.length(2), capacity(cache, 2)) == (0, 8)
    with pytest.raises(ValueError, match="sequence 2 already has blocks"):
        cache.allocate_for(2, 8)


def test_a_sequence_lies_in_one_run_where_there_is_one_and_grows_in_place() -> None:
    cache = KVCache(BlockPools(groups(1), 10, 4))
    cache.allocate_for(1, 8)
    cache.allocate_for(2, 4)
    cache.allocate_for(3, 12)
    cache.free(2)
    cache.reserve(1, 12)
    assert cache.tables.block_table(1, 0).tolist() == [0, 1, 2], "the hole behind it was free"
    cache.append(1, 25)
    assert cache.tables.find_run(1, 0, 25) is None and cache.tables.find_run(1, 0, 12) is not None


def test_a_sequence_that_finds_no_room_gives_back_the_partial_block_that_it_would_have_made_its_own() -> None:
    cache = KVCache(BlockPools(groups(1), 4, 4))
    text = list(range(6))
    cached_text(cache, text)
    cache.allocate_for(1, 8)
    match = cache.match([*text, 7, 8, *range(20)], cache.prefix.keys([*text, 7, 8, *range(20)]), 20)
    assert match.partial is not None and match.partial_tokens == 2
    with pytest.raises(KVCacheFull):
        cache.allocate_for(2, 20, match=match)
    again = cache.match([*text, 9], cache.prefix.keys([*text, 9]), 6)
    assert (len(again.entries), again.partial_tokens) == (1, 2)
    cache.check_invariants()
    assert cache.stats().cached_blocks == 2


@pytest.mark.parametrize("again", [False, True])
def test_the_source_of_a_copy_is_nobodys_until_all_of_a_step_is_planned(again: bool) -> None:
    """Not even if another sequence begins with it, and ends, meanwhile."""
    cache = KVCache(BlockPools(groups(1), 4, 4))
    whole, text = list(range(5)), [0, 1, 2, 9]
    cached_text(cache, whole)
    (copy,) = cache.allocate_for(1, 4, match=cache.match(text, cache.prefix.keys(text), 3))
    if again:
        cache.allocate_for(2, 5, match=cache.match(whole, cache.prefix.keys(whole), 4))
        cache.free(2)
    tokens = 4 * (cache.pools.obtainable_blocks(0) + 1)
    with pytest.raises(KVCacheFull):
        cache.allocate_for(3, tokens)
    cache.release_copy_sources()
    cache.allocate_for(3, tokens)
    assert copy.source in cache.tables.block_table(3, 0)
    cache.check_invariants()


def test_the_counts_are_those_of_blocks_and_sequences() -> None:
    """Six tokens that nobody uses in blocks 0 and 1, and a sequence of eight in blocks 2 and 3, and its fork."""
    cache = KVCache(BlockPools([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 6, 4))
    cached_text(cache, list(range(6)))
    cache.allocate_for(7, 8)
    cache.append(7, 8)
    cache.fork(7, 8, 4)
    stats = cache.stats()
    assert (stats.total_blocks, stats.used_blocks, stats.shared_blocks) == (6, 2, 1)
    assert (stats.cached_blocks, stats.free_blocks) == (2, 4), "what is cached and unused counts as free"
    assert (stats.sequences, stats.tokens, stats.single_run_sequences) == (2, 12, 2)
    assert cache.pools.block_counts == (stats.used_blocks, stats.cached_blocks, stats.free_blocks)
    assert stats.fragmentation == 0.0
