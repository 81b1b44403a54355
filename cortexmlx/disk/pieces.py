"""Where the pieces of cached blocks go, and come from: `PieceStore`, and that of a runner in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cortexmlx.disk.segments import Record
from cortexmlx.disk.store import KVStore, ReadRequest
from cortexmlx.disk.tier import STATE, Content, DiskLoad
from cortexmlx.execution.boundary import Refused, Runner, Shapes
from cortexmlx.kv.prefix import Key
from cortexmlx.stats import StoreStats

Arrived = Callable[[DiskLoad, Mapping[Key, Content]], None]
"""Called with a load and those of its pieces that are right, on another thread than the engine's."""

PATIENCE = 2.0
"""Seconds that a prompt waits for the disk even if computing would take less: a drive may have to wake up."""

FLUSH_SECONDS = 5.0
"""For how long `flush` waits until what was copied is written."""


class PieceStore(Protocol):
    """Keeps pieces on disk, and reads them. Only the engine's thread may use it."""

    @property
    def path(self) -> Path:
        """The folder."""

    @property
    def has_room(self) -> bool:
        """Whether more pieces may be kept now. If not, the engine is woken when they may, unless the disk is full."""

    @property
    def hashed(self) -> float:
        """Which part of the weights is hashed, from 0 to 1, while the model's identity is not known."""

    def begin(self, runner: Runner) -> None:
        """Keep the pieces of this runner's memory from now on."""

    def may_have(self, piece: Key) -> bool:
        """Return whether a piece is worth requesting. Never waits, and asks nobody."""

    def drop(self, pieces: int) -> None:
        """Count pieces that left memory before they could be kept."""

    def keep(
        self, group: int, targets: Sequence[int], keys: Sequence[Key], tokens: Sequence[tuple[int, ...]]
    ) -> Sequence[bool] | Refused:
        """Copy blocks of a layer group, or snapshots if `group` is `STATE`, and have them written soon. Return which of
        them exist. Nothing may be in flight.
        """

    def read(self, load: DiskLoad) -> None:
        """Have the pieces of a load read that are worth reading. `Arrived` is called soon, whatever the disk does."""

    def flush(self) -> bool:
        """Wait until what was kept is written. Return False if that takes too long."""

    def close(self) -> None:
        """Write what waits, as far as a few seconds allow, and end."""

    def stats(self) -> StoreStats:
        """Return the counts since it was opened."""


class LocalPieces:
    """The pieces of a runner in this process, in a `KVStore`. See `PieceStore`. `share` says how much is hashed."""

    def __init__(self, store: KVStore, share: Callable[[], float], arrived: Arrived) -> None:
        self.store = store
        self._share = share
        self._arrived = arrived
        self._runner: Runner
        self._shapes: Sequence[Shapes] = ()

    @property
    def path(self) -> Path:
        """The folder."""
        return self.store.path

    @property
    def has_room(self) -> bool:
        """Whether more pieces may be kept now."""
        return self.store.writer.has_room

    @property
    def hashed(self) -> float:
        """Which part of the weights is hashed."""
        return self._share()

    def begin(self, runner: Runner) -> None:
        """Keep the pieces of this runner's memory from now on."""
        self._runner = runner
        self._shapes = runner.shapes

    def may_have(self, piece: Key) -> bool:
        """Return whether a piece is worth requesting."""
        return self.store.may_have(piece)

    def drop(self, pieces: int) -> None:
        """Count pieces that were not kept."""
        self.store.drop(pieces)

    def keep(
        self, group: int, targets: Sequence[int], keys: Sequence[Key], tokens: Sequence[tuple[int, ...]]
    ) -> Sequence[bool] | Refused:
        """Copy pieces out of the runner's memory, and offer them to the writer."""
        records = records_of(self._runner, group, targets, keys, tokens)
        if isinstance(records, Refused):
            return records
        self.store.writer.offer([record for record in records if record is not None])
        return [record is not None for record in records]

    def read(self, load: DiskLoad) -> None:
        """Have the pieces of a load read that are worth reading."""
        groups = load.groups()

        def done(found: dict[bytes, Record]) -> None:
            self._arrived(load, {k: r for k, r in found.items() if fits(r, groups[k], self._shapes)})

        self.store.reader.ask(ReadRequest(load.wanted(), load.choose, done, max(PATIENCE, load.seconds)))

    def flush(self) -> bool:
        """Wait until what was kept is written."""
        return self.store.writer.flush(FLUSH_SECONDS)

    def close(self) -> None:
        """Write what waits, and end."""
        self.store.close()
        self.__dict__.pop("_runner", None)  # and the model with it

    def stats(self) -> StoreStats:
        """Return the store's counts."""
        return self.store.stats()


def records_of(
    runner: Runner, group: int, targets: Sequence[int], keys: Iterable[Key], tokens: Iterable[tuple[int, ...]]
) -> list[Record | None] | Refused:
    """Return copies of pieces of a runner's memory, with None for a snapshot that does not exist."""
    copies = runner.copy_out(group, targets)
    if isinstance(copies, Refused):
        return copies
    each = zip(keys, tokens, copies, strict=True)
    return [None if arrays is None else Record(key, content, arrays) for key, content, arrays in each]


def fits(record: Record, group: int, shapes: Sequence[Shapes]) -> bool:
    """Return whether a record has the shapes of a group's blocks. A state says its shapes itself."""
    return group == STATE or bool(tuple((a.shape, a.dtype.str) for a in record.arrays) == shapes[group])
