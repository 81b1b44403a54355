"""GroupStore: the disk tier of a model in workers, as its controller sees it. The bytes are with the ranks, and all
decisions are made here.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cortexmlx.disk import pieces
from cortexmlx.disk.folder import shown
from cortexmlx.disk.store import MOST_WAITING, START_RATE
from cortexmlx.disk.tier import DiskLoad
from cortexmlx.distributed.wire.messages import (
    NAME_BYTES,
    TOO_MUCH,
    AnyCall,
    AnyTold,
    CanJoin,
    DropReads,
    FlushStore,
    HasRead,
    IndexChanged,
    Join,
    Joined,
    Keep,
    Kept,
    LookAgain,
    RankPiece,
    ReadPieces,
    Value,
    Wrote,
)
from cortexmlx.distributed.wire.ranks import Ranks
from cortexmlx.errors import HostLost
from cortexmlx.execution.boundary import Refused, Runner
from cortexmlx.kv.prefix import Key
from cortexmlx.stats import StoreStats

log = logging.getLogger("cortexmlx")

Later = Callable[[Callable[[], None]], None]
"""Has a function called on the engine's thread, between two steps. Any thread may call it."""

PAUSE_SECONDS = 60.0
"""Seconds without a copy after some rank could not write, and without a read after some rank took too long."""

LOOK_SECONDS = 1.0
"""After this time, a missing piece makes the ranks look again for what other processes have written."""

LATE_SECONDS = 60.0
"""How much later than it was told to a rank may answer a flush, or end a read. It may be in a step meanwhile."""


@dataclass
class _Read:
    """A read that some ranks have not ended."""

    load: DiskLoad
    keys: tuple[Key, ...]
    begun: Callable[[Sequence[Key]], dict[Key, RankPiece]]
    """Returns the pieces of the read that have these keys. The ranks drop their parts when no such piece is left."""
    limit: threading.Timer
    """Gives the read up."""
    counts: dict[int, int] = field(default_factory=dict)
    """How many parts each rank has read."""


