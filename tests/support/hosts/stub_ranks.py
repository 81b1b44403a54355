"""Ranks that are none, behind the interface of `wire.ranks.Ranks`: a test decides when each writes, reads, tells, fails
and forgets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from cortexmlx.distributed.wire.messages import (
    NAME_BYTES,
    AnyTold,
    DropReads,
    FlushStore,
    HasRead,
    IndexChanged,
    Join,
    Joined,
    Keep,
    Kept,
    LookAgain,
    ReadPieces,
    Wrote,
    part_key,
)
from cortexmlx.errors import HostLost

PART = 100
"""Bytes of a part."""


class StubRank:
    """A rank with a disk. What it tells waits in `telling` until a test delivers it."""

    def __init__(self, number: int, disk: set[bytes]) -> None:
        self.number = number
        self.disk = disk
        """The names of the parts that can be read."""
        self.damaged: set[bytes] = set()
        """Parts of the index that cannot be read."""
        self.full = self.slow = False
        self.snapshots_missing: set[bytes] = set()
        self.indexed: set[bytes] = set()
        """The names of the parts that were told."""
        self.telling: deque[AnyTold] = deque()
        self.writing: deque[list[bytes]] = deque()
        self.reading: deque[ReadPieces] = deque()
        self.open: set[int] = set()
        self.held: dict[int, int] = {}
        """How many parts of each read it has."""

    def carry_out(self, asks: Any) -> Any:
        """Answer a call."""
        match asks:
            case Join():
                self.look()
                return Joined(bytes([self.number]) * 32, "", 1.0)
            case Keep():
                there = [key not in self.snapshots_missing for key in asks.keys]
                names = [key[:NAME_BYTES] for key, is_there in zip(asks.keys, there, strict=True) if is_there]
                self.writing.append(names)
                return Kept(there, PART * len(names))
            case ReadPieces():
                self.open.add(asks.number)
                self.reading.append(asks)
            case DropReads(numbers):
                for number in numbers:
                    self.open.discard(number)
                    self.held.pop(number, None)
            case LookAgain():
                self.look()
            case FlushStore():
                while self.writing:
                    self.write()
                return True
        return None

    def look(self) -> None:
        """Tell how the index differs from what was told."""
        added, removed = self.disk - self.indexed, self.indexed - self.disk
        self.indexed = set(self.disk)
        if added or removed:
            self.telling.append(IndexChanged(*([part_key(n + b"?", self.number) for n in e] for e in (added, removed))))

    def write(self) -> None:
        """End the oldest write."""
        names = self.writing.popleft()
        if not self.full:
            self.disk.update(names)
            self.damaged.difference_update(names)
            self.look()
        self.telling.append(Wrote(len(names), PART * len(names), "it is full" if self.full else ""))

    def read(self) -> None:
        """End the oldest read."""
        asks = self.reading.popleft()
        names = [key[:NAME_BYTES] for key in asks.keys]
        right = next((i for i, n in enumerate(names) if n not in self.disk or n in self.damaged), len(names))
        if right < len(names):
            self.disk.discard(names[right])
            self.damaged.discard(names[right])
        if asks.number in self.open:
            self.held[asks.number] = right
        self.telling.append(HasRead(asks.number, right, PART * right, 1e9, self.slow))
        self.look()


class StubRanks:
    """The interface of `Ranks`."""

    def __init__(self, disks: Sequence[set[bytes]]) -> None:
        self.each = [StubRank(number, disk) for number, disk in enumerate(disks)]
        self.channels = tuple(self.each)
        self.names = tuple(f"rank {rank.number}" for rank in self.each)
        self.lost = False
        self.on_told: Callable[[int, AnyTold], None] | None = None
        self.sent: list[Any] = []
        self.limits: list[tuple[type, float | None]] = []
        """The calls whose answers were awaited, and for how many seconds at most."""
        self._answers: dict[int, list[Any]] = {}

    def send(self, asks: Any) -> tuple[int, bytearray]:
        """As `Ranks.send`."""
        if self.lost:
            raise HostLost("the stub is lost")
        self.sent.append(asks)
        self._answers[len(self.sent)] = [rank.carry_out(asks) for rank in self.each]
        return len(self.sent), bytearray()

    def answers(self, number: int, ranks: Sequence[int], seconds: float | None = None) -> list[Any]:
        """As `Ranks.answers`."""
        if self.lost:
            raise HostLost("the stub is lost")
        self.limits.append((type(self.sent[number - 1]), seconds))
        return [self._answers[number][rank] for rank in ranks]

    def deliver(self, rank: int) -> None:
        """Let a rank tell the next thing."""
        told = self.each[rank].telling.popleft()
        if self.on_told is not None:
            self.on_told(rank, told)
