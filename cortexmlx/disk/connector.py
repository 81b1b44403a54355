"""StoreConnector: moves blocks between the KV cache and the store on disk, between two steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from cortexmlx.disk.folder import printable_path
from cortexmlx.disk.segments import Record
from cortexmlx.disk.store import KVStore, ReadRequest
from cortexmlx.disk.stored_prefix import StoredPrefix
from cortexmlx.disk.tier import STATE, DiskLoad, DiskTier, PieceContent
from cortexmlx.errors import PrefixRefused
from cortexmlx.execution.boundary import Refusal, Shapes
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import Key, PrefixEntry
from cortexmlx.stats import StoreState, StoreStats

if TYPE_CHECKING:
    from cortexmlx.disk.setup import StoreSetup
    from cortexmlx.execution.runner import ModelRunner

log = logging.getLogger("cortexmlx")

OnLoadRead = Callable[[DiskLoad, Mapping[Key, PieceContent]], None]
"""Called with a load and those of its pieces that are right, on another thread than the engine's."""

MIN_DISK_WAIT_SECONDS = 2.0
"""Seconds that a prompt waits for the disk even if computing would take less: a drive may have to wake up."""

FLUSH_SECONDS = 5.0
"""For how long `flush` waits until what was copied is written."""

COPY_SHARE = 0.02
"""The share of the time that goes to copying blocks for the store while requests run."""

_STEP_SHARE = 0.1
"""The share of the last step's time that copying takes at most at once, so that no next token comes later by more."""

_IDLE_SECONDS = 0.005
"""For how long an idle engine copies before it looks for new requests."""

_CLOSING_SECONDS = 2.0
"""For how long an engine that closes copies."""

_ENTRIES_PER_COPY = 4
"""How many entries are copied together."""


