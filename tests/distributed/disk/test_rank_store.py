"""A rank keeps and reads what it is told to, tells what became of it, and believes no plan."""

from __future__ import annotations

import queue
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.disk import store as threads
from cortexmlx.disk.index import NAME
from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.disk.store import start_store
from cortexmlx.disk.tier import STATE, PieceLoad
from cortexmlx.distributed.disk import rank_store
from cortexmlx.distributed.disk.rank_store import RankStore
from cortexmlx.distributed.wire.messages import (
    TOO_MUCH,
    AnyTold,
    HasRead,
    IndexChanged,
    Joined,
    Keep,
    Kept,
    RankPiece,
    ReadPieces,
    Wrote,
    part_key,
)
from cortexmlx.errors import HostLost
from cortexmlx.execution.boundary import Refused
from cortexmlx.scheduling.plan import StepKind, StepPlan
from support.patience import PATIENCE

EMPTY = np.zeros(0, np.int32)
PLAN = StepPlan(7, StepKind.FLUSH, (), EMPTY, None, EMPTY, EMPTY, (), EMPTY, None, None, (), 0, 0, (3,), None)
PIECES = [bytes([n]) * 16 for n in range(5)]
TOKENS = np.arange(40, dtype=np.int32).reshape(5, 8)


class Runner:
    """Block `n` is full of the number `n`. Snapshot 3 does not exist."""

    shapes = ((((2, 4), "<f4"),),)
    refused: Refused | None = None

    def copy_out(self, group: int, names: Any) -> Any:
        """As `Runner.copy_out`."""
        if self.refused is not None:
            return self.refused
        blocks = [(np.full((2, 4), n, np.float32),) for n in names]
        return [None if group == STATE and n == 3 else block for n, block in zip(names, blocks, strict=True)]


class Known:
    """An identity that is known."""

    def joined(self) -> Joined:
        """As `Identity.joined`."""
        return Joined(b"me", "", 1.0)

    def when_known(self, call: Any) -> None:
        """It is."""


class Rank:
    """A RankStore, and what it tells."""

    def __init__(self, folder: Path, number: int = 1) -> None:
        self.told: queue.SimpleQueue[AnyTold] = queue.SimpleQueue()
        self.runner: Any = Runner()
        self.segments = SegmentStore(folder, 1 << 30)
        self.store = RankStore(
            number,
            self.runner,
            lambda done, look: start_store(self.segments, "model", on_done=done, on_look=look),
            Known(),
            self.told.put,
        )

    def next(self, kind: type) -> Any:
        """The next thing of a kind that it tells."""
        while not isinstance(told := self.told.get(timeout=PATIENCE), kind):
            pass
        return told

    def said(self, kind: type) -> Any:
        """The next thing of a kind that it has told already. Raises queue.Empty if it has told none."""
        while not isinstance(told := self.told.get_nowait(), kind):
            pass
        return told

    def keep(self, *places: int, group: int = 0) -> Any:
        return self.store.keep(Keep(group, list(places), [PIECES[p] for p in places], TOKENS[list(places)]))

    def read(self, number: int, *places: int, seconds: float = PATIENCE) -> HasRead:
        asks = ReadPieces(number, [PIECES[p] for p in places], [0] * len(places), TOKENS[list(places)], seconds)
        self.store.read(asks)
        told: HasRead = self.next(HasRead)
        return told

    def part(self, number: int, index: int) -> Any:
        """What a plan gets for a piece."""
        loads = (PieceLoad(0, 5, RankPiece(number, index)),)
        (load,) = self.store.with_parts(replace(PLAN, loads=loads)).loads
        return load.content.arrays[0]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.store.close()


def test_what_was_kept_is_read_by_the_next(rank: Rank, tmp_path: Path) -> None:
    assert rank.store.join() == Joined(b"me", "", 1.0)
    kept = rank.keep(0, 1, 2)
    assert isinstance(kept, Kept) and list(kept.there) == [True] * 3 and rank.store.flush(PATIENCE)
    changed, wrote = rank.said(IndexChanged), rank.said(Wrote)
    assert set(changed.added) == {part_key(PIECES[p], 1) for p in (0, 1, 2)} and not changed.removed
    assert wrote == Wrote(3, kept.bytes, "")
    rank.store.close()
    again, other = Rank(tmp_path), Rank(tmp_path, number=2)
    for each in (again, other):
        each.store.join()
    assert set(again.next(IndexChanged).added) == set(changed.added)
    told = again.read(7, 0, 1, 2)
    assert (told.number, told.count) == (7, 3) and told.bytes > 0 and not told.slow
    assert [again.part(7, index).flat[0] for index in range(3)] == [0, 1, 2]
    assert other.read(1, 0).count == 0 and other.told.empty(), "another rank's parts are not its own"
    for each in (again, other):
        each.store.close()


def test_nothing_is_told_before_somebody_asks(rank: Rank) -> None:
    assert rank.told.empty()
    rank.store.join()
    assert rank.store._looked.is_set()


