"""KVStore: a segment store with its reader and writer threads, for one engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from cortexmlx.disk.folder import absolute, shown
from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.disk.threads import OnDone, Reader, Writer
from cortexmlx.stats import StoreStats

log = logging.getLogger("cortexmlx")

CLOSING_SECONDS = 5.0
"""How long closing waits for what is not written yet."""


class KVStore:
    """A segment store with a `writer` and a `reader`, for one engine. `model` is the model's name for people.
    `on_room` and `on_done`: see `Writer`; `on_look`: see `Reader`. Nothing here waits but `close` and `keys`.
    """

    def __init__(
        self,
        segment_store: SegmentStore,
        model: str,
        on_room: Callable[[], None] = lambda: None,
        on_done: OnDone = lambda records, why: None,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self._segments = segment_store
        self.writer = Writer(segment_store, model, on_room, on_done)
        try:
            self.reader = Reader(segment_store, on_look)
        except BaseException:  # no thread is to be had
            self.writer.stop(0.0)
            raise

    @property
    def path(self) -> Path:
        """The folder."""
        return self._segments.path

    def may_have(self, key: bytes) -> bool:
        """Return whether a record is worth requesting.

        A record that another process has just written may not be known yet. If the disk was too slow lately, nothing is
        worth requesting.
        """
        known = self._segments.may_have(key)
        if not known:
            self.reader.refresh()
        return known and not self.reader.paused

    def keys(self, ending: bytes) -> list[bytes] | None:
        """Return the keys of all records that end so; None if the index cannot be read now. It reads the index, so the
        engine's thread should not call it.
        """
        return self._segments.keys(ending)

    def drop(self, records: int) -> None:
        """Count `records` records that left memory before they could be offered."""
        self.writer.dropped += records

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Write what was offered and end the threads, in at most `seconds`. A thread that waits for the disk ends
        later.
        """
        until = time.monotonic() + seconds
        self.reader.stop(0.0)
        self.writer.stop(seconds)
        self.reader.stop(max(0.0, until - time.monotonic()))
        self._segments.close()

    def stats(self) -> StoreStats:
        """Return the counts since the store was opened."""
        writer, reader = self.writer, self.reader
        return StoreStats(
            path=str(self._segments.path),
            bytes_limit=self._segments.limit,
            stored_blocks=writer.stored,
            stored_bytes=writer.stored_bytes,
            dropped_blocks=writer.dropped,
            read_blocks=reader.read,
            read_bytes=reader.read_bytes,
            missed_blocks=reader.missed,
        )


def start_store(
    segment_store: SegmentStore,
    model: str,
    on_room: Callable[[], None] = lambda: None,
    on_done: OnDone = lambda records, why: None,
    on_look: Callable[[], None] = lambda: None,
) -> KVStore | str:
    """Return the KVStore of an open segment store, with its callbacks. If the system gives it no threads, log a warning
    and return why.
    """
    try:
        return KVStore(segment_store, model, on_room, on_done, on_look)
    except RuntimeError as error:
        log.warning("the KV store %s cannot be used (%s): prompts are computed anew", shown(segment_store.path), error)
        segment_store.close()
        return str(error)


def open_segment_store(path: str | Path, limit: int) -> SegmentStore | str:
    """Return the segment store of a folder, which is created if it does not exist. If it cannot be used, log a warning
    and return why.
    """
    try:
        return SegmentStore(absolute(path), limit)
    except (OSError, ValueError) as error:  # a ValueError is of a path that no file system has
        log.warning("the KV store %s cannot be used (%s): prompts are computed anew", shown(path), error)
        return shown(str(error)) or type(error).__name__
