"""The prefix cache alone: what blocks are called, and in which order they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cortexmlx.disk.tier import DiskTier
from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import GONE, PrefixCache, PrefixMatch, chain_hash
from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup
from cortexmlx.kv.step import BlockCopy
from support.effort import examples
from support.scheduling.blocks import check_block_map

LAYER = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))


def test_what_was_used_last_goes_last_and_ends_go_before_beginnings() -> None:
    cache = KVCache(BlockPools([LAYER], 12, block_size=2))
    texts = [[i] * 6 for i in (1, 2, 3)]
    for seq, text in enumerate(texts):
        cache.allocate_for(seq, 6)
        cache.append(seq, 6)
        cache.cache_and_free(seq, text, 6)
    hit = cache.match(texts[0], cache.prefix.keys(texts[0]), 6)
    cache.allocate_for(9, 6, match=hit)
    cache.free(9)

    def found() -> list[int]:
        return [len(cache.match(t, cache.prefix.keys(t), 6).entries) for t in texts]

    seen = []
    while cache.pools.drop_cached(1):
        seen.append(found())
    assert seen == [[3, 2, 3], [3, 1, 3], [3, 0, 3], [3, 0, 2], [3, 0, 1], [3, 0, 0], [2, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_no_salt_has_the_key_of_a_block_for_its_root() -> None:
    """A client chooses its name, and could choose one that says what a block's hash says."""
    cache, tokens = PrefixCache(2), (1, 2)
    name = "twelve bytes" + np.asarray(tokens, np.int32).tobytes().decode()
    assert cache.root(name).key != chain_hash(b"salttwelve bytes", tokens)


# The cache and its prefix cache under random use, beside an arena of words: every slot remembers the whole text that
# it was computed from and under which salt, so a block that is handed out for another text or under another salt, or
# written while others read it, is caught at once.


Salt = str | None
Text = tuple[int, ...]
Content = tuple[Salt, Text]
SALTS: tuple[Salt, ...] = (None, "", "one")


def few_keys(parent: bytes, tokens: Sequence[int]) -> bytes:
    """A hash so bad that different texts collide all the time."""
    return bytes([(sum(parent) + 3 * sum(tokens) + len(tokens)) % 5])


HASHES: dict[str, Callable[[bytes, Sequence[int]], bytes]] = {"good": chain_hash, "bad": few_keys}
THEMES = ([1, 1, 2] * 14, [2, 1] * 20, [1, 1, 1, 1, 2, 2] * 7)
ALL = AttentionWindow()
REACHES: list[list[AttentionWindow]] = [
    *(
        [ALL],
        [ALL, ALL],
        [ALL, AttentionWindow(3)],
        [AttentionWindow(1), ALL],
        [AttentionWindow(5)],
        [AttentionWindow(2), AttentionWindow(9)],
        [ALL, AttentionWindow(4, True)],
    ),
    *([AttentionWindow(6, True)], [ALL, AttentionWindow(1), AttentionWindow(7)]),
]
tokens_lists = st.lists(st.integers(1, 2), min_size=1, max_size=9)


