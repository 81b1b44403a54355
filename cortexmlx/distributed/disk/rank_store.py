"""RankStore: a rank's part of the disk tier. It decides nothing: it keeps and reads what the controller names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

from cortexmlx.disk.pieces import fits, records_of
from cortexmlx.disk.segments import Record
from cortexmlx.disk.store import KVStore, OnDone, ReadRequest
from cortexmlx.disk.tier import PieceLoad
from cortexmlx.distributed.wire.messages import (
    TOO_MUCH,
    AnyTold,
    CanJoin,
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
from cortexmlx.execution.boundary import Refused, Runner
from cortexmlx.kv.prefix import Key
from cortexmlx.scheduling.plan import StepPlan

Tell = Callable[[AnyTold], None]
"""Sends something to the controller. Any thread may call it. Raises HostLost."""


class Identity(Protocol):
    """The identity of a rank's part in its store."""

    def joined(self) -> Joined:
        """Return what is known now. Only the thread that owns the model may call it."""

    def when_known(self, call: Callable[[], None]) -> None:
        """Have `call` called, perhaps on another thread, when `joined` has another answer than now. It is not called if
        there will be none.
        """


StartStore = Callable[[OnDone, Callable[[], None]], KVStore | str]
"""Starts the store's threads, with `on_done` and `on_look` of `KVStore`. Returns why if there can be no store."""


OPENING_SECONDS = 1.0
"""For how long a rank that is first asked for its identity waits until it has told what is on its disk, so that the
first prompt of an engine finds it. An index that must be made again may take longer.
"""

_AT_ONCE = 1 << 14
"""How many keys one message has: a step's answer should not wait for a long one."""


def batched(keys: Iterable[Key]) -> Iterator[tuple[Key, ...]]:
    """Yield some keys after the other."""
    rest = iter(keys)
    while some := tuple(islice(rest, _AT_ONCE)):
        yield some


