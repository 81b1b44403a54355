"""The index: where each record is, and which segment was used last. An SQLite file that processes share.

It can always be made again from the segments. So a damaged index is thrown away, and nothing waits until the index is
on disk. Its journal is SQLite's old one, with a rollback. The newer one (WAL) maps a file into memory that all
processes share, and if somebody cuts that file short, the processes die. The order of use is a count, not a clock,
which may go back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortexmlx.disk.segments import SEGMENT_NAME, RecordLocation, layout_from, layout_text, size_of

NAME = "index.sqlite"

_BUSY_SECONDS = 2.0
_AT_ONCE = 500
"""Keys in one query: SQLite limits the number of parameters."""

_TABLES = """
CREATE TABLE IF NOT EXISTS segments(
    name TEXT PRIMARY KEY, model TEXT NOT NULL, bytes INTEGER NOT NULL, used INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records(
    key BLOB PRIMARY KEY, segment TEXT NOT NULL, begin INTEGER NOT NULL, size INTEGER NOT NULL, layout TEXT NOT NULL,
    proof BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS records_of ON records(segment);
CREATE INDEX IF NOT EXISTS segments_by_use ON segments(used);
"""

_COLUMNS = "key, segment, begin, size, layout, proof"
"""The columns of a record. A file that lacks one is damaged. Further columns are allowed."""


@dataclass(frozen=True)
class SegmentLine:
    """A segment as the index knows it."""

    name: str
    model: str
    """The name of the model, for people."""
    bytes: int
    """Bytes of its file."""
    used: int
    """When it was last used: a count of uses of all segments."""
    records: int
    """How many records the index finds in it."""


class Index:
    """The index file. Any thread may use it. Its methods raise sqlite3.Error for every problem: the file, the folder,
    or other processes in the way.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / NAME
        self._path = path
        self._own = _make(path)  # SQLite makes its journal with the file's own mode
        self._lock = threading.Lock()
        self._file = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            with self._held():
                for setting in ("journal_mode=DELETE", "synchronous=OFF", "trusted_schema=OFF", "cell_size_check=ON"):
                    self._file.execute(f"PRAGMA {setting}")
                self._file.executescript(_TABLES)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file. If another thread is stuck in it, leave it open."""
        if self._lock.acquire(timeout=_BUSY_SECONDS):
            try:
                self._file.close()
            finally:
                self._lock.release()

    @property
    def lost(self) -> bool:
        """Whether its file is no longer in the folder: it was removed, or another process made a new one."""
        try:
            status = os.stat(self._path)
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self._own

    @contextlib.contextmanager
    def _held(self) -> Iterator[sqlite3.Connection]:
        """Yield the file for this thread alone.

        If SQLite's message quotes damaged bytes that are no text, Python raises ValueError. This becomes
        sqlite3.DatabaseError.
        """
        with self._lock:
            try:
                yield self._file
            except ValueError as error:
                raise sqlite3.DatabaseError(f"it is damaged: {error}") from None

    @contextlib.contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._held() as file:
            file.execute("BEGIN IMMEDIATE")
            try:
                yield file
                file.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error, ValueError):
                    file.execute("ROLLBACK")
                raise

    def find(self, keys: Sequence[bytes]) -> dict[bytes, RecordLocation]:
        """Return where the records with these keys are. Records that the index does not know are left out."""
        with self._held() as file:
            return _found(file, keys)

    def add(self, name: str, model: str, size: int, places: Sequence[RecordLocation]) -> None:
        """Add a segment that was just written. It counts as the most recently used one, and its records are found
        there.
        """
        with self._change() as file:
            _add(file, name, model, size, places, "coalesce((SELECT max(used) FROM segments), 0) + 1", "REPLACE")
            keys = [p.key for p in places]
            if len(_found(file, keys)) < len(keys):  # nobody else can have removed them yet
                raise sqlite3.DatabaseError("what was added is not there")

    def add_old(self, segments: Iterable[tuple[str, str, int, Sequence[RecordLocation]]]) -> None:
        """Add segments (name, model, bytes, places) that were found again. Each counts as less recently used than all
        others. A record that another segment also has is found there, as before.

        All are one change, since each change takes SQLite milliseconds.
        """
        with self._change() as file:
            for name, model, size, places in segments:
                _add(file, name, model, size, places, "coalesce((SELECT min(used) FROM segments), 1) - 1", "IGNORE")

    def use(self, names: Sequence[str]) -> None:
        """Mark segments as the most recently used ones, the last name last."""
        with self._change() as file:
            for name in names:
                file.execute("UPDATE segments SET used = (SELECT max(used) + 1 FROM segments) WHERE name = ?", (name,))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove records that turned out to be missing."""
        with self._change() as file:
            file.executemany("DELETE FROM records WHERE key = ?", [(key,) for key in keys])
            if _found(file, keys):  # nobody else can have written them again yet
                raise sqlite3.DatabaseError("what was forgotten is still there")

    def remove(self, names: Sequence[str]) -> None:
        """Remove segments and their records."""
        with self._change() as file:
            for name in names:
                file.execute("DELETE FROM records WHERE segment = ?", (name,))
                file.execute("DELETE FROM segments WHERE name = ?", (name,))

    def keys(self) -> list[bytes]:
        """Return the keys of all records."""
        with self._held() as file:
            rows = file.execute("SELECT key FROM records").fetchall()
        return [key for (key,) in rows if isinstance(key, bytes) and len(key) == 16]

    def version(self) -> int:
        """Return a number that changes whenever another process has changed the index."""
        with self._held() as file:
            return int(file.execute("PRAGMA data_version").fetchone()[0])

    def segments(self) -> list[SegmentLine]:
        """Return all segments, the least recently used first."""
        question = (
            "SELECT name, model, bytes, used, (SELECT count(*) FROM records WHERE segment = name) FROM segments "
            "ORDER BY used, name"
        )
        with self._held() as file:
            rows = file.execute(question).fetchall()
        try:
            return [SegmentLine(_checked(n), str(m), int(b), int(u), int(c)) for n, m, b, u, c in rows]
        except (ValueError, TypeError, OverflowError) as error:
            raise sqlite3.DatabaseError(str(error)) from None


def _add(
    file: sqlite3.Connection, name: str, model: str, size: int, places: Sequence[RecordLocation], used: str, verb: str
) -> None:
    file.execute(
        f"INSERT OR REPLACE INTO segments(name, model, bytes, used) VALUES (?, ?, ?, {used})", (name, model, size)
    )
    rows = [(p.key, p.segment, p.begin, p.size, layout_text(p.layout), p.proof) for p in places]
    file.executemany(f"INSERT OR {verb} INTO records({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", rows)


def _make(path: Path) -> tuple[int, int]:
    """Create an empty file with mode 0600 if none exists. Return its device and inode.

    Raises sqlite3.DatabaseError if the file, or a journal beside it, is not a regular file of this user. SQLite
    believes a journal: it writes what the journal says, and removes the file that it names.
    """
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK):
            raise
        raise sqlite3.DatabaseError(f"{path} is a link") from None
    try:
        there = [os.fstat(descriptor)]
    finally:
        os.close(descriptor)
    for ending in ("-journal", "-wal"):
        with contextlib.suppress(FileNotFoundError):
            there.append(os.lstat(f"{path}{ending}"))
    if not all(stat.S_ISREG(each.st_mode) and each.st_uid == os.geteuid() for each in there):
        raise sqlite3.DatabaseError(f"{path} is no file of this user's")
    return there[0].st_dev, there[0].st_ino


def _found(file: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, RecordLocation]:
    found: dict[bytes, RecordLocation] = {}
    for start in range(0, len(keys), _AT_ONCE):
        some = keys[start : start + _AT_ONCE]
        question = f"SELECT {_COLUMNS} FROM records WHERE key IN ({','.join('?' * len(some))})"
        rows = file.execute(question, some).fetchall()
        found.update((place.key, place) for row in rows if (place := _place(row)) is not None)
    return found


def _place(row: Sequence[Any]) -> RecordLocation | None:
    """Return where a record is; None if its row is damaged."""
    key, segment, begin, size, layout, proof = row
    try:
        place = RecordLocation(key, _checked(segment), int(begin), int(size), layout_from(layout), proof)
    except (ValueError, TypeError, OverflowError):
        return None
    whole = place.begin >= 0 and place.size == sum(size_of(dtype, shape) for dtype, shape in place.layout)
    return place if whole and isinstance(proof, bytes) else None


def _checked(name: Any) -> str:
    """Return the name of a segment. Raises ValueError for anything else, so that nothing else in the index becomes a
    path.
    """
    if not isinstance(name, str) or not SEGMENT_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no segment")
    return name


def throw_away(folder: Path) -> None:
    """Remove the index, so that it is made again. Raises OSError."""
    for ending in ("", "-journal", "-wal", "-shm"):
        (folder / (NAME + ending)).unlink(missing_ok=True)
