"""Moves blocks between the KV cache and the store on disk, between two steps."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from cortexmlx.execution.boundary import Refused, Runner, Shapes
from cortexmlx.execution.fingerprint import described, fingerprint
from cortexmlx.execution.mode import ExecutionMode
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.disk_tier import STATE, Content, DiskLoad, DiskTier
from cortexmlx.kv.prefix import Entry, Key
from cortexmlx.models import LoadedModel
from cortexmlx.models.weights_hash import WeightsHash, hash_of_model
from cortexmlx.stats import StoreState, StoreStats
from cortexmlx.store.folder import SECRET, absolute, shown
from cortexmlx.store.kept_hashes import KeptHashes
from cortexmlx.store.record import Record
from cortexmlx.store.segment_store import SegmentStore
from cortexmlx.store.store import KVStore, open_segment_store, start_store
from cortexmlx.store.threads import ReadRequest

log = logging.getLogger("cortexmlx")

Arrived = Callable[[DiskLoad, Mapping[Key, Content]], None]
"""Called with a load and those of its pieces that are right, on another thread than the engine's."""

Later = Callable[[Callable[[], None]], None]
"""Has a function called on the engine's thread, between two steps. Any thread may call it."""

SHARE = 0.02
"""The share of the time that goes to copying blocks for the store while requests run."""

_SHARE_OF_A_STEP = 0.1
"""The share of the last step's time that copying takes at most at once, so that no next token comes later by more."""

_IDLE_SECONDS = 0.005
"""For how long an idle engine copies before it looks for new requests."""

_CLOSING_SECONDS = 2.0
"""For how long an engine that closes copies."""

_FLUSH_SECONDS = 5.0
"""For how long `flush` waits until what was copied is written."""

_PATIENCE = 2.0
"""Seconds that a prompt waits for the disk even if computing would take less: a drive may have to wake up."""

_AT_ONCE = 4
"""How many entries are copied together."""


class StoreConnector:
    """Copies cached blocks out of the arena and gives them to the store; has blocks read that prompts request.

    Only the engine's thread may use it. `identity` is the model's identity in this store, and part of each piece's key.
    While it is None, nothing is read or written: `join` sets it, or `leave` says that there is none. Until then,
    `hashed` returns which part of the weights is hashed.
    """

    def __init__(self, store: KVStore, identity: bytes | None, hashed: Callable[[], float], arrived: Arrived) -> None:
        self._store = store
        self._identity = identity
        self._left = False
        self._hashed = hashed
        self._arrived = arrived
        self._cache: KVCache
        self._runner: Runner
        self._shapes: Sequence[Shapes] = ()
        self._tier: DiskTier | None = None
        self._credit = 0.0
        self._looked = time.perf_counter()

    def begin(self, runner: Runner) -> None:
        """Use this runner from now on."""
        self._runner = runner
        self._shapes = runner.shapes

    def attach(self, cache: KVCache) -> None:
        """Be the disk tier of a cache, which must be empty."""
        self._cache = cache
        states = cache.states.snapshots
        if (states is None or states.most) and not self._left:
            cache.disk_tier = self._tier = DiskTier(
                cache.groups,
                cache.block_size,
                states is not None,
                self._ask,
                self._identity,
                self._store.drop,
                self._store.may_have,
            )

    def join(self, identity: bytes) -> None:
        """Read and write from now on. What is cached already is stored, too."""
        self._identity = identity
        if self._tier is not None:
            self._tier.identity = identity

    def leave(self, why: str) -> None:
        """Read and write nothing, because there is no identity. `why` says the reason."""
        log.warning("the KV store %s is not used (%s): prompts are computed anew", shown(self._store.path), why)
        self._left = True
        self._cache.disk_tier = self._tier = None

    @property
    def state(self) -> StoreState:
        """Whether it reads and writes."""
        if self._left:
            return StoreState.OFF
        return StoreState.HASHING if self._identity is None else StoreState.OPEN

    # -- down ---------------------------------------------------------------------------------------------------------

    def copy_in_between(self, step_seconds: float) -> Refused | None:
        """Copy a few of the entries that are to be stored while requests run. Nothing may be in flight."""
        now = time.perf_counter()
        self._credit += SHARE * (now - self._looked)
        self._looked = now
        self._credit = min(self._credit, _SHARE_OF_A_STEP * step_seconds)
        if self._credit <= 0:
            return None
        took, refused = self._copy(self._credit)
        self._credit -= took
        return refused

    def copy_while_idle(self) -> bool | Refused:
        """Copy for a moment. Return whether more can be copied."""
        self._looked = time.perf_counter()
        _, refused = self._copy(_IDLE_SECONDS)
        return refused or self._can_copy

    def flush(self) -> bool:
        """Wait until what was copied is written. Return False if that takes too long."""
        return self._store.writer.flush(_FLUSH_SECONDS)

    def close(self) -> None:
        """Store what is left, as far as a few seconds allow, and end."""
        try:
            until = time.perf_counter() + _CLOSING_SECONDS
            refused = None
            while refused is None and self._can_copy and time.perf_counter() < until:
                _, refused = self._copy(_IDLE_SECONDS)
        except Exception as error:  # a step that failed has left arrays that cannot be had
            log.debug("not all of the cache was stored: %r", error)
        self._store.close()
        self.__dict__.pop("_runner", None)  # and the model with it

    def stats(self) -> StoreStats:
        """Return the store's counts."""
        hashed = self._hashed() if self.state is StoreState.HASHING else 1.0
        return replace(self._store.stats(), state=self.state, hashed=hashed)

    @property
    def _can_copy(self) -> bool:
        """Whether there is more to copy, and the store has room for it."""
        waits = self._identity is not None and self._tier is not None and len(self._tier) > 0
        return waits and self._store.writer.has_room

    def _copy(self, seconds: float) -> tuple[float, Refused | None]:
        """Copy entries for about `seconds`. Return how many seconds it took, and a refusal of memory if there was
        one.
        """
        began, took = time.perf_counter(), 0.0
        while took < seconds and self._can_copy:
            assert self._tier is not None
            records = self._records(list(islice(self._tier.to_store(), _AT_ONCE)))
            if isinstance(records, Refused):
                return took, records
            self._store.writer.offer(records)
            took = time.perf_counter() - began
        return took, None

    def _records(self, entries: list[Entry]) -> list[Record] | Refused:
        assert self._tier is not None
        records = []
        pieces = [(entry, group, target) for entry in entries for group, target in self._tier.unstored_pieces(entry)]
        for group in self._tier.every:
            mine = [(entry, target) for entry, own, target in pieces if own == group]
            copies = self._runner.copy_out(group, [target for _, target in mine]) if mine else []
            if isinstance(copies, Refused):
                return copies
            for (entry, _), arrays in zip(mine, copies, strict=True):
                if arrays is None:
                    continue
                records.append(Record(self._tier.piece_key(entry.key, group), entry.tokens, arrays))
                self._tier.mark_stored(entry, group)
        return records

    # -- up -----------------------------------------------------------------------------------------------------------

    def _ask(self, load: DiskLoad) -> None:
        def done(found: dict[bytes, Record]) -> None:
            self._arrived(load, self._right(load, found))

        self._store.reader.ask(ReadRequest(load.wanted(), load.choose, done, max(_PATIENCE, load.seconds)))

    def _right(self, load: DiskLoad, found: dict[bytes, Record]) -> dict[bytes, Record]:
        """Return the records that have the shapes of this model's blocks. Runs on the reader's thread, so it must not
        use mlx.
        """
        groups = {load.tier.piece_key(key, group): group for key in load.keys for group in load.tier.every}

        def fits(key: Key, record: Record) -> bool:
            shapes = tuple((array.shape, array.dtype.str) for array in record.arrays)
            return groups[key] == STATE or bool(shapes == self._shapes[groups[key]])

        return {key: record for key, record in found.items() if fits(key, record)}


