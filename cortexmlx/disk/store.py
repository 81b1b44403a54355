"""KVStore: a segment store with its reader and writer threads, for one engine."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cortexmlx.disk.folder import absolute_path, printable_path
from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.disk.segments import Record
from cortexmlx.stats import StoreStats
from cortexmlx.system.machine import lower_thread_priority

log = logging.getLogger("cortexmlx")

CLOSING_SECONDS = 5.0
"""How long closing waits for what is not written yet."""


class KVStore:
    """A segment store with its writer and reader threads, for one engine. `model` is the model's name for people.
    `on_room`: see `RecordWriter`. Only `close` may wait.
    """

    def __init__(self, segment_store: SegmentStore, model: str, on_room: Callable[[], None] = lambda: None) -> None:
        self._segments = segment_store
        self.writer = RecordWriter(segment_store, model, on_room)
        try:
            self.reader = RecordReader(segment_store)
        except BaseException:  # no thread is to be had
            self.writer.stop(0.0)
            raise

    @property
    def segments(self) -> SegmentStore:
        """The segment store, which any thread may use."""
        return self._segments

    @property
    def path(self) -> Path:
        """The folder of the store."""
        return self._segments.path

    def may_have(self, key: bytes) -> bool:
        """Return whether a record may exist and is worth requesting.

        A record that another process has just written may not be known yet. If the disk was too slow lately, or the
        store is opened for longer than a request has waited, nothing is worth requesting.
        """
        may_exist = self._segments.may_have(key)
        if not may_exist:
            self.reader.refresh()
        return may_exist and not (self.reader.is_paused or self.reader.is_opening_late)

    def count_dropped(self, records: int) -> None:
        """Count `records` records that left memory before they were given to the writer."""
        self.writer.dropped_records += records

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Write what is queued and end the threads, within `seconds`. A thread waiting for the disk ends later."""
        deadline = time.monotonic() + seconds
        self.reader.stop(0.0)
        self.writer.stop(seconds)
        self.reader.stop(max(0.0, deadline - time.monotonic()))
        self._segments.close()

    def stats(self) -> StoreStats:
        """Return the counts since the store was opened."""
        writer, reader = self.writer, self.reader
        return StoreStats(
            path=str(self._segments.path),
            bytes_limit=self._segments.limit,
            stored_blocks=writer.stored_records,
            stored_bytes=writer.stored_bytes,
            dropped_blocks=writer.dropped_records,
            read_blocks=reader.read_records,
            read_bytes=reader.read_bytes,
            missed_blocks=reader.missed_records,
        )


def start_store(segment_store: SegmentStore, model: str, on_room: Callable[[], None] = lambda: None) -> KVStore | str:
    """Start the threads of a segment store, which open it, and return its KVStore. On failure, log a warning and return
    why.
    """
    try:
        return KVStore(segment_store, model, on_room)
    except RuntimeError as error:
        log.warning(
            "the KV store %s cannot be used (%s): prompts are computed anew", printable_path(segment_store.path), error
        )
        segment_store.close()
        return str(error)


def make_segment_store(path: str | Path, limit: int) -> SegmentStore | str:
    """Return a folder's segment store, not yet open. Create the folder if need be. On failure, log a warning and return
    why.
    """
    try:
        return SegmentStore(absolute_path(path), limit)
    except (OSError, ValueError) as error:  # a ValueError is of a path that no file system has
        log.warning("the KV store %s cannot be used (%s): prompts are computed anew", printable_path(path), error)
        return printable_path(str(error)) or type(error).__name__


# The threads of a store: one writes, one reads, one watches how long reading takes. Nobody waits for them.
#
# All are started when the store is opened. No thread is started later, on the engine's thread, where a failure would
# end every running request.


MAX_WAITING = 64 << 20
"""Bytes of records that may wait to be written. Beyond them, records are dropped."""

SEGMENT_BYTES = 32 << 20
"""Bytes of records after which a segment is written, however soon more records come."""