class GroupStore:
    """Keeps pieces with the ranks, and has the ranks read them: see `PieceStore`.

    A piece is there if all ranks have told that they have their part. A read ends at the first piece of which some rank
    could not read its part. While one rank cannot write, none is told to keep anything.

    What ranks tell by themselves is noted between two steps (`later`). `can_join` is called when `joined` has another
    answer. No method raises HostLost but `keep`: the others are called in the middle of a plan, and the next step meets
    the loss.
    """

    def __init__(
        self,
        ranks: Ranks,
        path: Path,
        limit: int,
        piece_bytes: Mapping[int, int],
        later: Later,
        arrived: pieces.Arrived,
        can_join: Callable[[], None],
    ) -> None:
        """`piece_bytes` has the bytes of a part by group, or `STATE`, on the rank with the largest."""
        self._ranks = ranks
        self._path = path
        self._limit = limit
        self._piece_bytes = piece_bytes
        self._later = later
        self._arrived = arrived
        self._can_join = can_join
        count = len(ranks.channels)
        self._indexes = RankIndexes(count)
        self._waiting = [0] * count
        """Bytes that wait to be written, by rank."""
        self._rates = [START_RATE] * count
        self._reads: dict[int, _Read] = {}
        self._numbers = 0
        self._dropped_reads: deque[int] = deque()
        self._no_copies_until = self._no_reads_until = 0.0
        self._looked = time.monotonic()
        self._warned: set[int] = set()
        self._hashed = 0.0
        self._written = [0] * count
        self._unwritten = [0] * count
        """Parts that were written, and that never will be, by rank."""
        self._dropped = self._read = self._missed = 0
        self._stored_bytes = self._read_bytes = 0
        ranks.on_told = lambda rank, told: later(lambda: self.note(rank, told))

    def joined(self) -> bytes | str | None:
        """Return the identity of the whole model in the stores of all ranks; None if it is not known yet, or a text
        that says why there is none.
        """
        answers = [told for told in self._ask_quietly(Join()) if isinstance(told, Joined)]
        if len(answers) < len(self._ranks.names):
            return None  # the group is lost
        self._hashed = min(told.hashed for told in answers)
        for name, told in zip(self._ranks.names, answers, strict=True):
            if told.why:
                return f"{name}: {told.why}"
        identities = [told.identity for told in answers if told.identity is not None]
        if len(identities) < len(answers):
            return None
        return hashlib.blake2b(b"".join(identities), digest_size=32).digest()

    # -- `PieceStore` -------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The folder, which has the same path on all hosts."""
        return self._path

    @property
    def has_room(self) -> bool:
        """Whether all ranks take more pieces now."""
        full = max(self._waiting) >= MOST_WAITING
        return not (full or self._ranks.lost) and time.monotonic() >= self._no_copies_until

    @property
    def hashed(self) -> float:
        """Which part of the weights the slowest rank has hashed."""
        self.joined()
        return self._hashed

    def begin(self, runner: Runner) -> None:
        """The ranks have begun: each with its own runner."""

    def may_have(self, piece: Key) -> bool:
        """Return whether all ranks have told that they have a piece, and none is too slow."""
        if piece in self._indexes:
            return not self._ranks.lost and time.monotonic() >= self._no_reads_until
        now = time.monotonic()
        if now >= self._looked + LOOK_SECONDS:
            self._looked = now
            self._send_quietly(LookAgain())
        return False

    def drop(self, pieces: int) -> None:
        """Count pieces that were not kept."""
        self._dropped += pieces

    def keep(
        self, group: int, targets: Sequence[int], keys: Sequence[Key], tokens: Sequence[tuple[int, ...]]
    ) -> Sequence[bool] | Refused:
        """Have all ranks copy their parts. A piece exists if all parts do."""
        answers = self._ask(Keep(group, targets, keys, np.array(tokens, np.int32)))
        for rank, answer in enumerate(answers):  # a rank that kept its parts writes them whatever the others answered
            self._waiting[rank] += answer.bytes if isinstance(answer, Kept) else 0
        refusals = [answer for answer in answers if isinstance(answer, Refused)]
        if refusals:
            return min(refusals, key=lambda refused: refused.of_arena)
        kept = [answer for answer in answers if isinstance(answer, Kept)]
        return [all(parts) for parts in zip(*(answer.there for answer in kept), strict=True)]

    def read(self, load: DiskLoad) -> None:
        """Have all ranks read the pieces of a load that are worth reading."""
        wanted, groups = load.wanted(), load.groups()
        there = {key: self._piece_bytes[group] for key, group in groups.items() if key in self._indexes}
        chosen = tuple(load.choose(there, min(self._rates)))
        self._missed += len(wanted) - len(there)
        self._numbers += 1
        number = self._numbers
        tokens = np.array([wanted[key] for key in chosen], np.int32)
        seconds = max(pieces.PATIENCE, load.seconds)
        asks = ReadPieces(number, chosen, [groups[key] for key in chosen], tokens, seconds)
        if chosen and self._send_quietly(asks):
            self._reads[number] = _Read(load, chosen, self._pieces_of(number), self._limited(number, seconds))
        else:
            self._arrived(load, {})

    def flush(self) -> bool:
        """Wait until all ranks have written what they were to keep."""
        return self._flush(pieces.FLUSH_SECONDS)

    def close(self) -> None:
        """Have all ranks write what waits. They end their threads when they end."""
        self._flush(pieces.FLUSH_SECONDS)
        self.abandon()

    def abandon(self) -> None:
        """Forget all reads: the workers end, and their loads are forgotten."""
        for read in self._reads.values():
            read.limit.cancel()
        self._reads.clear()

    def stats(self) -> StoreStats:
        """Return the counts of pieces, and the bytes of all ranks together."""
        return StoreStats(
            path=str(self._path),
            bytes_limit=self._limit,
            stored_blocks=min(self._written),
            stored_bytes=self._stored_bytes,
            dropped_blocks=self._dropped + max(self._unwritten),
            read_blocks=self._read,
            read_bytes=self._read_bytes,
            missed_blocks=self._missed,
        )

    # -- what ranks tell ----------------------------------------------------------------------------------------------

    def note(self, rank: int, told: AnyTold) -> None:
        """Note what a rank has told by itself."""
        match told:
            case CanJoin():
                self._can_join()
            case IndexChanged(added, removed):
                self._indexes.change(rank, added, removed)
            case Wrote():
                self._wrote(rank, told)
            case HasRead():
                self._has_read(rank, told)

    def _wrote(self, rank: int, told: Wrote) -> None:
        self._waiting[rank] -= told.bytes
        if not told.why:
            self._written[rank] += told.parts
            self._stored_bytes += told.bytes
            return
        self._unwritten[rank] += told.parts
        if told.why == TOO_MUCH:
            return
        self._no_copies_until = time.monotonic() + PAUSE_SECONDS
        level = logging.DEBUG if rank in self._warned else logging.WARNING
        self._warned.add(rank)
        log.log(
            level,
            "the KV store %s of %s cannot be written (%s): what is new is kept on no host, and tried again in a minute",
            shown(self._path),
            self._ranks.names[rank],
            told.why,
        )

    def _has_read(self, rank: int, told: HasRead) -> None:
        self._rates[rank] = told.rate
        read = self._reads.get(told.number)
        if read is None:
            return
        read.counts[rank] = max(0, min(told.count, len(read.keys)))
        self._read_bytes += told.bytes
        if told.slow:
            self._no_reads_until = time.monotonic() + PAUSE_SECONDS
        if len(read.counts) < len(self._ranks.channels):
            return
        del self._reads[told.number]
        read.limit.cancel()
        count = min(read.counts.values())
        self._read += count
        self._missed += count < len(read.keys)
        self._arrived(read.load, read.begun(read.keys[:count]))

    def _limited(self, number: int, seconds: float) -> threading.Timer:
        """Return what gives up a read that some rank does not end in time. Nobody waits for answers meanwhile, so a
        rank that hangs is found only when the prompt is computed instead.
        """
        timer = threading.Timer(
            min(seconds + LATE_SECONDS, threading.TIMEOUT_MAX), self._later, (lambda: self._give_up(number),)
        )
        timer.daemon = True
        with suppress(RuntimeError):  # no thread is to be had
            timer.start()
        return timer

    def _give_up(self, number: int) -> None:
        read = self._reads.pop(number, None)
        if read is not None:
            self._no_reads_until = time.monotonic() + PAUSE_SECONDS
            self._missed += 1
            self._arrived(read.load, {})

    # -- parts that the ranks hold ------------------------------------------------------------------------------------

    def _pieces_of(self, number: int) -> Callable[[Sequence[Key]], dict[Key, RankPiece]]:
        """Return what makes the pieces of a read. When the last one is gone, or none was made, the ranks drop it."""
        held = _Held()
        weakref.finalize(held, self._let_go, number).atexit = False

        def begun(keys: Sequence[Key]) -> dict[Key, RankPiece]:
            return {key: RankPiece(number, index, held) for index, key in enumerate(keys)}

        return begun

    def _let_go(self, number: int) -> None:
        """Have the ranks drop a read. It is called wherever Python collects garbage."""
        self._dropped_reads.append(number)
        self._later(self._drop_reads)

    def _drop_reads(self) -> None:
        numbers: list[int] = []
        while self._dropped_reads:
            numbers.append(self._dropped_reads.popleft())
        if numbers:
            self._send_quietly(DropReads(numbers))

    # -- all ranks ----------------------------------------------------------------------------------------------------

    def _ask(self, asks: AnyCall, seconds: float | None = None) -> list[Value]:
        number, _ = self._ranks.send(asks)
        return self._ranks.answers(number, range(len(self._ranks.channels)), seconds=seconds)

    def _ask_quietly(self, asks: AnyCall, seconds: float | None = None) -> list[Value]:
        """Return the answers of all ranks, or none if the group is lost."""
        try:
            return self._ask(asks, seconds)
        except HostLost as lost:
            log.debug("the disk tier goes on without the hosts: %s", lost)
            return []

    def _send_quietly(self, asks: AnyCall) -> bool:
        """Send a call to all ranks. Return whether it was sent."""
        try:
            self._ranks.send(asks)
        except HostLost as lost:
            log.debug("the disk tier goes on without the hosts: %s", lost)
            return False
        return True

    def _flush(self, seconds: float) -> bool:
        answers = self._ask_quietly(FlushStore(seconds), seconds + LATE_SECONDS)
        return bool(answers) and all(answer is True for answer in answers)


class _Held:
    """What all pieces of a read hold."""

    __slots__ = ("__weakref__",)


# RankIndexes: which pieces all ranks have on their disks, as far as they have told.


class RankIndexes:
    """The parts that each of `ranks` ranks has. A piece is there if all of them have their part of it."""

    def __init__(self, ranks: int) -> None:
        self._parts: list[set[bytes]] = [set() for _ in range(ranks)]

    def change(self, rank: int, added: Iterable[Key], removed: Iterable[Key]) -> None:
        """Note which parts a rank has now and had not, and the other way round."""
        self._parts[rank].difference_update(key[:NAME_BYTES] for key in removed)
        self._parts[rank].update(key[:NAME_BYTES] for key in added)

    def __contains__(self, piece: Key) -> bool:
        """Return whether all ranks have their part of a piece."""
        name = piece[:NAME_BYTES]
        return all(name in parts for parts in self._parts)

    def __len__(self) -> int:
        """Return how many pieces all ranks have."""
        return len(set.intersection(*self._parts))