class StoreConnector:
    """Copies cached blocks to the store on disk between steps, and requests disk loads for prompts.

    Only the engine's thread may use it. `identity` is the model's identity in this store, and part of each piece's key.
    While it is None, nothing is read or written: `enable` sets it, or `disable` says that there is none.
    `hashed_fraction` returns which part of the weights is hashed so far, from 0 to 1.
    """

    def __init__(
        self,
        store: KVStore,
        identity: bytes | None,
        hashed_fraction: Callable[[], float],
        on_load_read: OnLoadRead,
        setup: StoreSetup | None = None,
    ) -> None:
        """`setup` has the model's fingerprint as soon as there is an identity."""
        self._setup = setup
        self._store = store
        self._identity = identity
        self._hashed_fraction = hashed_fraction
        self._on_load_read = on_load_read
        self._runner: ModelRunner | None = None
        self._shapes: Sequence[Shapes] = ()
        self._is_disabled = False
        self._cache: KVCache
        self._tier: DiskTier | None = None
        self._credit = 0.0
        self._last_copy_time = time.perf_counter()

    def set_runner(self, runner: ModelRunner) -> None:
        """Copy blocks out of this runner's arena from now on."""
        self._runner, self._shapes = runner, runner.shapes

    def attach(self, cache: KVCache) -> None:
        """Give an empty cache a disk tier that uses this store."""
        self._cache = cache
        states = cache.states.snapshots
        if (states is None or states.max_snapshots) and not self._is_disabled:
            cache.disk_tier = self._tier = DiskTier(
                cache.groups,
                cache.block_size,
                states is not None,
                self._request_read,
                self._identity,
                self._store.count_dropped,
                self._store.may_have,
            )

    def enable(self, identity: bytes) -> None:
        """Start to read and write under the model's `identity`. Blocks that are cached already are stored, too."""
        self._identity = identity
        if self._tier is not None:
            self._tier.identity = identity

    def disable(self, reason: str) -> None:
        """Stop reading and writing for good, because the model has no identity; `reason` goes to the log."""
        log.warning(
            "the KV store %s is not used (%s): prompts are computed anew", printable_path(self._store.path), reason
        )
        self._is_disabled = True
        self._cache.disk_tier = self._tier = None

    @property
    def state(self) -> StoreState:
        """Whether the store is open, off, or still waits for the hash of the weights."""
        if self._is_disabled:
            return StoreState.OFF
        return StoreState.HASHING if self._identity is None else StoreState.OPEN

    # -- down ---------------------------------------------------------------------------------------------------------

    def copy_between_steps(self, step_seconds: float) -> Refusal | None:
        """Copy a few cached entries for the store while requests run. No step may be in flight."""
        now = time.perf_counter()
        self._credit += COPY_SHARE * (now - self._last_copy_time)
        self._last_copy_time = now
        self._credit = min(self._credit, _STEP_SHARE * step_seconds)
        if self._credit <= 0:
            return None
        copy_seconds, refusal = self._copy_entries(self._credit)
        self._credit -= copy_seconds
        return refusal

    def copy_while_idle(self) -> bool | Refusal:
        """Copy entries for a few milliseconds. Return whether more can be copied, or a refusal of memory."""
        self._last_copy_time = time.perf_counter()
        _, refusal = self._copy_entries(_IDLE_SECONDS)
        return refusal or self._can_copy

    def flush(self) -> bool:
        """Wait until the copied blocks are written. Return False if that takes longer than `FLUSH_SECONDS`."""
        return self._store.writer.flush(FLUSH_SECONDS)

    def close(self) -> None:
        """Copy what is left, for a few seconds at most, and close the store."""
        try:
            deadline = time.perf_counter() + _CLOSING_SECONDS
            refusal = None
            while refusal is None and self._can_copy and time.perf_counter() < deadline:
                _, refusal = self._copy_entries(_IDLE_SECONDS)
        except Exception as error:  # a step that failed has left arrays that cannot be had
            log.debug("not all of the cache was stored: %r", error)
        self._store.close()
        self._runner = None  # and the model with it

    def stats(self) -> StoreStats:
        """Return the store's counts, its state, and the share of the weights that is hashed."""
        hashed_fraction = self._hashed_fraction() if self.state is StoreState.HASHING else 1.0
        return replace(self._store.stats(), state=self.state, hashed=hashed_fraction)

    @property
    def _can_copy(self) -> bool:
        """Whether entries wait to be copied, and the store's writer has room for them."""
        has_entries = self._identity is not None and self._tier is not None and len(self._tier) > 0
        return has_entries and self._store.writer.has_room

    def _copy_entries(self, seconds: float) -> tuple[float, Refusal | None]:
        """Copy entries for about `seconds`. Return the seconds it took, and the refusal of memory if there was one."""
        start_time, copy_seconds = time.perf_counter(), 0.0
        while copy_seconds < seconds and self._can_copy:
            assert self._tier is not None
            refusal = self._store_entries(list(islice(self._tier.pop_entries(), _ENTRIES_PER_COPY)))
            if refusal is not None:
                return copy_seconds, refusal
            copy_seconds = time.perf_counter() - start_time
        return copy_seconds, None

    def _store_entries(self, entries: list[PrefixEntry]) -> Refusal | None:
        """Copy the unstored pieces of some entries out of the arena, and give them to the store's writer."""
        tier = self._tier
        assert tier is not None
        pieces = [(entry, group, target) for entry in entries for group, target in tier.unstored_pieces(entry)]
        for group in tier.all_groups:
            group_pieces = [(entry, target) for entry, piece_group, target in pieces if piece_group == group]
            if not group_pieces:
                continue
            assert self._runner is not None
            copies = self._runner.copy_out(group, [target for _, target in group_pieces])
            if isinstance(copies, Refusal):
                return copies
            records: list[Record] = []
            for (entry, _), arrays in zip(group_pieces, copies, strict=True):
                if arrays is not None:  # the snapshot exists
                    records.append(Record(tier.piece_key(entry.key, group), entry.tokens, arrays))
                    tier.mark_stored(entry, group)
            self._store.writer.enqueue(records)
        return None

    # -- named prefixes -----------------------------------------------------------------------------------------------

    @property
    def store(self) -> KVStore:
        """The store. Any thread may use its writer and its segments."""
        return self._store

    @property
    def is_copying(self) -> bool:
        """Whether cached entries still wait to be copied."""
        return self._tier is not None and len(self._tier) > 0

    def describe_prefix(self, name: str, tokens: Sequence[int], client: str | None, adapter: str) -> StoredPrefix:
        """Return the whole blocks of `tokens` as a named prefix, with what their keys and values depend on. `adapter`
        is the hash of an adapter's content. Raises PrefixRefused if nothing is stored.
        """
        setup, tier = self._setup, self._tier
        if setup is None or tier is None or not setup.fingerprint:
            raise PrefixRefused(f"nothing is stored in {self._store.path}: the log says why")
        blocks = len(tokens) // tier.block_size
        return StoredPrefix(
            name=name,
            model=setup.model,
            fingerprint=setup.fingerprint,
            parts=setup.parts,
            block_size=tier.block_size,
            tokens=tuple(tokens[: blocks * tier.block_size]),
            first_blocks=tuple(tier.first_visible_block(group, blocks) for group in range(len(tier.groups))),
            states=tier.states,
            adapter=adapter,
            client=client,
        )

    def store_again(self, keys: Sequence[Key], missing: Collection[Key]) -> None:
        """Queue entries to be stored again, because a full store has removed their pieces with the keys `missing`."""
        tier = self._tier
        for key in keys if tier is not None else ():
            entry = self._cache.prefix.get(key)
            if entry is not None and tier is not None:
                lost_groups = {group for group in tier.all_groups if tier.piece_key(key, group) in missing}
                entry.on_disk -= lost_groups
                tier.on_cached(entry)

    # -- up -----------------------------------------------------------------------------------------------------------

    def _request_read(self, load: DiskLoad) -> None:
        """Ask the store's reader for the pieces of a load. It reads those that `DiskLoad.choose_pieces` picks."""
        groups = load.piece_groups()

        def on_read(records: dict[bytes, Record]) -> None:
            self._on_load_read(
                load, {key: record for key, record in records.items() if self._has_block_shapes(record, groups[key])}
            )

        self._store.reader.submit(
            ReadRequest(
                load.requested_pieces(), load.choose_pieces, on_read, max(MIN_DISK_WAIT_SECONDS, load.compute_seconds)
            )
        )

    def _has_block_shapes(self, record: Record, group: int) -> bool:
        """Return whether a record's arrays have the shapes of a group's blocks. A state snapshot may have any."""
        return group == STATE or bool(tuple((a.shape, a.dtype.str) for a in record.arrays) == self._shapes[group])
