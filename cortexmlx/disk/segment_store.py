"""SegmentStore: the segments of one folder and their index. Every fault counts as a miss, and is logged once."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cortexmlx.disk.folder import open_folder, open_regular_file
from cortexmlx.disk.index import SegmentIndex, SegmentInfo, delete_index
from cortexmlx.disk.segments import (
    SEGMENT_NAME,
    ForeignSegment,
    Record,
    RecordLocation,
    check_record,
    printable_name,
    read_header,
    remove_unfinished,
    write_segment,
)

log = logging.getLogger("cortexmlx")

FREE_BYTES = 1 << 30
"""Bytes of the file system that the store leaves free."""

_CLOSING_SECONDS = 0.1

_SEGMENTS_PER_CHANGE = 200
"""How many segments one change of the index adds."""


class SegmentStore:
    """A folder of segment files with at most `limit` bytes; the least recently used ones are removed. Any thread may
    use it, and any number of processes the same folder.

    `secret` is the folder's. Raises OSError if the folder cannot be used. Of the methods, only `write` and `clear`
    raise errors.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.secret = open_folder(path)
        self._index: SegmentIndex | None = None
        self._is_damaged = self._has_warned = self._closed = False
        self._is_opening = True
        self._lock = threading.Lock()
        self._opened_once = threading.Event()
        self._key_filter: BloomFilter | None = None
        self._version = -1

    def open(self) -> None:
        """Open the index, and bring it up to date with the segment files: it may be lost or old, and writers may have
        died. It may take a while, so the constructor does not do it.
        """
        try:
            with contextlib.suppress(OSError):
                remove_unfinished(self.path)
            self._ensure_index()
            self.refresh()
        except Exception as error:
            self.warn_once("cannot be opened", error)
        finally:
            self._is_opening = False
            self._opened_once.set()

    def wait_until_open(self) -> None:
        """Wait until `open` is done, or has come so far that the store can be used."""
        self._opened_once.wait()

    @property
    def is_open(self) -> bool:
        """Whether `open` is done, or has come so far that the store can be used."""
        return self._opened_once.is_set()

    def stop_opening(self) -> bool:
        """Abort `open` if it is still running; the next process completes it. Return whether it was running."""
        self._closed = self._closed or self._is_opening
        return self._is_opening

    def close(self) -> None:
        """Close the index. If another thread is opening it, that thread closes it."""
        self._closed = True
        if self._lock.acquire(timeout=_CLOSING_SECONDS):
            try:
                self._close_index()
            finally:
                self._lock.release()

    def _close_index(self) -> None:
        """Close the index if it is open."""
        index, self._index, self._is_damaged = self._index, None, False
        if index is not None:
            index.close()

    def warn_once(self, problem: str, error: object, consequence: str = "what it had is computed anew") -> None:
        """Log the store's first problem as a warning, and further ones at level DEBUG."""
        level, self._has_warned = logging.DEBUG if self._has_warned else logging.WARNING, True
        log.log(level, "the KV store %s %s (%s); %s", self.path, problem, error, consequence)

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, model: str, records: Sequence[Record]) -> int:
        """Write the records that are not stored yet to one new segment. Return their number. The least recently used
        segments are removed to make room.

        Raises OSError if the disk takes no more, or if there is no index: without one, nobody would find the segment,
        or know when to remove it.
        """
        try:
            return self._write_segment(model, records)
        except sqlite3.Error as error:
            raise OSError(f"it has no index: {error}") from error

    def _write_segment(self, model: str, records: Sequence[Record]) -> int:
        """Do what `write` does, but raise sqlite3.Error for problems of the index."""
        self._ensure_index()
        model = printable_name(model)
        stored_locations = self._find_or_rebuild([record.key for record in records])
        new = [record for record in {r.key: r for r in records}.values() if record.key not in stored_locations]
        size = sum(record.nbytes for record in new)
        if not new or size > self.limit:
            return 0
        self._make_room(size)
        if (free := shutil.disk_usage(self.path).free) < size + FREE_BYTES:
            reason = f"the file system has {free >> 20:,} MiB free, of which {FREE_BYTES >> 30} GiB must stay free"
            raise OSError(errno.ENOSPC, reason)
        name, size, locations = write_segment(self.path, self.secret, model, new)
        try:
            with self._guarded_index() as index:
                index.add_segment(name, model, size, locations)
                key_filter = self._key_filter
                if key_filter is not None:
                    key_filter.add(location.key for location in locations)
        except sqlite3.Error:
            if not self._ensure_index():  # which finds the segment, too
                with contextlib.suppress(OSError):
                    (self.path / name).unlink()
                raise
        return len(new)

    def _find_or_rebuild(self, keys: Sequence[bytes]) -> dict[bytes, RecordLocation]:
        """Return where records are. If the index is damaged, rebuild it first. Raises sqlite3.Error."""
        try:
            with self._guarded_index() as index:
                return index.find(keys)
        except sqlite3.Error:
            if not self._ensure_index():
                raise
        with self._guarded_index() as index:
            return index.find(keys)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used segments until `size` more bytes are within the limit."""
        with self._guarded_index() as index:
            segments = index.segments()
        free_bytes = self.limit - sum(segment.bytes for segment in segments)
        for segment in segments:
            if free_bytes >= size:
                break
            self._remove_segments([segment.name])
            free_bytes += segment.bytes

    def _remove_segments(self, names: Sequence[str]) -> None:
        """Remove segments, first from the index, so that no reader is sent to a missing file."""
        with contextlib.suppress(sqlite3.Error), self._guarded_index() as index:
            index.remove_segments(names)
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    # -- reading ------------------------------------------------------------------------------------------------------

    def may_have(self, key: bytes) -> bool:
        """Return whether a record may exist, by a filter in memory. True for every key until the store is open."""
        key_filter = self._key_filter  # the writer's thread may take it away
        return key_filter is None or key in key_filter

    def refresh(self) -> None:
        """Add the keys that other processes have written to the filter of `may_have`."""
        with contextlib.suppress(sqlite3.Error), self._guarded_index() as index:
            version = index.data_version()
            if version != self._version:
                key_filter = self._key_filter or BloomFilter()  # which may be told of new ones meanwhile
                key_filter.add(index.keys())
                self._version, self._key_filter = version, key_filter

    def find(self, keys: Sequence[bytes]) -> dict[bytes, RecordLocation]:
        """Return where the records with these keys are. Records that do not exist are left out."""
        with contextlib.suppress(sqlite3.Error), self._guarded_index() as index:
            return index.find(keys)
        return {}

    def read(self, location: RecordLocation, tokens: Sequence[int]) -> Record | None:
        """Return the record at a place, or None. If it is missing, damaged or of other tokens, remove it from the
        index; if it only cannot be read now, it stays there.
        """
        try:
            with open_regular_file(self.path / location.segment) as file:
                if os.fstat(file.fileno()).st_size < location.offset + location.size:
                    raise ValueError("a segment is cut short")
                data = os.pread(file.fileno(), location.size, location.offset)
            record = check_record(self.secret, location, data)
        except FileNotFoundError:  # another process needed the space
            self._remove_segments([location.segment])
            self._remove_record(location.key)
            return None
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _TEMPORARY_ERRORS):
                self.warn_once("cannot be read now", error)
                return None
            self.warn_once("is damaged", error)
            self._remove_record(location.key)
            return None
        if record.tokens != tuple(tokens):
            self._remove_record(location.key)
            return None
        return record

    def mark_used(self, locations: Sequence[RecordLocation]) -> None:
        """Mark the segments of records that were read as the most recently used ones. `locations` begins with the first
        record of a chain, whose segment becomes the very last to be removed.
        """
        names = list(dict.fromkeys(location.segment for location in reversed(locations)))
        with contextlib.suppress(sqlite3.Error), self._guarded_index() as index:
            index.mark_used(names)

    def _remove_record(self, key: bytes) -> None:
        """Remove a record from the index."""
        with contextlib.suppress(sqlite3.Error), self._guarded_index() as index:
            index.remove_records([key])

    # -- looking inside -----------------------------------------------------------------------------------------------

    def segments(self) -> list[SegmentInfo]:
        """Return all segments, the least recently used first."""
        with contextlib.suppress(sqlite3.Error), self._guarded_index() as index:
            return index.segments()
        return []

    def foreign_bytes(self) -> int:
        """Return the bytes of segments of another version, which are neither indexed nor counted towards the limit."""
        indexed_names = {line.name for line in self.segments()}
        with contextlib.suppress(OSError):
            return sum(size for name, size in self._segment_sizes().items() if name not in indexed_names)
        return 0

    def clear(self) -> int:
        """Remove all segments, also those of other versions. Return their bytes. Raises OSError if some stay."""
        sizes = self._segment_sizes()
        self._remove_segments(list(sizes))
        if left := sizes.keys() & self._segment_sizes().keys():
            raise OSError(f"{len(left)} of its {len(sizes)} files could not be removed")
        return sum(sizes.values())

    # -- the index ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _guarded_index(self) -> Iterator[SegmentIndex]:
        """Yield the index. If its file is damaged, mark it to be rebuilt at the next write. Raises sqlite3.Error."""
        index = self._index
        if index is None:
            raise sqlite3.OperationalError("there is no index")
        try:
            yield index
        except sqlite3.Error as error:
            if not _is_external_error(error):
                self._is_damaged = True
                self.warn_once("has a damaged index", error)
            raise

    def _ensure_index(self) -> bool:
        """Open the index if it is not open, and rebuild it if it is damaged or lost. Return whether it did either."""
        with self._lock:
            is_lost = self._index is not None and self._index.is_lost
            if self._closed:
                return False
            if self._index is not None and not self._is_damaged and not is_lost:
                return False
            if self._index is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._index.close()
                self._index = None
            try:
                if self._is_damaged:
                    delete_index(self.path)
                self._index, self._is_damaged = self._open_or_rebuild(), False
                self._key_filter, self._version = None, -1
            except (OSError, sqlite3.Error) as error:
                self.warn_once("has no index", error)
            if self._closed:
                self._close_index()
            return self._index is not None

    def _open_or_rebuild(self) -> SegmentIndex:
        """Open the index, sync it with the folder's files, and return it. A damaged one is deleted and rebuilt."""
        try:
            index = SegmentIndex(self.path)
            self._sync_with_folder(index)
        except sqlite3.Error as error:
            if _is_external_error(error):
                raise
            self.warn_once("has a damaged index", error)
            delete_index(self.path)
            index = SegmentIndex(self.path)
            self._sync_with_folder(index)
        return index

    def _sync_with_folder(self, index: SegmentIndex) -> None:
        """Add to an index the segments of the folder that it lacks, and remove from it those that are gone.

        If it does not know many of them, nobody waits for them: until they are added, nothing is found.
        """
        files, indexed_names = self._segment_sizes(), {line.name for line in index.segments()}
        index.remove_segments(sorted(indexed_names - set(files)))
        new = sorted(set(files) - indexed_names, key=lambda name: _modified_time(self.path / name), reverse=True)
        if len(new) > _SEGMENTS_PER_CHANGE:
            self._key_filter = BloomFilter()
            self._opened_once.set()
        for start in range(0, len(new), _SEGMENTS_PER_CHANGE):
            if self._closed:
                return
            index.add_recovered_segments(
                self._read_headers({name: files[name] for name in new[start : start + _SEGMENTS_PER_CHANGE]})
            )

    def _read_headers(self, files: Mapping[str, int]) -> list[tuple[str, str, int, list[RecordLocation]]]:
        """Return name, model, bytes and record locations of each segment. Damaged segments are removed. Segments of
        another format are left to the version that wrote them.
        """
        headers = []
        for name in files:
            try:
                headers.append((name, *read_header(self.path, name)))
            except (OSError, ForeignSegment) as error:
                log.debug("the KV store %s does not use %s: %r", self.path, name, error)
            except ValueError as error:
                self.warn_once("has a damaged segment", error)
                with contextlib.suppress(OSError):
                    (self.path / name).unlink()
        return [(name, model, files[name], locations) for name, model, locations in headers]

    def _segment_sizes(self) -> dict[str, int]:
        """Return the bytes of each segment in the folder. Raises OSError if the folder cannot be listed."""
        files = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                if SEGMENT_NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                        files[entry.name] = entry.stat(follow_symlinks=False).st_size
        return files


