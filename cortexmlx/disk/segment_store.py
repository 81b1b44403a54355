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

from cortexmlx.disk.folder import open_folder, open_plain
from cortexmlx.disk.index import Index, SegmentLine, throw_away
from cortexmlx.disk.segments import (
    SEGMENT_NAME,
    ForeignSegment,
    Record,
    RecordLocation,
    printable,
    proof,
    read_header,
    remove_unfinished,
    restored,
    write_segment,
)

log = logging.getLogger("cortexmlx")

SPARE = 1 << 30
"""Bytes of the file system that the store leaves free."""

_CLOSING_SECONDS = 0.1

_AT_ONCE = 200
"""How many segments one change of the index adds."""


class SegmentStore:
    """Records in the folder `path`, at most `limit` bytes; the least recently used ones are removed. Any thread may use
    it, and any number of processes the same folder.

    `secret` is the folder's. Raises OSError if the folder cannot be used. Of the methods only `write` raises.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.secret = open_folder(path)
        self._index: Index | None = None
        self._broken = self._warned = self._closed = False
        self._opening = True
        self._lock = threading.Lock()
        self._opened_once = threading.Event()
        self._known: BloomFilter | None = None
        self._version = -1

    def open(self) -> None:
        """Open the index, and make the index and the files agree: the index may be lost or old, and writers may have
        died. It may take a while, so the constructor does not do it.
        """
        try:
            with contextlib.suppress(OSError):
                remove_unfinished(self.path)
            self._mend()
            self.refresh()
        except Exception as error:
            self.warn("cannot be opened", error)
        finally:
            self._opening = False
            self._opened_once.set()

    def wait(self) -> None:
        """Wait until it is open."""
        self._opened_once.wait()

    def stop_opening(self) -> bool:
        """Leave the rest of opening to the next process. Return whether it was not open yet."""
        self._closed = self._closed or self._opening
        return self._opening

    def close(self) -> None:
        """Close the index. If another thread is opening it, that thread closes it."""
        self._closed = True
        if self._lock.acquire(timeout=_CLOSING_SECONDS):
            try:
                self._close_index()
            finally:
                self._lock.release()

    def _close_index(self) -> None:
        index, self._index, self._broken = self._index, None, False
        if index is not None:
            index.close()

    def warn(self, what: str, error: object, then: str = "what it had is computed anew") -> None:
        """Log the first problem as a warning, and further ones at level DEBUG."""
        level, self._warned = logging.DEBUG if self._warned else logging.WARNING, True
        log.log(level, "the KV store %s %s (%s); %s", self.path, what, error, then)

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, model: str, records: Sequence[Record]) -> int:
        """Store the records that are not stored yet, in one segment. Return how many these are. The least recently used
        segments are removed for it.

        Raises OSError if the disk takes no more, or if there is no index: without one, nobody would find the segment,
        or know when to remove it.
        """
        try:
            return self._write(model, records)
        except sqlite3.Error as error:
            raise OSError(f"it has no index: {error}") from error

    def _write(self, model: str, records: Sequence[Record]) -> int:
        self._mend()
        model = printable(model)
        there = self._there([record.key for record in records])
        new = [record for record in {r.key: r for r in records}.values() if record.key not in there]
        size = sum(record.nbytes for record in new)
        if not new or size > self.limit:
            return 0
        self._make_room(size)
        if shutil.disk_usage(self.path).free < size + SPARE:
            raise OSError(errno.ENOSPC, f"{SPARE >> 30} GiB of the file system are left to others")
        name, size, places = write_segment(self.path, self.secret, model, new)
        try:
            with self._used() as index:
                index.add(name, model, size, places)
                known = self._known
                if known is not None:
                    known.add(place.key for place in places)
        except sqlite3.Error:
            if not self._mend():  # which finds the segment, too
                with contextlib.suppress(OSError):
                    (self.path / name).unlink()
                raise
        return len(new)

    def _there(self, keys: Sequence[bytes]) -> dict[bytes, RecordLocation]:
        """Return where records are, for a writer. An index that turns out to be damaged is made again. Raises
        sqlite3.Error.
        """
        try:
            with self._used() as index:
                return index.find(keys)
        except sqlite3.Error:
            if not self._mend():
                raise
        with self._used() as index:
            return index.find(keys)

    def _make_room(self, size: int) -> None:
        with self._used() as index:
            oldest = index.segments()
        spare = self.limit - sum(line.bytes for line in oldest)
        for line in oldest:
            if spare >= size:
                break
            self._remove([line.name])
            spare += line.bytes

    def _remove(self, names: Sequence[str]) -> None:
        """Remove segments, first from the index, so that no reader is sent to a missing file."""
        with contextlib.suppress(sqlite3.Error), self._used() as index:
            index.remove(names)
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    # -- reading ------------------------------------------------------------------------------------------------------

    def may_have(self, key: bytes) -> bool:
        """Return whether a record may exist, as far as is known without a look at the disk. Before the store is open,
        any record may.
        """
        known = self._known  # the writer's thread may take it away
        return known is None or key in known

    def refresh(self) -> None:
        """Learn of the records that other processes have written."""
        with contextlib.suppress(sqlite3.Error), self._used() as index:
            version = index.version()
            if version != self._version:
                known = self._known or BloomFilter()  # which may be told of new ones meanwhile
                known.add(index.keys())
                self._version, self._known = version, known

    def find(self, keys: Sequence[bytes]) -> dict[bytes, RecordLocation]:
        """Return where the records with these keys are. Records that do not exist are left out."""
        with contextlib.suppress(sqlite3.Error), self._used() as index:
            return index.find(keys)
        return {}

    def read(self, place: RecordLocation, tokens: Sequence[int]) -> Record | None:
        """Return the record at a place if it really belongs to these tokens. Otherwise return None and forget the
        record.
        """
        try:
            with open_plain(self.path / place.segment) as file:
                if os.fstat(file.fileno()).st_size < place.begin + place.size:
                    raise ValueError("a segment is cut short")
                data = os.pread(file.fileno(), place.size, place.begin)
            if proof(self.secret, place.key, place.layout, (data,)) != place.proof:
                raise ValueError("a segment is not what was written")
            record = restored(place.key, place.layout, data)
        except FileNotFoundError:  # another process needed the space
            self._remove([place.segment])
            self._forget(place.key)
            return None
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            if _passes(error):
                self.warn("cannot be read now", error)
                return None
            self.warn("is damaged", error)
            self._forget(place.key)
            return None
        if record.tokens != tuple(tokens):
            self._forget(place.key)
            return None
        return record

    def use(self, places: Sequence[RecordLocation]) -> None:
        """Mark the segments of records that were read as the most recently used ones. `places` begins with the first
        record of a chain, whose segment becomes the very last to be removed.
        """
        names = list(dict.fromkeys(place.segment for place in reversed(places)))
        with contextlib.suppress(sqlite3.Error), self._used() as index:
            index.use(names)

    def _forget(self, key: bytes) -> None:
        with contextlib.suppress(sqlite3.Error), self._used() as index:
            index.forget([key])

    # -- looking inside -----------------------------------------------------------------------------------------------

    def segments(self) -> list[SegmentLine]:
        """Return all segments, the least recently used first."""
        with contextlib.suppress(sqlite3.Error), self._used() as index:
            return index.segments()
        return []

    def others(self) -> int:
        """Return the bytes of segments that are not in the index, because another version wrote them. They do not count
        to the limit.
        """
        known = {line.name for line in self.segments()}
        with contextlib.suppress(OSError):
            return sum(size for name, size in self._files().items() if name not in known)
        return 0

    def clear(self) -> int:
        """Remove all segments, also those of other versions. Return their bytes."""
        freed = 0
        with contextlib.suppress(OSError):
            for name, size in self._files().items():
                self._remove([name])
                freed += size
        return freed

    # -- the index ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _used(self) -> Iterator[Index]:
        """Yield the index. If it turns out to be damaged, it is made again before the next write. Raises
        sqlite3.Error.
        """
        index = self._index
        if index is None:
            raise sqlite3.OperationalError("there is no index")
        try:
            yield index
        except sqlite3.Error as error:
            if not _in_the_way(error):
                self._broken = True
                self.warn("has a damaged index", error)
            raise

    def _mend(self) -> bool:
        """Open the index if it is not open. If it is damaged or lost, make it again from the segments. Return whether
        it was opened or made again.
        """
        with self._lock:
            lost = self._index is not None and self._index.lost
            if self._closed:
                return False
            if self._index is not None and not self._broken and not lost:
                return False
            if self._index is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._index.close()
                self._index = None
            try:
                if self._broken:
                    throw_away(self.path)
                self._index, self._broken, self._known, self._version = self._opened(), False, None, -1
            except (OSError, sqlite3.Error) as error:
                self.warn("has no index", error)
            if self._closed:
                self._close_index()
            return self._index is not None

    def _opened(self) -> Index:
        try:
            index = Index(self.path)
            self._agree(index)
        except sqlite3.Error as error:
            if _in_the_way(error):
                raise
            self.warn("has a damaged index", error)
            throw_away(self.path)
            index = Index(self.path)
            self._agree(index)
        return index

    def _agree(self, index: Index) -> None:
        """Make an index agree with the segments of this format in the folder.

        If it does not know many of them, nobody waits for them: until they are added, nothing is found.
        """
        files, known = self._files(), {line.name for line in index.segments()}
        index.remove(sorted(known - set(files)))
        new = sorted(set(files) - known, key=lambda name: _modified(self.path / name), reverse=True)
        if len(new) > _AT_ONCE:
            self._known = BloomFilter()
            self._opened_once.set()
        for start in range(0, len(new), _AT_ONCE):
            if self._closed:
                return
            index.add_old(self._read_headers({name: files[name] for name in new[start : start + _AT_ONCE]}))

    def _read_headers(self, files: Mapping[str, int]) -> list[tuple[str, str, int, list[RecordLocation]]]:
        """Return what the segments say of themselves, given their bytes. Damaged segments are removed. Segments of
        another format are left to the version that wrote them.
        """
        found = []
        for name in files:
            try:
                found.append((name, *read_header(self.path, name)))
            except (OSError, ForeignSegment) as error:
                log.debug("the KV store %s does not use %s: %r", self.path, name, error)
            except ValueError as error:
                self.warn("has a damaged segment", error)
                with contextlib.suppress(OSError):
                    (self.path / name).unlink()
        return [(name, model, files[name], places) for name, model, places in found]

    def _files(self) -> dict[str, int]:
        """Return the bytes of each segment in the folder. Raises OSError if the folder cannot be listed."""
        files = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                if SEGMENT_NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                        files[entry.name] = entry.stat(follow_symlinks=False).st_size
        return files


_NOT_THE_FILE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE}

_NOT_THE_INDEX = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOMEM,
}


def _in_the_way(error: sqlite3.Error) -> bool:
    """Return whether an error comes from other processes, from the disk or from a closed store, and not from the index
    itself.
    """
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in _NOT_THE_INDEX or isinstance(error, sqlite3.ProgrammingError)


def _passes(error: Exception) -> bool:
    """Whether an error is temporary: about the process or the machine at this moment, not about a damaged file."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NOT_THE_FILE)


def _modified(path: Path) -> float:
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
            for place in _places(key):
                self._bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, key: bytes) -> bool:
        """Return whether a key may have been added. False is certain."""
        return all(self._bits[place >> 3] >> (place & 7) & 1 for place in _places(key))


def _places(key: bytes) -> list[int]:
    return [int.from_bytes(key[i : i + 4], "little") & ((1 << _BITS) - 1) for i in (0, 4, 8, 12)]