_SEGMENTS = 4
"""How many segments fit into a store at least, so that one can be replaced by another."""

LINGER_SECONDS = 0.25
"""Seconds after the last record in which further records can still join the same segment."""

MAX_LINGER = 1.0
"""Seconds after its first record in which a segment is written, whatever comes."""

_PAUSE = 60.0
"""Seconds without a write after the disk has refused one, and without a read after one that took too long."""

_GRACE = 0.25
"""Seconds that a record may still take when the time of its request is over."""

START_RATE = 1e9
"""The estimate of bytes read per second until something was read. What is read was written lately, so it is in the
system's own cache, or on a drive that is about as fast.
"""

REFRESH_SECONDS = 1.0
"""After this time, a missing record makes the reader look again for what other processes have written."""

_RATE_WEIGHT = 0.3
"""Weight of the newest measurement in the running mean of the rate."""

_MIN_MEASURED = 1 << 20
"""Bytes below which a measurement tells more about the start of reading than about the rate."""


class RecordWriter:
    """A thread that opens the store and writes records, several in one segment. The reader waits for the opening. After
    records were refused, `on_room` is called from this thread when it accepts records again.

    `stored_records` records with `stored_bytes` bytes have been written. `dropped_records` records never will be.
    """

    def __init__(self, segment_store: SegmentStore, model: str, on_room: Callable[[], None]) -> None:
        self.stored_records = self.stored_bytes = self.dropped_records = 0
        self._segments = segment_store
        self._model = model
        self._on_room = on_room
        self._records: deque[Record] = deque()
        self._queued_bytes = 0
        self._busy = True
        self._has_refused = self._is_flushing = self._stopping = False
        self._condition = threading.Condition()
        self._paused_until = 0.0
        self._thread = threading.Thread(target=self._run_thread, name="cortexmlx-store-writer", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether a record would be accepted now. If not, `on_room` is called as soon as one would be."""
        with self._condition:
            self._has_refused = self._queued_bytes >= MAX_WAITING and not self._stopping
            return not self._has_refused

    def enqueue(self, records: Sequence[Record]) -> bool:
        """Queue records to be written, without waiting. Return False if the queue is full; then they are dropped."""
        size = sum(record.nbytes for record in records)
        with self._condition:
            if self._stopping or self._queued_bytes + size > MAX_WAITING + SEGMENT_BYTES:
                self.dropped_records += len(records)
                return False
            self._records.extend(records)
            self._queued_bytes += size
            self._condition.notify_all()
            return True

    def flush(self, seconds: float) -> bool:
        """Wait up to `seconds` until everything is written. Return whether it is."""
        with self._condition:
            self._is_flushing = True
            self._condition.notify_all()
            return self._condition.wait_for(lambda: not self._records and not self._busy, seconds)

    def stop(self, seconds: float) -> None:
        """Write what is queued, for at most `seconds`, and end the thread. Do not wait if it is opening the store."""
        deadline = time.monotonic() + seconds
        if self._queued_bytes:
            self.flush(seconds)
        with self._condition:
            self._stopping = True
            self.dropped_records += len(self._records)
            self._records.clear()
            self._condition.notify_all()
        if not self._segments.stop_opening():
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run_thread(self) -> None:
        """Open the store and write segments until `stop`: the target of the thread."""
        lower_thread_priority()
        self._segments.open()
        while (records := self._next_segment()) is not None:
            self._write_segment(records)

    def _next_segment(self) -> list[Record] | None:
        """Wait for the records of the next segment, and return them; None after `stop`."""
        with self._condition:
            self._busy = False
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._records or self._stopping)
            deadline = time.monotonic() + MAX_LINGER
            while not (self._is_flushing or self._stopping or self._queued_bytes >= SEGMENT_BYTES):
                if not self._condition.wait(LINGER_SECONDS) or time.monotonic() >= deadline:
                    break
            if self._stopping:
                return None
            self._busy = True
            records: list[Record] = []
            size, max_bytes = 0, min(SEGMENT_BYTES, self._segments.limit // _SEGMENTS)
            while self._records and (not records or size + self._records[0].nbytes <= max_bytes):
                records.append(self._records.popleft())
                size += records[-1].nbytes
            if not self._records:
                self._is_flushing = False
            return records

    def _write_segment(self, records: Sequence[Record]) -> None:
        """Write the records of one segment, or drop them if the disk fails or failed lately."""
        try:
            fits_limit = sum(record.nbytes for record in records) <= self._segments.limit
            if fits_limit and time.monotonic() >= self._paused_until:
                new = self._segments.write(self._model, records)
                self.stored_records += new
                self.stored_bytes += sum(record.nbytes for record in records) if new else 0
            else:
                self.dropped_records += len(records)
        except Exception as error:
            self.dropped_records += len(records)
            self._paused_until = time.monotonic() + _PAUSE
            self._segments.warn_once("cannot be written", error, "what is new is not kept there")
        with self._condition:
            self._queued_bytes -= sum(record.nbytes for record in records)
            report_room = self._has_refused and self._queued_bytes <= MAX_WAITING // 2
            self._has_refused = self._has_refused and not report_room
        if report_room:
            self._on_room()


@dataclass(frozen=True, eq=False)
class ReadRequest:
    """A request for records by key, and what to do with those that were read."""

    tokens: Mapping[bytes, Sequence[int]]
    """The keys of the records that may exist, each with its tokens."""
    choose: Callable[[Mapping[bytes, int], float], Sequence[bytes]]
    """Returns the keys to read, in order, given the bytes of each record that exists and the bytes read per second.
    Reading ends at the first record that fails.
    """
    on_records: Callable[[dict[bytes, Record]], None]
    """Called once with the records that are right, on a thread of the reader's, whatever the disk does."""
    seconds: float
    """For how many seconds after the request records are read. `on_records` is called about then at the latest."""


_REFRESH_REQUEST = ReadRequest({}, lambda there, rate: [], lambda found: None, 0.0)
"""Only looks for what other processes have written."""


class RecordReader:
    """Reads records on a thread, one request after the other. Another thread answers requests that take too long,
    without records.

    `rate` is how many bytes are read per second. `read_records` records with `read_bytes` bytes were right.
    `missed_records` records did not exist, or were damaged.
    """

    def __init__(self, segment_store: SegmentStore) -> None:
        self.read_records = self.read_bytes = self.missed_records = 0
        self.rate = START_RATE
        self._segments = segment_store
        self._requests: deque[tuple[ReadRequest, float]] = deque()
        self._answer_deadlines: dict[ReadRequest, float] = {}
        """The readings that are not answered, and when each is given up."""
        self._early_requests: set[ReadRequest] = set()
        """Those that came before the store was open."""
        self._paused_until = 0.0
        self._has_missed_opening = False
        self._last_refresh_time = time.monotonic()
        self._stopping = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run_thread, name="cortexmlx-store-reader", daemon=True)
        self._watcher = threading.Thread(target=self._watch_timeouts, name="cortexmlx-store-watcher", daemon=True)
        try:
            self._thread.start()
            self._watcher.start()
        except BaseException:  # no thread is to be had
            self._signal_stop()
            raise

    def submit(self, request: ReadRequest) -> None:
        """Queue a request, without waiting. Its `on_records` is called in any case, unless the reader is stopped."""
        deadline = time.monotonic() + request.seconds
        with self._condition:
            if self._stopping:
                return
            if request is not _REFRESH_REQUEST:
                self._answer_deadlines[request] = deadline + _GRACE
                if not self._segments.is_open:
                    self._early_requests.add(request)
            self._requests.append((request, deadline))
            self._condition.notify_all()

    @property
    def is_paused(self) -> bool:
        """Whether a request took too long lately, so that nobody should wait for another one."""
        return time.monotonic() < self._paused_until

    @property
    def is_opening_late(self) -> bool:
        """Whether a request timed out before the store was open, and the store is still not open."""
        return self._has_missed_opening and not self._segments.is_open

    def _watch_timeouts(self) -> None:
        """Answer every request that takes too long, without records: the target of the second thread."""
        while True:
            with self._condition:
                if self._stopping:
                    return
                now = time.monotonic()
                late_requests = [
                    (request, request in self._early_requests)
                    for request, deadline in self._answer_deadlines.items()
                    if deadline <= now
                ]
                if not late_requests:
                    self._condition.wait(min(self._answer_deadlines.values()) - now if self._answer_deadlines else None)
            for request, is_early in late_requests:
                self._pause(request, is_early)
                self._answer(request, {})

    def _pause(self, request: ReadRequest, is_early: bool) -> None:
        """Pause reading for a minute, because a request took too long: both threads may notice that. A store that is
        still being opened is not slow: its index may be made anew, after a crash.
        """
        if is_early:
            self._has_missed_opening = True
            return
        self._paused_until = time.monotonic() + _PAUSE
        self._segments.warn_once("is slow", f"{request.seconds:.1f} s were not enough for a reading")

    def _answer(self, request: ReadRequest, records: dict[bytes, Record]) -> None:
        """Call the request's `on_records` with the records that were found, unless it is answered already."""
        with self._condition:
            is_unanswered = self._answer_deadlines.pop(request, None) is not None
        if is_unanswered:
            request.on_records(records)

    def refresh(self) -> None:
        """Have the reader look for records that other processes have written, at most once a second."""
        now = time.monotonic()
        if now >= self._last_refresh_time + REFRESH_SECONDS:
            self._last_refresh_time = now
            self.submit(_REFRESH_REQUEST)

    def stop(self, seconds: float) -> None:
        """End both threads, after the record that is being read."""
        self._signal_stop()
        deadline = time.monotonic() + seconds
        for thread in (self._watcher, self._thread):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _signal_stop(self) -> None:
        """Tell both threads to end, and drop all requests."""
        with self._condition:
            self._stopping = True
            self._requests.clear()
            self._answer_deadlines.clear()
            self._early_requests.clear()
            self._condition.notify_all()

    def _run_thread(self) -> None:
        """Carry out requests in order until `stop`: the target of the thread."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._requests or self._stopping)
                if self._stopping:
                    return
                request, deadline = self._requests.popleft()
            records: dict[bytes, Record] = {}
            try:
                self._carry_out(request, deadline, records)
            except Exception as error:
                self._segments.warn_once("cannot be read", error)
            self._answer(request, records)
            with self._condition:
                self._early_requests.discard(request)

    def _carry_out(self, request: ReadRequest, deadline: float, records: dict[bytes, Record]) -> None:
        """Read a request's records into `records`, until one fails or the time `deadline` is over."""
        self._segments.wait_until_open()
        if request is _REFRESH_REQUEST:
            self._segments.refresh()
        if time.monotonic() >= deadline:
            return
        locations = self._segments.find(list(request.tokens))
        wanted_keys = request.choose({key: location.size for key, location in locations.items()}, self.rate)
        self.missed_records += len(request.tokens) - len(locations)
        start_time = time.perf_counter()
        for key in wanted_keys:
            record = None if self._stopping else self._segments.read(locations[key], request.tokens[key])
            if record is None:
                self.missed_records += 1
                break
            records[key] = record
            if time.monotonic() >= deadline:
                self._pause(request, request in self._early_requests)
                break
        size = sum(locations[key].size for key in records)
        self.read_records += len(records)
        self.read_bytes += size
        if size >= _MIN_MEASURED:
            self.rate += _RATE_WEIGHT * (size / (time.perf_counter() - start_time) - self.rate)
        if records:
            self._segments.mark_used([locations[key] for key in records])