class RankStore:
    """Carries out the controller's calls for the disk tier, and tells it what the store's threads did. Only the thread
    that owns the model may use it.
    """

    def __init__(self, rank: int, runner: Runner, start: StartStore, identity: Identity, tell: Tell) -> None:
        self._rank = rank
        self._runner = runner
        self._identity = identity
        self._tell_controller = tell
        self._lock = threading.Lock()
        self._told: set[Key] = set()
        self._indexing = threading.Lock()
        self._looked = threading.Event()
        self._open: set[int] = set()
        """Reads that were not dropped."""
        self._read: dict[int, tuple[Record, ...]] = {}
        self._asked = False
        self._store = start(self._on_done, self._on_look)

    def join(self) -> Joined:
        """Return the identity of the part, as far as it is known. Nothing is told before the first call."""
        if isinstance(self._store, str):
            return Joined(None, f"its folder cannot be used: {self._store}", 1.0)
        if not self._asked:
            self._asked = True
            self._identity.when_known(lambda: self._tell(CanJoin()))
            self._store.reader.look()
            self._looked.wait(OPENING_SECONDS)
        return self._identity.joined()

    def keep(self, asks: Keep) -> Kept | Refused:
        """Copy parts out of the arena, and have them written soon. Nothing may be in flight."""
        store = self._opened
        keys = [part_key(key, self._rank) for key in asks.keys]
        tokens = map(tuple, asks.tokens.tolist())
        records = records_of(self._runner, asks.group, asks.targets, keys, tokens)
        if isinstance(records, Refused):
            return records
        there = [record for record in records if record is not None]
        size = sum(record.nbytes for record in there)
        accepted = store.writer.offer(there)
        if there and not accepted:
            self._tell(Wrote(len(there), size, TOO_MUCH))
        return Kept([record is not None for record in records], size)

    def read(self, asks: ReadPieces) -> None:
        """Have parts read, and `HasRead` told."""
        store, shapes = self._opened, self._runner.shapes
        keys = [part_key(key, self._rank) for key in asks.keys]
        tokens = dict(zip(keys, map(tuple, asks.tokens.tolist()), strict=True))
        with self._lock:
            self._open.add(asks.number)

        def choose(there: object, rate: float) -> Sequence[Key]:
            assert isinstance(there, dict)
            missing = next((i for i, key in enumerate(keys) if key not in there), len(keys))
            return keys[:missing]

        def done(found: dict[Key, Record]) -> None:
            right: list[Record] = []
            for key, group in zip(keys, asks.groups, strict=True):
                record = found.get(key)
                if record is None or not fits(record, group, shapes):
                    break
                right.append(record)
            with self._lock:
                if asks.number in self._open:
                    self._read[asks.number] = tuple(right)
            size = sum(record.nbytes for record in right)
            self._tell(HasRead(asks.number, len(right), size, store.reader.rate, store.reader.paused))

        store.reader.ask(ReadRequest(tokens, choose, done, asks.seconds))

    def drop(self, numbers: Sequence[int]) -> None:
        """Drop what was read, or is being read."""
        with self._lock:
            self._open.difference_update(numbers)
            for number in numbers:
                self._read.pop(number, None)

    def look(self) -> None:
        """Look for what other processes have written, and tell it."""
        self._opened.reader.look()

    def with_parts(self, plan: StepPlan) -> StepPlan:
        """Return a plan whose loads have this rank's parts. Raises HostLost for parts that are not there."""
        return replace(plan, loads=tuple(self._with_part(load) for load in plan.loads)) if plan.loads else plan

    def flush(self, seconds: float) -> bool:
        """Write what waits, in at most `seconds`. Return whether it is written."""
        return isinstance(self._store, str) or self._store.writer.flush(seconds)

    def close(self) -> None:
        """End the threads, after what waits is written, as far as a few seconds allow."""
        if not isinstance(self._store, str):
            self._store.close()

    @property
    def _opened(self) -> KVStore:
        if isinstance(self._store, str):
            raise HostLost("a rank without a store was asked for what it keeps")
        return self._store

    def _with_part(self, load: PieceLoad) -> PieceLoad:
        piece = load.content
        with self._lock:
            read = self._read.get(piece.read, ()) if isinstance(piece, RankPiece) else ()
        if not isinstance(piece, RankPiece) or piece.index >= len(read):
            raise HostLost("a step loads a part of a block that this rank has not read")
        return replace(load, content=read[piece.index])

    # -- on the store's threads ---------------------------------------------------------------------------------------

    def _on_done(self, records: Sequence[Record], why: str) -> None:
        self._on_look()
        size = sum(record.nbytes for record in records)
        self._tell(Wrote(len(records), size, why))

    def _on_look(self) -> None:
        """Tell how the index has changed since it was told last."""
        store = self._opened
        with self._indexing:
            keys = store.keys(part_key(bytes(16), self._rank)[-1:])
            now = self._told if keys is None else set(keys)
            added, removed = now - self._told, self._told - now
            self._told = now
            for some in batched(added):
                self._tell(IndexChanged(some, ()))
            for some in batched(removed):
                self._tell(IndexChanged((), some))
        self._looked.set()

    def _tell(self, told: AnyTold) -> None:
        with suppress(HostLost):  # the thread that owns the model meets it
            self._tell_controller(told)


# PartIdentity: what names a rank's part in its store, while threads may still hash the files of its weights.


class Hashing(Protocol):
    """Hashes the weights of a model in this process: `StoreSetup`."""

    identity: bytes | None

    @property
    def share(self) -> float:
        """Which part of the weights is hashed, from 0 to 1."""

    def when_known(self, model: Any, call: Callable[[], None]) -> None:
        """Have `call` called when `settle` would wait for nothing."""

    def settle(self, model: Any) -> bytes | str:
        """Return the identity, or why there is none."""


class PartIdentity:
    """The identity of a `model` that is a part. See `Identity` of `rank_store.py`."""

    def __init__(self, setup: Hashing, model: Any) -> None:
        self._setup = setup
        self._model = model
        self._hashed = False
        self._why = ""

    def joined(self) -> Joined:
        """Return what is known now. The first call after the hash is known compares the model with the hashed one."""
        setup = self._setup
        if setup.identity is None and self._hashed and not self._why:
            settled = setup.settle(self._model)
            self._why = settled if isinstance(settled, str) else ""
        known = setup.identity is not None or bool(self._why)
        return Joined(setup.identity, self._why, 1.0 if known else setup.share)

    def when_known(self, call: Callable[[], None]) -> None:
        """Have `call` called when the weights are hashed, unless they are."""

        def hashed() -> None:
            self._hashed = True
            call()

        if self._setup.identity is None:
            self._setup.when_known(self._model, hashed)
