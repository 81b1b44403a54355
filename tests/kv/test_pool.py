"""A group's blocks under random use, beside plain lists of who owns which."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cortexmlx.errors import KVBlockError
from cortexmlx.kv.pools import BlockPool
from cortexmlx.kv.prefix import PrefixEntry, PrefixNode
from cortexmlx.kv.table import BlockTable
from support.effort import examples

TABLES = 4
TABLE = st.integers(0, TABLES - 1)


class PoolMachine(RuleBasedStateMachine):
    """Tables take blocks, share them and give them up; some are cached and stay without owners."""

    @initialize(blocks=st.integers(1, 20))
    def begin(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.blocks = blocks
        self.tables = [BlockTable() for _ in range(TABLES)]
        self.cached: set[int] = set()
        self.waiting: list[int] = []
        self.passed: list[int] = []

    def owners(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table.blocks)

    def held(self) -> set[int]:
        return {*self.owners(), *self.cached}

    @rule(at=TABLE, more=st.integers(0, 6), beyond=st.integers(0, 4))
    def extend(self, at: int, more: int, beyond: int) -> None:
        """As many as are needed, or as are wanted; a block is taken from nobody, and the old ones stay."""
        free = self.blocks - len(self.held())
        more = min(more, free)
        table, taken = self.tables[at], self.held()
        before = list(table.blocks)
        self.pool.extend_table(table, table.end + more, table.end + more + beyond)
        new = table.blocks[len(before) :]
        assert table.blocks[: len(before)] == before and not taken & set(new) and len(set(new)) == len(new)
        assert len(new) in (more, more + beyond) if more else not new
        if len(new) > more:
            wanted = new[more - 1 :]
            assert wanted == list(range(wanted[0], wanted[0] + len(wanted))), "what is only wanted goes on in its run"

    @rule(source=TABLE, taker=TABLE, at=st.integers(0, 9))
    def share(self, source: int, taker: int, at: int) -> None:
        blocks = self.tables[source].blocks
        if blocks and blocks[at % len(blocks)] not in self.tables[taker].blocks:
            self.pool.share(self.tables[taker], block := blocks[at % len(blocks)])
            self.use_again(block)

    @rule(at=TABLE, place=st.integers(0, 6), passed=st.booleans())
    def give_up(self, at: int, place: int, passed: bool) -> None:
        """What is cached waits to go without owners, anything else goes with its last owner."""
        table = self.tables[at]
        gone = table.remove_before(place) if passed else table.remove_from(place)
        left = self.owners()
        assert self.pool.drop_owner(gone, passed) == sum(not left[b] for b in gone if b not in self.cached)
        late = [b for b in gone if b in self.cached and not left[b]]
        if passed:
            self.passed += late
        else:
            self.waiting += late

    @rule(at=TABLE)
    def cache(self, at: int) -> None:
        for block in set(self.tables[at].blocks[:1]) - self.cached:
            self.cached.add(block)
            self.pool.cached[block] = PrefixEntry(b"", PrefixNode(b""), (block,), (block,))

    @precondition(lambda self: self.cached)
    @rule(pick=st.integers(0, 9))
    def forget(self, pick: int) -> None:
        """One that has owners stays theirs."""
        block = sorted(self.cached)[pick % len(self.cached)]
        self.cached.remove(block)
        self.use_again(block)
        self.pool.uncache(block)

    def use_again(self, block: int) -> None:
        for order in (self.waiting, self.passed):
            if block in order:
                order.remove(block)

    @rule(more=st.integers(1, 5))
    def grow(self, more: int) -> None:
        self.pool.grow(more)
        self.blocks += more

    @rule(less=st.integers(1, 5))
    def shrink(self, less: int) -> None:
        end = set(range(self.blocks - less, self.blocks))
        if less >= self.blocks or end & self.held():
            with pytest.raises(KVBlockError):
                self.pool.shrink(less)
        else:
            self.pool.shrink(less)
            self.blocks -= less

    @rule()
    def compact(self) -> None:
        """Those that hold something come first, in their order, and nothing else is renumbered."""
        places = self.pool.compact()
        assert places == {old: new for new, old in enumerate(sorted(self.held()))}
        for table in self.tables:
            table.blocks = [places[b] for b in table.blocks]
        self.cached = {places[b] for b in self.cached}
        self.waiting, self.passed = ([places[b] for b in order] for order in (self.waiting, self.passed))

    @invariant()
    def counts_are_right_and_nothing_is_lost(self) -> None:
        if hasattr(self, "pool"):
            owners = self.owners()
            assert self.pool.ref_counts.tolist() == [owners[b] for b in range(self.blocks)]
            assert set(self.pool.free_block_numbers()) == set(range(self.blocks)) - self.held()
            self.pool.allocator.check_invariants()
            order = [*self.passed, *self.waiting]
            assert [*self.pool.passed, *self.pool.unused] == order and self.pool.evictable == len(order)
            first = self.pool.next_eviction
            assert first is (self.pool.cached[order[0]] if order else None)
            assert self.pool.owned == len(set(owners))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(60), stateful_step_count=30)


def test_the_last_run_grows_in_place_before_another_begins() -> None:
    """A hole of the same size elsewhere, which was freed later, would be taken first."""
    pool, tables = BlockPool(8), [BlockTable() for _ in range(5)]
    for table, count in zip(tables, (2, 2, 1, 2, 1), strict=True):
        pool.extend_table(table, count, count)
    pool.drop_owner(tables[1].remove_from(0))
    pool.drop_owner(tables[3].remove_from(0))
    pool.extend_table(tables[0], 4, 4)
    assert tables[0].blocks == [0, 1, 2, 3]


def test_what_is_only_wanted_comes_where_the_last_needed_run_has_room() -> None:
    """Of two holes of two blocks the first has two of three that are needed, and the second the third and one more."""
    pool, tables = BlockPool(5), [BlockTable() for _ in range(2)]
    pool.extend_table(tables[0], 2, 2)
    pool.extend_table(tables[1], 1, 1)
    pool.drop_owner(tables[0].remove_from(0))
    pool.extend_table(tables[1], 4, 5)
    assert tables[1].blocks == [2, 0, 1, 3, 4]
