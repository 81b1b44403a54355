"""What the controller concludes from what ranks tell, in any order, with any of them full, damaged, slow or lost."""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cortexmlx.disk.pieces import FLUSH_SECONDS
from cortexmlx.disk.store import MOST_WAITING
from cortexmlx.disk.tier import STATE, DiskLoad
from cortexmlx.distributed.disk import group_store
from cortexmlx.distributed.wire.messages import (
    NAME_BYTES,
    TOO_MUCH,
    CanJoin,
    FlushStore,
    HasRead,
    IndexChanged,
    Join,
    Keep,
    Kept,
    LookAgain,
    ReadPieces,
    Wrote,
)
from cortexmlx.errors import HostLost
from cortexmlx.execution.boundary import Refused
from support.effort import examples
from support.hosts.stub_group import KEYS, Group
from support.hosts.stub_ranks import PART
from support.patience import soon


class Machine(RuleBasedStateMachine):
    """Two or three ranks. What a model of each rank knows is compared with what the controller concludes."""

    @initialize(count=st.integers(1, 3), states=st.booleans())
    def begin(self, count: int, states: bool) -> None:
        self.group = Group([set() for _ in range(count)], states)
        self.told: list[set[bytes]] = [set() for _ in range(count)]
        self.waiting = [0] * count
        self.loads: list[DiskLoad] = []
        self.started = 0
        self.join()

    def join(self) -> None:
        assert isinstance(self.group.store.joined(), bytes)

    def rank(self, number: int) -> Any:
        return self.group.ranks.each[number % len(self.group.ranks.each)]

    ranks = st.integers(0, 2)
    places = st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=4, unique=True)

    @rule(places=places, missing=st.integers(0, 3), number=ranks)
    def keep(self, places: list[int], missing: int, number: int) -> None:
        """Copy some blocks, or snapshots of which one rank lacks some."""
        group = self.group.tier.every[-1] if missing else 0
        keys = [self.group.tier.piece_key(KEYS[place], group) for place in places]
        rank = self.rank(number)
        rank.snapshots_missing = set(keys[:missing]) if group == STATE else set()
        there = self.group.keep(places, group)
        for n, each in enumerate(self.group.ranks.each):
            self.waiting[n] += PART * sum(key not in each.snapshots_missing for key in keys)
        assert list(there) == [key not in rank.snapshots_missing for key in keys]
        rank.snapshots_missing = set()

    @rule(number=ranks)
    def write(self, number: int) -> None:
        if self.rank(number).writing:
            self.rank(number).write()

    @rule(number=ranks)
    def read(self, number: int) -> None:
        if self.rank(number).reading:
            self.rank(number).read()

    @rule(number=ranks)
    def deliver(self, number: int) -> None:
        rank = self.rank(number)
        if not rank.telling:
            return
        told = rank.telling[0]
        self.group.ranks.deliver(rank.number)
        self.group.run()
        self._note(rank.number, told)

    def _note(self, number: int, told: Any) -> None:
        if isinstance(told, IndexChanged):
            self.told[number] |= {key[:NAME_BYTES] for key in told.added}
            self.told[number] -= {key[:NAME_BYTES] for key in told.removed}
        if isinstance(told, Wrote):
            self.waiting[number] -= told.bytes
            if told.why:
                assert not self.group.store.has_room, "a rank is full"
                self.group.store._no_copies_until = 0.0

    @rule(number=ranks, places=places, looks=st.booleans())
    def evict(self, number: int, places: list[int], looks: bool) -> None:
        """Another process takes the room, and the rank sees it, or does not yet."""
        rank = self.rank(number)
        rank.disk -= {key[:NAME_BYTES] for key, (place, _) in self.group.names.items() if place in places}
        if looks:
            rank.look()

    @rule(number=ranks, places=places)
    def write_elsewhere(self, number: int, places: list[int]) -> None:
        """Another process writes the same."""
        self.rank(number).disk |= {key[:NAME_BYTES] for key, (place, _) in self.group.names.items() if place in places}

    @rule(number=ranks, places=places)
    def damage(self, number: int, places: list[int]) -> None:
        rank = self.rank(number)
        names = {key[:NAME_BYTES] for key, (place, _) in self.group.names.items() if place in places}
        rank.damaged |= names & rank.disk

    @rule(number=ranks)
    def fill(self, number: int) -> None:
        self.rank(number).full = not self.rank(number).full

    @rule(blocks=st.integers(0, 6))
    def load(self, blocks: int) -> None:
        asked = len(self.group.ranks.sent)
        load = self.group.load(blocks)
        if load is None:
            return
        self.started += 1
        self.loads.append(load)
        for asks in self.group.ranks.sent[asked:]:
            if isinstance(asks, ReadPieces):
                everywhere = set.intersection(*self.told)
                assert {key[:NAME_BYTES] for key in asks.keys} <= everywhere, "what some rank lacks is asked for"

    @precondition(lambda self: self.loads)
    @rule(which=st.integers(0, 9))
    def let_go(self, which: int) -> None:
        """Its prompt has begun, or was cancelled."""
        load = self.loads.pop(which % len(self.loads))
        self.group.arrived = [(each, found) for each, found in self.group.arrived if each is not load]
        if load.pieces is None:
            self.group.unwanted.append(load)
        load.pieces = None
        del load
        self.group.run()
        self.nothing_is_held_for_nobody()

    def nothing_is_held_for_nobody(self) -> None:
        held = {content.read for _, found in self.group.arrived for content in found.values()}
        reading = set(self.group.store._reads)
        for rank in self.group.ranks.each:
            assert set(rank.held) <= rank.open <= held | reading, "a rank holds what nobody needs"

    @rule()
    def lose(self) -> None:
        """A rank is lost, and all are started again. All loads are forgotten, and disks stay."""
        self.group.ranks.lost = True
        assert not self.group.store.has_room and self.group.load() is None
        with pytest.raises(HostLost):
            self.group.keep([0])
        assert self.group.store.joined() is None and not self.group.store.flush()
        arrivals = self.group.arrivals
        old, disks = self.group.store, [rank.disk for rank in self.group.ranks.each]
        self.loads.clear()
        old.abandon()
        for rank in self.group.ranks.each:
            while rank.telling:
                self.group.ranks.deliver(rank.number)
        self.group.run()
        assert self.group.arrivals == arrivals, "nothing comes of what old ranks tell"
        self.group.arrived.clear()
        self.group.unwanted.clear()
        self.group.arrivals = 0
        self.group.begin(disks)
        self.told, self.waiting = [set() for _ in disks], [0] * len(disks)
        self.started = 0
        self.join()

    @invariant()
    def what_is_there_is_there_on_all_ranks(self) -> None:
        if not hasattr(self, "group"):
            return
        for key in self.group.names:
            everywhere = all(key[:NAME_BYTES] in told for told in self.told)
            assert self.group.store.may_have(key) == everywhere

    @invariant()
    def what_arrived_is_held_by_all_ranks(self) -> None:
        if not hasattr(self, "group"):
            return
        assert self.group.store._waiting == self.waiting
        for _, found in self.group.arrived:
            for content in found.values():
                assert all(content.index < rank.held[content.read] for rank in self.group.ranks.each)

    def teardown(self) -> None:
        """Every load has arrived, and the ranks hold nothing when nobody needs it."""
        if not hasattr(self, "group"):
            return
        self.group.settle()
        self.group.settle()
        assert self.group.arrivals == self.started
        for load in self.loads:
            load.pieces = None
        self.group.arrived.clear()
        self.group.unwanted.clear()
        gc.collect()
        self.group.run()
        assert not any(rank.held or rank.open for rank in self.group.ranks.each)