class StoreSetup:
    """Opens the store in a folder, in three steps. `weights` hashes the weights from before they are loaded, `disk`
    makes the engine's connector, and `begin` has it joined when the hash is known. `cancel` ends the hashing.
    """

    def __init__(self, path: str | Path, limit: int, later: Later) -> None:
        self.weights = WeightsHash(self._hashes)
        self._path = absolute(path)
        self._limit = limit
        self._later = later
        self._described = ""

    @cached_property
    def _segments(self) -> SegmentStore | None:
        return open_segment_store(self._path, self._limit)

    def _hashes(self) -> KeptHashes | None:
        """Return the hashes kept in the folder. The folder is not created for them, since a model that is only loaded
        may store nothing.
        """
        there = "_shelf" in self.__dict__ or os.path.exists(self._path / SECRET)
        return KeptHashes(self._segments.path, self._segments.secret) if there and self._segments is not None else None

    def disk(
        self, loaded: LoadedModel, way: ExecutionMode, others: tuple[object, ...], arrived: Arrived
    ) -> StoreConnector | None:
        """Start the store's threads and return the connector. Return None if there can be no store; then a warning or
        `not_stored` tells the user why.

        Keys and values depend on the model and on `others`. Nobody waits for threads that hash files.
        """
        if not_stored(way) or self._segments is None:
            self.cancel()
            return None
        self._described = described(loaded, way.groups, *others)
        known = None
        if self.weights.ready:
            known = self._identity(self.weights.value() or hash_of_model(loaded.model))
        store = start_store(self._segments, loaded.name, lambda: self._later(lambda: None))
        if store is None or known is not None:
            self.cancel()
        return None if store is None else StoreConnector(store, known, lambda: self.weights.share, arrived)

    def begin(self, disk: StoreConnector, model: Any) -> None:
        """Have the connector joined when the hash of the weights is known, if the model's arrays are still those of
        this moment. The engine may not change them after this call.
        """
        if disk.state is StoreState.HASHING:
            self.weights.hold(model)
            self.weights.when_ready(lambda files: self._later(lambda: self._join(disk, model, files)))

    def _join(self, disk: StoreConnector, model: Any, files: str | None) -> None:
        same = self.weights.still_held(model)
        self.cancel()
        if files is None:
            disk.leave("the model's files were changed, or could not be read, while they were hashed")
        elif not same:
            disk.leave("the model's weights were changed in memory while their files were hashed")
        else:
            disk.join(self._identity(files))

    def _identity(self, weights: str) -> bytes:
        assert self._segments is not None
        name = fingerprint(self._described, weights).encode()
        return hashlib.blake2b(name, key=self._segments.secret, digest_size=32).digest()

    def cancel(self) -> None:
        """Stop hashing, and release the model. Safe to call again."""
        self.weights.cancel()


def not_stored(way: ExecutionMode) -> tuple[str, ...]:
    """Return why nothing of a model goes to a store: one note, or none if it can."""
    return () if way.most_rows is None else ("nothing goes to the KV store: mlx-lm's own caches are not in blocks",)
