"""StoreConnector: moves blocks between the KV cache and the store on disk, between two steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from cortexmlx.disk.folder import shown
from cortexmlx.disk.segments import Record
from cortexmlx.disk.store import KVStore, ReadRequest
from cortexmlx.disk.tier import STATE, Content, DiskLoad, DiskTier
from cortexmlx.execution.boundary import Refused, Shapes
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import Entry, Key
from cortexmlx.stats import StoreState, StoreStats

if TYPE_CHECKING:
    from cortexmlx.execution.runner import ModelRunner

log = logging.getLogger("cortexmlx")

Arrived = Callable[[DiskLoad, Mapping[Key, Content]], None]
"""Called with a load and those of its pieces that are right, on another thread than the engine's."""

PATIENCE = 2.0
"""Seconds that a prompt waits for the disk even if computing would take less: a drive may have to wake up."""

FLUSH_SECONDS = 5.0
"""For how long `flush` waits until what was copied is written."""

SHARE = 0.02
"""The share of the time that goes to copying blocks for the store while requests run."""

_SHARE_OF_A_STEP = 0.1
"""The share of the last step's time that copying takes at most at once, so that no next token comes later by more."""

_IDLE_SECONDS = 0.005
"""For how long an idle engine copies before it looks for new requests."""

_CLOSING_SECONDS = 2.0
"""For how long an engine that closes copies."""

_AT_ONCE = 4
"""How many entries are copied together."""


class StoreConnector:
    """Decides which cached blocks a store gets, and when; has blocks read that prompts request.

    Only the engine's thread may use it. `identity` is the model's identity in this store, and part of each piece's key.
    While it is None, nothing is read or written: `join` sets it, or `leave` says that there is none. `hashed` returns
    which part of the weights is hashed so far, from 0 to 1.
    """

    def __init__(self, store: KVStore, identity: bytes | None, hashed: Callable[[], float], arrived: Arrived) -> None:
        self._store = store
        self._identity = identity
        self._hashed = hashed
        self._arrived = arrived
        self._runner: ModelRunner | None = None
        self._shapes: Sequence[Shapes] = ()
        self._left = False
        self._cache: KVCache
        self._tier: DiskTier | None = None
        self._credit = 0.0
        self._looked = time.perf_counter()

    def begin(self, runner: ModelRunner) -> None:
        """Keep the blocks of this runner's memory from now on."""
        self._runner, self._shapes = runner, runner.shapes

    def attach(self, cache: KVCache) -> None:
        """Be the disk tier of a cache, which must be empty."""
        self._cache = cache
        states = cache.states.snapshots
        if (states is None or states.most) and not self._left:
            cache.disk_tier = self._tier = DiskTier(
                cache.groups,
                cache.block_size,
                states is not None,
                self._read,
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
        return self._store.writer.flush(FLUSH_SECONDS)

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
        self._runner = None  # and the model with it

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
            refused = self._keep(list(islice(self._tier.to_store(), _AT_ONCE)))
            if refused is not None:
                return took, refused
            took = time.perf_counter() - began
        return took, None

    def _keep(self, entries: list[Entry]) -> Refused | None:
        """Have the pieces of some entries written that are not stored."""
        tier = self._tier
        assert tier is not None
        pieces = [(entry, group, target) for entry in entries for group, target in tier.unstored_pieces(entry)]
        for group in tier.every:
            mine = [(entry, target) for entry, own, target in pieces if own == group]
            if not mine:
                continue
            assert self._runner is not None
            copies = self._runner.copy_out(group, [target for _, target in mine])
            if isinstance(copies, Refused):
                return copies
            records: list[Record] = []
            for (entry, _), arrays in zip(mine, copies, strict=True):
                if arrays is not None:  # the snapshot exists
                    records.append(Record(tier.piece_key(entry.key, group), entry.tokens, arrays))
                    tier.mark_stored(entry, group)
            self._store.writer.offer(records)
        return None

    # -- up -----------------------------------------------------------------------------------------------------------

    def _read(self, load: DiskLoad) -> None:
        """Have the pieces of a load read that are worth reading."""
        groups = load.groups()

        def done(found: dict[bytes, Record]) -> None:
            self._arrived(load, {key: record for key, record in found.items() if self._fits(record, groups[key])})

        self._store.reader.ask(ReadRequest(load.wanted(), load.choose, done, max(PATIENCE, load.seconds)))

    def _fits(self, record: Record, group: int) -> bool:
        """Return whether a record has the shapes of a group's blocks. A state says its shapes itself."""
        return group == STATE or bool(tuple((a.shape, a.dtype.str) for a in record.arrays) == self._shapes[group])