_TEMPORARY_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE}

_EXTERNAL_ERRORS = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOMEM,
}


def _is_external_error(error: sqlite3.Error) -> bool:
    """Return whether an SQLite error is due to other processes, the disk or a closed store, not a damaged index."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in _EXTERNAL_ERRORS or isinstance(error, sqlite3.ProgrammingError)


def _modified_time(path: Path) -> float:
    """Return when a file was last modified; 0 if it cannot be read."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# A Bloom filter of the store's keys, so that a new prompt does not wait for the index.


_BITS = 24
"""2**24 bits are 2 MiB. With a million keys, the filter takes one of 400 unknown keys for a known one."""


class BloomFilter:
    """A set of keys that may take an unknown key for a known one. Keys are hashes already, so four parts of a key are
    its bit positions. Any thread may use it.
    """

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._bits = bytearray(1 << (_BITS - 3))
        self.add(keys)

    def add(self, keys: Iterable[bytes]) -> None:
        """Add keys."""
        for key in keys:
            for position in _bit_positions(key):
                self._bits[position >> 3] |= 1 << (position & 7)

    def __contains__(self, key: bytes) -> bool:
        """Return whether a key may have been added. False is certain."""
        return all(self._bits[position >> 3] >> (position & 7) & 1 for position in _bit_positions(key))


def _bit_positions(key: bytes) -> list[int]:
    """Return the four bits of the filter that stand for a key."""
    return [int.from_bytes(key[i : i + 4], "little") & ((1 << _BITS) - 1) for i in (0, 4, 8, 12)]
