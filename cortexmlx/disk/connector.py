"""Moves blocks between the KV cache and the store on disk, between two steps."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from itertools import islice

from cortexmlx.disk.folder import shown
from cortexmlx.disk.pieces import PieceStore
from cortexmlx.disk.tier import DiskTier
from cortexmlx.execution.boundary import Refused, Runner
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import Entry
from cortexmlx.stats import StoreState, StoreStats

log = logging.getLogger("cortexmlx")

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
    While it is None, nothing is read or written: `join` sets it, or `leave` says that there is none.
    """

    def __init__(self, store: PieceStore, identity: bytes | None) -> None:
        self._store = store
        self._identity = identity
        self._left = False
        self._cache: KVCache
        self._tier: DiskTier | None = None
        self._credit = 0.0
        self._looked = time.perf_counter()

    def begin(self, runner: Runner) -> None:
        """Use this runner from now on."""
        self._store.begin(runner)

    def restart(self, store: PieceStore) -> None:
        """Use another store from now on, whose identity is not known: the workers were started again. No load may be
        open.
        """
        self._store = store
        self._identity = None
        if self._tier is not None:
            self._tier.identity = None

    def attach(self, cache: KVCache) -> None:
        """Be the disk tier of a cache, which must be empty."""
        self._cache = cache
        states = cache.states.snapshots
        if (states is None or states.most) and not self._left:
            cache.disk_tier = self._tier = DiskTier(
                cache.groups,
                cache.block_size,
                states is not None,
                lambda load: self._store.read(load),
                self._identity,
                lambda pieces: self._store.drop(pieces),
                lambda piece: self._store.may_have(piece),
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
        return self._store.flush()

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

    def stats(self) -> StoreStats:
        """Return the store's counts."""
        hashed = self._store.hashed if self.state is StoreState.HASHING else 1.0
        return replace(self._store.stats(), state=self.state, hashed=hashed)

    @property
    def _can_copy(self) -> bool:
        """Whether there is more to copy, and the store has room for it."""
        waits = self._identity is not None and self._tier is not None and len(self._tier) > 0
        return waits and self._store.has_room

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
            keys, tokens = [tier.piece_key(e.key, group) for e, _ in mine], [e.tokens for e, _ in mine]
            there = self._store.keep(group, [target for _, target in mine], keys, tokens)
            if isinstance(there, Refused):
                return there
            for (entry, _), kept in zip(mine, there, strict=True):
                if kept:
                    tier.mark_stored(entry, group)
        return None