def two() -> Group:
    group = Group([set(), set()])
    assert isinstance(group.store.joined(), bytes)
    return group


def kept(group: Group, *places: int) -> Group:
    group.keep(list(places))
    group.settle()
    return group


def test_a_load_is_as_long_as_all_ranks_can_read() -> None:
    group = kept(two(), *range(8))
    load = group.load()
    assert load is not None
    names = [group.tier.piece_key(key, 0)[:NAME_BYTES] for key in KEYS]
    group.ranks.each[1].damaged.add(names[5])
    group.settle()
    assert len(group.arrived) == 1
    assert load.loaded == 5 and group.store.stats().read_blocks == 5 and group.store.stats().missed_blocks > 0


def test_a_piece_that_one_rank_could_not_write_is_not_there_and_is_told_once(caplog: Any) -> None:
    group = two()
    group.ranks.each[1].full = True
    for place in range(3):
        kept(group, place)
    assert group.load() is None and not group.store.has_room
    stats = group.store.stats()
    assert (stats.stored_blocks, stats.dropped_blocks, stats.stored_bytes) == (0, 3, 3 * PART)
    told = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1 and "rank 1" in told[0].getMessage() and "it is full" in told[0].getMessage()


def test_a_snapshot_that_one_rank_lacks_is_not_kept() -> None:
    group = Group([set(), set()], states=True)
    keys = [group.tier.piece_key(key, STATE) for key in KEYS[:3]]
    group.ranks.each[1].snapshots_missing = {keys[1]}
    assert list(group.keep([0, 1, 2], STATE)) == [True, False, True]


def test_a_group_that_is_lost_before_a_read_is_sent_is_a_miss() -> None:
    """A load is made in the middle of a plan, which must not end there."""
    group = kept(two(), *range(8))
    group.tier._may_have = lambda piece: True
    group.ranks.lost = True
    load = group.load()
    assert load is not None and load.pieces == {} and group.arrivals == 1