def test_only_the_first_question_waits_for_an_index_that_takes_long(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While weights are hashed, everybody who looks at the engine's statistics asks again."""
    monkeypatch.setattr(rank.store._store.reader, "look", lambda: None)  # type: ignore[union-attr]
    waits: list[float] = []
    monkeypatch.setattr(rank.store._looked, "wait", waits.append)
    for _ in range(3):
        rank.store.join()
    assert waits == [rank_store.OPENING_SECONDS]


def test_a_read_ends_at_the_first_part_that_is_not_right(rank: Rank) -> None:
    rank.store.join()
    rank.keep(0, 1, 3, 4)
    assert rank.store.flush(PATIENCE)
    assert rank.read(1, 0, 1, 2, 3).count == 2, "2 was never kept"
    rank.runner.shapes = ((((2, 4), "<f2"),),)
    assert rank.read(2, 0, 1).count == 0, "they have other shapes"
    rank.runner.shapes = Runner.shapes
    for segment in rank.segments.path.glob("*.safetensors"):
        data = segment.read_bytes()
        segment.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    before = rank.read(3, 0, 1, 3, 4).count
    assert before < 4, "the last one is damaged"
    assert len(rank.next(IndexChanged).removed) == 1


def test_what_follows_a_part_of_another_shape_does_not_take_its_place(rank: Rank) -> None:
    rank.store.join()
    copy_out = rank.runner.copy_out

    def odd(group: int, names: Any) -> Any:
        return [(np.zeros((3, 3), np.float32),) if n == 1 else copy_out(group, [n])[0] for n in names]

    rank.runner.copy_out = odd
    rank.keep(0, 1, 2)
    assert rank.store.flush(PATIENCE) and rank.read(1, 0, 1, 2).count == 1


def test_a_state_may_have_any_shape_and_a_missing_snapshot_is_said(rank: Rank) -> None:
    rank.store.join()
    kept = rank.keep(2, 3, group=STATE)
    assert list(kept.there) == [True, False]
    assert rank.store.flush(PATIENCE)
    rank.store.read(ReadPieces(1, [PIECES[2]], [STATE], TOKENS[2:3], PATIENCE))
    assert rank.next(HasRead).count == 1


def test_refused_memory_is_an_answer(rank: Rank) -> None:
    rank.runner.refused = Refused("no memory", False)
    assert rank.keep(0) == Refused("no memory", False)


def test_a_plan_with_parts_that_are_not_there_is_not_carried_out(rank: Rank) -> None:
    rank.store.join()
    rank.keep(0)
    assert rank.store.flush(PATIENCE) and rank.read(1, 0).count == 1
    assert rank.part(1, 0).flat[0] == 0
    for number, index in ((1, 1), (2, 0)):
        with pytest.raises(HostLost, match="has not read"):
            rank.part(number, index)
    rank.store.drop([1])
    with pytest.raises(HostLost, match="has not read"):
        rank.part(1, 0)
    assert rank.store.with_parts(PLAN) is PLAN


def test_what_is_dropped_while_it_is_read_is_not_held(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.store.join()
    rank.keep(0)
    assert rank.store.flush(PATIENCE)
    read = SegmentStore.read

    def drops(self: SegmentStore, *args: Any) -> Any:
        rank.store.drop([1])
        return read(self, *args)

    monkeypatch.setattr(SegmentStore, "read", drops)
    assert rank.read(1, 0).count == 1
    assert not rank.store._read and not rank.store._open


def test_a_full_disk_and_too_much_at_once_are_told(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.store.join()

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank.segments, "write", full)
    kept = rank.keep(0, 1)
    wrote = rank.next(Wrote)
    assert (wrote.parts, wrote.bytes) == (2, kept.bytes) and "No space left" in wrote.why
    monkeypatch.setattr(threads, "MOST_WAITING", -1)
    monkeypatch.setattr(threads, "SEGMENT_BYTES", 0)
    kept = rank.keep(2)
    assert list(kept.there) == [True] and rank.said(Wrote) == Wrote(1, kept.bytes, TOO_MUCH)


def test_a_long_index_is_told_in_several_messages(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "_AT_ONCE", 2)
    rank.store.join()
    rank.keep(0, 1, 2, 3, 4)
    assert rank.store.flush(PATIENCE)
    told = [rank.next(IndexChanged).added for _ in range(3)]
    assert [len(each) for each in told] == [2, 2, 1] and len({key for each in told for key in each}) == 5


def test_an_index_that_cannot_be_read_now_takes_nothing_away(rank: Rank) -> None:
    """Another process holds it."""
    rank.store.join()
    rank.keep(0, 1)
    assert rank.store.flush(PATIENCE)
    assert len(rank.next(IndexChanged).added) == 2
    with sqlite3.connect(rank.segments.path / NAME, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        index = rank.segments._index
        assert index is not None
        index._file.execute("PRAGMA busy_timeout=1")
        rank.store._on_look()
        other.execute("ROLLBACK")
    rank.store._on_look()
    assert rank.told.qsize() == 1 and rank.said(Wrote).parts == 2, "nothing is gone, and nothing new"


def test_a_folder_that_cannot_be_used_is_said_and_ends_nothing(tmp_path: Path) -> None:
    told: list[AnyTold] = []
    store = RankStore(0, Runner(), lambda done, look: "it is a file", Known(), told.append)  # type: ignore[arg-type]
    assert "cannot be used: it is a file" in store.join().why and store.flush(1.0) and not told
    with pytest.raises(HostLost, match="without a store"):
        store.keep(Keep(0, [0], [PIECES[0]], TOKENS[:1]))
    store.close()
