"""The threads of a store: one writes, one reads, one watches how long reading takes. Nobody waits for any.

All are started when the store is opened. None is started later, on the engine's thread, where a failure would end
every running request.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cortexmlx.machine import be_modest
from cortexmlx.store.record import Record
from cortexmlx.store.segment_store import SegmentStore

MOST_WAITING = 64 << 20
"""Bytes of records that wait to be written, at most: more are dropped."""

SEGMENT_BYTES = 32 << 20
"""Bytes of records after which a segment is written, however soon the next come."""

_SEGMENTS = 4
"""Segments that a store holds at least, so that one may go for another."""

LINGER = 0.25
"""Seconds after the last record in which more may come for the same segment."""

MOST_LINGER = 1.0
"""Seconds after the first one in which it is written, whatever comes."""

_PAUSE = 60.0
"""Seconds without a write after the disk has refused one, and without a reading after one that took too long."""

_GRACE = 0.25
"""Seconds that a record may take when the time of its reading is over."""

START_RATE = 1e9
"""Bytes per second that reading is taken for before anything was read: what is read was written lately, and is in the
system's own cache, or on a drive that is about as fast.
"""

REFRESH_SECONDS = 1.0
"""After which what other processes have written is looked for again, if somebody misses something."""

_FORGETTING = 0.3
"""Weight of the newest reading in the running mean of the rate."""

_LEAST_MEASURED = 1 << 20
"""Bytes below which a reading says more about its beginning than about the rate."""


class Writer:
    """Takes records and writes them, some at a time. `on_room` is called from its thread when it takes records again
    after it has refused some. `stored` records of `stored_bytes` bytes are written, `dropped` ones never will be.
    """

    def __init__(self, segment_store: SegmentStore, model: str, on_room: Callable[[], None]) -> None:
        self.stored = self.stored_bytes = self.dropped = 0
        self._shelf = segment_store
        self._model = model
        self._on_room = on_room
        self._records: deque[Record] = deque()
        self._waiting = 0
        self._busy = True
        self._refused = self._hurry = self._stopping = False
        self._changed = threading.Condition()
        self._paused_until = 0.0
        self._thread = threading.Thread(target=self._run, name="cortexmlx-store-writer", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether a record would be taken now; if not, `on_room` says when."""
        with self._changed:
            self._refused = self._waiting >= MOST_WAITING and not self._stopping
            return not self._refused

    def offer(self, records: Sequence[Record]) -> bool:
        """Write records soon; False if too many wait, and these are dropped. Never waits."""
        size = sum(record.nbytes for record in records)
        with self._changed:
            if self._stopping or self._waiting + size > MOST_WAITING + SEGMENT_BYTES:
                self.dropped += len(records)
                return False
            self._records.extend(records)
            self._waiting += size
            self._changed.notify_all()
            return True

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written, so many seconds at most; whether it is."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._records and not self._busy, seconds)

    def stop(self, seconds: float) -> None:
        """Write what waits, in so many seconds at most, and end. Nobody waits for a thread that is only opening."""
        until = time.monotonic() + seconds
        if self._waiting:
            self.flush(seconds)
        with self._changed:
            self._stopping = True
            self.dropped += len(self._records)
            self._records.clear()
            self._changed.notify_all()
        if not self._shelf.stop_opening():
            self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        be_modest()
        self._shelf.open()
        while (records := self._next()) is not None:
            self._write(records)

    def _next(self) -> list[Record] | None:
        """The records of the next segment; None at the end."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._records or self._stopping)
            until = time.monotonic() + MOST_LINGER
            while not (self._hurry or self._stopping or self._waiting >= SEGMENT_BYTES):
                if not self._changed.wait(LINGER) or time.monotonic() >= until:
                    break
            if self._stopping:
                return None
            self._busy = True
            records: list[Record] = []
            size, most = 0, min(SEGMENT_BYTES, self._shelf.limit // _SEGMENTS)
            while self._records and (not records or size + self._records[0].nbytes <= most):
                records.append(self._records.popleft())
                size += records[-1].nbytes
            if not self._records:
                self._hurry = False
            return records

    def _write(self, records: Sequence[Record]) -> None:
        try:
            fits = sum(record.nbytes for record in records) <= self._shelf.limit
            if fits and time.monotonic() >= self._paused_until:
                new = self._shelf.write(self._model, records)
                self.stored += new
                self.stored_bytes += sum(record.nbytes for record in records) if new else 0
            else:
                self.dropped += len(records)
        except Exception as error:
            self.dropped += len(records)
            self._paused_until = time.monotonic() + _PAUSE
            self._shelf.warn("cannot be written", error, "what is new is not kept there")
        with self._changed:
            self._waiting -= sum(record.nbytes for record in records)
            tell = self._refused and self._waiting <= MOST_WAITING // 2
            self._refused = self._refused and not tell
        if tell:
            self._on_room()


@dataclass(frozen=True, eq=False)
class Reading:
    """What a reader is to do: look which of the records `tokens`, each with its tokens, are there, and read those that
    `choose` wants of them, given bytes by key and the bytes that are read in a second, in its order up to the first
    that fails, or until `seconds` after it was asked for. `done` is called once, on a thread of the reader's, with
    those that are right; about then at the latest, whatever the disk does.
    """

    tokens: Mapping[bytes, Sequence[int]]
    choose: Callable[[Mapping[bytes, int], float], Sequence[bytes]]
    done: Callable[[dict[bytes, Record]], None]
    seconds: float


_NOTHING = Reading({}, lambda there, rate: [], lambda found: None, 0.0)
"""Only looks whether there is something new."""


class Reader:
    """Reads records, for one who asked after the other, at about `rate` bytes a second. `read` records of `read_bytes`
    bytes were right, `missed` ones were not there, or not right.
    """

    def __init__(self, segment_store: SegmentStore) -> None:
        self.read = self.read_bytes = self.missed = 0
        self.rate = START_RATE
        self._shelf = segment_store
        self._asked: deque[tuple[Reading, float]] = deque()
        self._open: dict[Reading, float] = {}
        """The readings that are not answered, and when each is given up."""
        self._paused_until = 0.0
        self._refreshed = time.monotonic()
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="cortexmlx-store-reader", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="cortexmlx-store-watcher", daemon=True)
        try:
            self._thread.start()
            self._watcher.start()
        except BaseException:  # no thread is to be had
            self._end()
            raise

    def ask(self, reading: Reading) -> None:
        """Read soon. Never waits. `done` is called whatever happens, unless the reader is stopped."""
        until = time.monotonic() + reading.seconds
        with self._changed:
            if self._stopping:
                return
            if reading is not _NOTHING:
                self._open[reading] = until + _GRACE
            self._asked.append((reading, until))
            self._changed.notify_all()

    @property
    def paused(self) -> bool:
        """Whether a reading took too long lately, so that nobody should wait for another one."""
        return time.monotonic() < self._paused_until

    def _watch(self) -> None:
        """Give up every reading that takes too long: it is answered with nothing."""
        while True:
            with self._changed:
                if self._stopping:
                    return
                now = time.monotonic()
                late = [reading for reading, until in self._open.items() if until <= now]
                if not late:
                    self._changed.wait(min(self._open.values()) - now if self._open else None)
            for reading in late:
                self._pause(reading)
                self._answer(reading, {})

    def _pause(self, reading: Reading) -> None:
        self._paused_until = time.monotonic() + _PAUSE
        self._shelf.warn("is slow", f"{reading.seconds:.1f} s were not enough for a reading")

    def _answer(self, reading: Reading, found: dict[bytes, Record]) -> None:
        with self._changed:
            waits = self._open.pop(reading, None) is not None
        if waits:
            reading.done(found)

    def refresh(self) -> None:
        """Learn soon of what other processes have written, if that was not asked for within the last second."""
        now = time.monotonic()
        if now >= self._refreshed + REFRESH_SECONDS:
            self._refreshed = now
            self.ask(_NOTHING)

    def stop(self, seconds: float) -> None:
        """End, after the record that is just being read."""
        self._end()
        until = time.monotonic() + seconds
        for thread in (self._watcher, self._thread):
            thread.join(max(0.0, until - time.monotonic()))

    def _end(self) -> None:
        with self._changed:
            self._stopping = True
            self._asked.clear()
            self._open.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._stopping)
                if self._stopping:
                    return
                reading, until = self._asked.popleft()
            found: dict[bytes, Record] = {}
            try:
                self._carry_out(reading, until, found)
            except Exception as error:
                self._shelf.warn("cannot be read", error)
            self._answer(reading, found)

    def _carry_out(self, reading: Reading, until: float, found: dict[bytes, Record]) -> None:
        self._shelf.wait()
        if reading is _NOTHING:
            self._shelf.refresh()
        if time.monotonic() >= until:
            return
        places = self._shelf.find(list(reading.tokens))
        wanted = reading.choose({key: place.size for key, place in places.items()}, self.rate)
        self.missed += len(reading.tokens) - len(places)
        began = time.perf_counter()
        for key in wanted:
            record = None if self._stopping else self._shelf.read(places[key], reading.tokens[key])
            if record is None:
                self.missed += 1
                break
            found[key] = record
            if time.monotonic() >= until:
                self._pause(reading)
                break
        size = sum(places[key].size for key in found)
        self.read += len(found)
        self.read_bytes += size
        if size >= _LEAST_MEASURED:
            self.rate += _FORGETTING * (size / (time.perf_counter() - began) - self.rate)
        if found:
            self._shelf.use([places[key] for key in found])