class PrefixMachine(RuleBasedStateMachine):
    @initialize(
        attention_windows=st.sampled_from(REACHES),
        blocks=st.integers(3, 14),
        more=st.sampled_from([0, 0, 5]),
        block_size=st.sampled_from([1, 2, 4]),
        hashing=st.sampled_from(sorted(HASHES)),
    )
    def begin(
        self, attention_windows: list[AttentionWindow], blocks: int, more: int, block_size: int, hashing: str
    ) -> None:
        self.attention_windows = attention_windows
        each = [KVSpec(1, 4 + i, 4, "float32", r.tokens, chunked=r.chunked) for i, r in enumerate(attention_windows)]
        specs = [LayerGroup(spec, (i,)) for i, spec in enumerate(each)]
        self.cache = KVCache(
            BlockPools(
                specs, blocks, block_size, max_blocks=blocks + more, prefix=PrefixCache(block_size, HASHES[hashing])
            )
        )
        self.size = block_size
        self.arena: list[dict[int, Content]] = [{} for _ in attention_windows]
        self.texts: dict[int, list[int]] = {}
        self.salts: dict[int, Salt] = {}
        self.known: set[Text] = set()
        self.next = 0

    # -- what a sequence does -----------------------------------------------------------------------------------------

    @rule(
        theme=st.integers(0, 2),
        length=st.integers(0, 24),
        rest=tokens_lists,
        headroom=st.sampled_from([0, 5]),
        salt=st.sampled_from(SALTS),
    )
    def ask(self, theme: int, length: int, rest: list[int], headroom: int, salt: Salt) -> None:
        tokens = [*THEMES[theme][:length], *rest]
        match = self.matched(tokens, salt)
        self.next += 1
        self.salts[self.next] = salt
        try:
            copies = self.cache.allocate_for(self.next, len(tokens), headroom, match)
            self.cache.release_copy_sources()
        except KVCacheFull:
            return
        self.copy(copies)
        self.texts[self.next] = tokens[: self.cache.tables.length(self.next)]
        assert len(self.texts[self.next]) < len(tokens), "at least one token is computed again"
        self.write(self.next, tokens[len(self.texts[self.next]) :])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=tokens_lists, register=st.booleans())
    def go_on(self, data: st.DataObject, more: list[int], register: bool) -> None:
        seq = self.pick(data)
        if len(self.texts[seq]) + len(more) < 40:
            self.write(seq, more, register)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        at = data.draw(st.integers(0, len(self.texts[parent])))
        self.next += 1
        if not self.cache.can_fork(parent, at):
            with pytest.raises(ValueError, match="windows have passed"):
                self.cache.fork(parent, self.next, at)
            return
        try:
            self.copy(self.cache.fork(parent, self.next, at))
        except KVCacheFull:
            return
        self.texts[self.next] = self.texts[parent][:at]
        self.salts[self.next] = self.salts[parent]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        seq = self.pick(data)
        text = self.texts.pop(seq)
        if keep:
            self.cache.cache_and_free(seq, text, len(text), self.keys(text, self.salts[seq]))
            self.known.add(tuple(text))
        else:
            self.cache.free(seq)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.integers(0, 30), spare=st.booleans())
    def keep_window(self, data: st.DataObject, tokens: int, spare: bool) -> None:
        self.cache.add_resume_point(self.pick(data), tokens, spare)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), anchor=st.integers(0, 30))
    def continue_text(self, data: st.DataObject, anchor: int) -> None:
        seq = self.pick(data)
        self.cache.reorder_resume_points(self.matched(self.texts[seq], self.salts[seq]), anchor)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.integers(0, 20))
    def give_back(self, data: st.DataObject, tokens: int) -> None:
        self.cache.free_spare_blocks(self.pick(data), tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=st.integers(0, 6))
    def go_by(self, data: st.DataObject, more: int) -> None:
        """What windows have passed is given up, and no more."""
        seq = self.pick(data)
        length = len(self.texts[seq])
        try:
            self.cache.reserve(seq, length + more)
        except KVCacheFull:
            return
        places = self.cache.tables.blocks_for(length + more)
        for group, attention_window in enumerate(self.attention_windows):
            seen = places - attention_window.oldest_visible(length) // self.size
            assert len(self.cache.tables.block_table(seq, group)) >= seen
            if not more and attention_window.tokens is not None:
                front = self.cache.tables.table_row(seq, group, length)[
                    : attention_window.oldest_visible(length) // self.size
                ]
                assert (front == self.cache.pools.null_block(group)).all()

    # -- what the engine does under pressure --------------------------------------------------------------------------

    @rule(entries=st.one_of(st.none(), st.integers(1, 4)))
    def evict(self, entries: int | None) -> None:
        unused = self.cache.pools.unused_entries
        dropped = self.cache.pools.drop_cached(entries)
        if entries is None:
            assert dropped >= unused and self.cache.stats().cached_blocks == 0
        else:
            assert dropped == min(unused, entries)

    @rule(least=st.integers(1, 8))
    def shrink(self, least: int) -> None:
        before = self.cache.pools.blocks
        dropped = self.cache.pools.shrink(least)
        assert dropped >= 0 and sum(self.cache.pools.blocks) == sum(before) - dropped

    @rule()
    def compact(self) -> None:
        free = [self.cache.pools[g].allocator.free_blocks for g in range(len(self.arena))]
        copies = self.cache.compact()
        assert all(c.target < c.source for c in copies)
        for copy in copies:
            self.copy([copy])
        for group, count in enumerate(free):
            allocator = self.cache.pools[group].allocator
            assert allocator.free_blocks == count == allocator.free_blocks_at_end, "what is free is one run at the end"

    # -- checks -------------------------------------------------------------------------------------------------------

    @rule(every=st.integers(1, 4), group=st.integers(0, 2))
    def store(self, every: int, group: int) -> None:
        """Store some of what is cached on disk."""
        for entry in list(self.cache.prefix.entries)[::every]:
            if group < len(self.attention_windows) and entry.blocks[group] != GONE:
                DiskTier.mark_stored(entry, group)

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        check_block_map(self.cache)
        self.forget_free_blocks()
        for seq, text in self.texts.items():
            assert self.cache.tables.length(seq) == len(text)
            for group, attention_window in enumerate(self.attention_windows):
                oldest = min(attention_window.oldest_visible(len(text)), len(text))
                slots = self.cache.tables.slots(seq, group, oldest, len(text) - oldest).tolist()
                assert [self.arena[group].get(s) for s in slots] == self.prefixes(text, oldest, self.salts[seq])

    @invariant()
    def every_match_is_what_was_asked_for(self) -> None:
        if not hasattr(self, "cache"):
            return
        for text in [*self.known, *map(tuple, self.texts.values())]:
            for salt in SALTS:
                self.matched(list(text), salt)

    def matched(self, tokens: list[int], salt: Salt) -> PrefixMatch:
        match = self.cache.match(tokens, self.keys(tokens, salt), len(tokens) - 1, salt)
        blocks = [e.blocks for e in match.entries]
        length = len(blocks) * self.size + match.partial_tokens
        assert (match.partial is not None) == (match.partial_tokens > 0)
        if match.partial is not None:
            blocks.append(match.partial.blocks)
        assert length <= max(0, len(tokens) - 1)
        for group, (arena, attention_window) in enumerate(zip(self.arena, self.attention_windows, strict=True)):
            oldest = min(attention_window.oldest_visible(length), length)
            slots = [b[group] * self.size + i for b in blocks for i in range(self.size)][oldest:length]
            assert [arena.get(s) for s in slots] == self.prefixes(tokens[:length], oldest, salt)
        return match

    # -- the arena of words -------------------------------------------------------------------------------------------

    def write(self, seq: int, more: list[int], register: bool = True) -> None:
        text, salt = self.texts[seq], self.salts[seq]
        begin = len(text)
        try:
            self.cache.append(seq, len(more))
        except KVCacheFull:
            assert self.cache.tables.length(seq) == begin
            return
        self.forget_free_blocks()
        text += more
        for group, arena in enumerate(self.arena):
            owned = [block for other in self.texts for block in self.cache.tables.block_table(other, group).tolist()]
            for slot, content in zip(
                self.cache.tables.slots(seq, group, begin, len(more)).tolist(),
                self.prefixes(text, begin, salt),
                strict=True,
            ):
                assert owned.count(slot // self.size) == 1, "a block is written while it is shared"
                assert slot // self.size not in self.cache.pools[group].cached, "a cached block is written"
                arena[slot] = content
        if register:
            self.cache.register(seq, text, len(text), self.keys(text, salt))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        values = [[self.arena[c.group].get(c.source * self.size + i) for i in range(self.size)] for c in copies]
        for c, content in zip(copies, values, strict=True):
            for i, text in enumerate(content):
                if text is None:
                    self.arena[c.group].pop(c.target * self.size + i, None)
                else:
                    self.arena[c.group][c.target * self.size + i] = text

    def forget_free_blocks(self) -> None:
        for group, arena in enumerate(self.arena):
            for run in self.cache.pools[group].allocator.free_runs():
                for slot in range(run.start * self.size, run.stop * self.size):
                    arena.pop(slot, None)
            for slot in [s for s in arena if s >= self.cache.pools.blocks[group] * self.size]:
                del arena[slot]

    def prefixes(self, text: Sequence[int], begin: int, salt: Salt) -> list[Content]:
        return [(salt, tuple(text[: i + 1])) for i in range(begin, len(text))]

    def keys(self, tokens: list[int], salt: Salt) -> list[bytes]:
        return self.cache.prefix.keys(tokens, salt)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.texts)))

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for seq in self.texts:
            self.cache.free(seq)
        self.cache.pools.drop_cached()
        assert len(self.cache.prefix) == 0
        for group in range(len(self.arena)):
            allocator = self.cache.pools[group].allocator
            assert allocator.free_blocks == allocator.total_blocks == self.cache.pools.blocks[group]


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(
    max_examples=examples(80), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_salt_that_nobody_uses_any_more_leaves_nothing_behind() -> None:
    cache = KVCache(BlockPools([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 8, 2))
    for client in range(1000):
        tokens, salt = [1, 2, 3], str(client)
        match = cache.match(tokens, cache.prefix.keys(tokens, salt), 2, salt)
        assert not match.entries and match.partial is None
        cache.allocate_for(client, 3, match=match)
        cache.append(client, 3)
        del match
        cache.cache_and_free(client, tokens, 3, cache.prefix.keys(tokens, salt))
        cache.check_invariants()
    assert len(cache.prefix._roots) <= 1 + 8