def test_a_rank_that_never_ends_a_read_keeps_nobody_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hang, and nobody waits for its answers while the engine waits for a read alone."""
    group = kept(two(), *range(8))
    monkeypatch.setattr(group_store, "LATE_SECONDS", 0.0)
    monkeypatch.setattr(group_store.pieces, "PATIENCE", 0.0)
    monkeypatch.setattr("cortexmlx.disk.tier._READING_SECONDS", -1e9)
    load = group.load(seconds_per_token=1e-9)
    assert load is not None and group.store._reads[1].limit.ident, "its limit runs"
    group.ranks.each[0].read()
    group.ranks.deliver(0)
    assert soon(lambda: len(group.later) == 2)
    group.run()
    assert load.pieces == {} and group.arrivals == 1 and not group.store._reads
    assert not any(rank.held or rank.open for rank in group.ranks.each), "all drop what they have read"
    assert group.load() is None, "nobody waits for that rank again for a while"
    group.settle()
    assert group.arrivals == 1


def test_a_read_that_ends_or_is_forgotten_leaves_no_thread() -> None:
    group = kept(two(), *range(8))
    assert group.load() is not None
    group.settle()
    assert group.load() is not None
    group.store.abandon()
    assert soon(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))


def test_what_lost_workers_have_read_does_not_arrive() -> None:
    group = kept(two(), *range(8))
    load = group.load()
    assert load is not None
    for rank in group.ranks.each:
        rank.read()
    group.store.abandon()
    group.settle()
    assert load.pieces is None and group.arrivals == 0


def test_ranks_that_write_slowly_are_given_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_store, "MOST_WAITING", 2 * PART)
    assert MOST_WAITING > 0
    group = two()
    group.keep([0, 1])
    assert not group.store.has_room
    group.ranks.each[0].write()
    while group.ranks.each[0].telling:
        group.ranks.deliver(0)
    group.run()
    assert not group.store.has_room, "rank 1 has not written"
    group.settle()
    assert group.store.has_room


def test_a_rank_that_was_given_too_much_is_not_full(caplog: Any) -> None:
    group = two()
    group.keep([0])
    group.store.note(1, Wrote(1, PART, TOO_MUCH))
    assert group.store.has_room and group.store.stats().dropped_blocks == 1 and not caplog.records


def test_nobody_waits_for_a_slow_rank_twice() -> None:
    group = kept(two(), *range(8))
    group.ranks.each[0].slow = True
    assert group.load() is not None
    group.settle()
    assert group.load() is None
    group.store._no_reads_until = 0.0
    assert group.load() is not None


def test_what_another_process_wrote_is_looked_for_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    group = two()
    names = {group.tier.piece_key(key, 0)[:NAME_BYTES] for key in KEYS}
    for rank in group.ranks.each:
        rank.disk |= names
    monkeypatch.setattr(group_store.time, "monotonic", lambda: group.store._looked + 0.5)
    assert group.load() is None and not any(isinstance(asks, LookAgain) for asks in group.ranks.sent)
    monkeypatch.setattr(group_store.time, "monotonic", lambda looked=group.store._looked: looked + 1.5)
    assert group.load() is None and sum(isinstance(asks, LookAgain) for asks in group.ranks.sent) == 1
    assert group.load() is None and sum(isinstance(asks, LookAgain) for asks in group.ranks.sent) == 1
    group.settle()
    assert group.load() is not None


def test_the_identity_is_that_of_all_ranks() -> None:
    group, seen = two(), set()
    for changed in range(3):
        for number, rank in enumerate(group.ranks.each):
            own = bytes([number + 7 * (changed == number + 1)]) * 32
            rank.carry_out = lambda asks, own=own: group_store.Joined(own, "", 1.0)  # type: ignore[method-assign]
        seen.add(group.store.joined())
    assert len(seen) == 3
    group.ranks.each[1].carry_out = lambda asks: group_store.Joined(None, "", 0.25)  # type: ignore[method-assign]
    assert group.store.joined() is None and group.store.hashed == 0.25
    group.ranks.each[0].carry_out = lambda asks: group_store.Joined(None, "odd", 1.0)  # type: ignore[method-assign]
    assert group.store.joined() == "rank 0: odd"
    group.store.note(1, CanJoin())
    assert group.can_join == 1


def test_a_refusal_of_one_rank_is_the_answer_of_all() -> None:
    group = two()
    group.ranks.each[0].carry_out = lambda asks: Kept([True], PART)  # type: ignore[method-assign]
    group.ranks.each[1].carry_out = lambda asks: Refused("no memory", False)  # type: ignore[method-assign]
    assert group.keep([0]) == Refused("no memory", False)
    assert group.store._waiting == [PART, 0]
    group.store.note(0, Wrote(1, PART, ""))
    assert group.store._waiting == [0, 0], "what rank 0 wrote had been counted"


def test_a_rank_has_as_long_for_its_store_as_for_other_calls() -> None:
    """Copying may have to wait for memory, and both for a step that is under way. A user may have set longer limits, or
    none.
    """
    group = kept(two(), 0)
    assert group.ranks.limits == [(Join, None), (Keep, None)]
    assert group.store.flush()
    kind, seconds = group.ranks.limits[-1]
    assert kind is FlushStore and seconds is not None and seconds > FLUSH_SECONDS, "nobody closes for ever"


def test_what_a_rank_tells_of_reads_that_nobody_knows_is_nothing() -> None:
    group = two()
    group.store.note(0, HasRead(99, 3, 1, 5.0, False))
    assert not group.arrived and group.store._rates[0] == 5.0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
