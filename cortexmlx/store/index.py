"""The index: which record lies where, and which segment was used last. An SQLite file that processes share.

It can always be made again from the segments, so whatever is wrong with it, it is thrown away, and nothing waits for
the disk to have it. Its journal is SQLite's old one, with a rollback: the newer one (WAL) maps a file into memory that
all processes share, and a machine that cuts that file short kills them. What is used last goes by a count, not by a
clock, which may go back.
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

from cortexmlx.store.record import layout_from, layout_text, size_of
from cortexmlx.store.segment import SEGMENT_NAME, RecordLocation

NAME = "index.sqlite"

_BUSY_SECONDS = 2.0
_AT_ONCE = 500
"""Keys of one question: SQLite counts its parameters."""

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
"""Of a record. A file without them is damaged, and one with more is used."""


@dataclass(frozen=True)
class SegmentLine:
    """A segment as the index knows it: `bytes` of its file, `used` counts uses of all, `records` are found in it."""

    name: str
    model: str
    bytes: int
    used: int
    records: int


class Index:
    """Any thread may use it. Raises sqlite3.Error for whatever is wrong: the file, the folder, others in the way."""

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
        """Close the file, or leave it to whoever is held by it."""
        if self._lock.acquire(timeout=_BUSY_SECONDS):
            try:
                self._file.close()
            finally:
                self._lock.release()

    @property
    def lost(self) -> bool:
        """Whether its file is not in the folder any more: it was removed, or another process made a new one."""
        try:
            status = os.stat(self._path)
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self._own

    @contextlib.contextmanager
    def _held(self) -> Iterator[sqlite3.Connection]:
        """The file, for this thread alone. Python raises ValueError for a damage that SQLite cites in its message, if
        that is no text.
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
        """Where the records of some keys lie, of those that are there."""
        with self._held() as file:
            return _found(file, keys)

    def add(self, name: str, model: str, size: int, places: Sequence[RecordLocation]) -> None:
        """A segment was written just now: its records are found there, and it was used last."""
        with self._change() as file:
            _add(file, name, model, size, places, "coalesce((SELECT max(used) FROM segments), 0) + 1", "REPLACE")
            keys = [p.key for p in places]
            if len(_found(file, keys)) < len(keys):  # nobody else can have removed them yet
                raise sqlite3.DatabaseError("what was added is not there")

    def add_old(self, segments: Iterable[tuple[str, str, int, Sequence[RecordLocation]]]) -> None:
        """Segments were found again (name, model, bytes, places), each used before all others. What lies elsewhere,
        too, is found there. All are one change, for each change takes SQLite milliseconds.
        """
        with self._change() as file:
            for name, model, size, places in segments:
                _add(file, name, model, size, places, "coalesce((SELECT min(used) FROM segments), 1) - 1", "IGNORE")

    def use(self, names: Sequence[str]) -> None:
        """Segments were read, the last of them last."""
        with self._change() as file:
            for name in names:
                file.execute("UPDATE segments SET used = (SELECT max(used) + 1 FROM segments) WHERE name = ?", (name,))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Records are not there, whatever the index said."""
        with self._change() as file:
            file.executemany("DELETE FROM records WHERE key = ?", [(key,) for key in keys])
            if _found(file, keys):  # nobody else can have written them again yet
                raise sqlite3.DatabaseError("what was forgotten is still there")

    def remove(self, names: Sequence[str]) -> None:
        """Segments are gone, with their records."""
        with self._change() as file:
            for name in names:
                file.execute("DELETE FROM records WHERE segment = ?", (name,))
                file.execute("DELETE FROM segments WHERE name = ?", (name,))

    def keys(self) -> list[bytes]:
        """Those of all records."""
        with self._held() as file:
            rows = file.execute("SELECT key FROM records").fetchall()
        return [key for (key,) in rows if isinstance(key, bytes) and len(key) == 16]

    def version(self) -> int:
        """Another number whenever somebody else has changed something."""
        with self._held() as file:
            return int(file.execute("PRAGMA data_version").fetchone()[0])

    def segments(self) -> list[SegmentLine]:
        """All segments, those first that were not used for the longest time."""
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
    """An empty file, mode 0600, if none is there. What is there and no file of this user's is no index, and no journal,
    which SQLite believes: it writes what that says, and removes the file that it names. Returns which file it is.
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
    """Where a record lies; None if the row is damaged: then it is not there."""
    key, segment, begin, size, layout, proof = row
    try:
        place = RecordLocation(key, _checked(segment), int(begin), int(size), layout_from(layout), proof)
    except (ValueError, TypeError, OverflowError):
        return None
    whole = place.begin >= 0 and place.size == sum(size_of(dtype, shape) for dtype, shape in place.layout)
    return place if whole and isinstance(proof, bytes) else None


def _checked(name: Any) -> str:
    """A segment's name; nothing else of the index becomes a path."""
    if not isinstance(name, str) or not SEGMENT_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no segment")
    return name


def throw_away(folder: Path) -> None:
    """Remove the index, which is to be made again. Raises OSError."""
    for ending in ("", "-journal", "-wal", "-shm"):
        (folder / (NAME + ending)).unlink(missing_ok=True)
