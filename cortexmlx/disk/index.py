"""The index of a KV store: where each record is, and which segment was used last. An SQLite file that processes share.

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

from cortexmlx.disk.segments import SEGMENT_NAME, RecordLocation, array_nbytes, layout_text, parse_layout

INDEX_NAME = "index.sqlite"

_BUSY_SECONDS = 2.0
_KEYS_PER_QUERY = 500
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
class SegmentInfo:
    """What the index knows of a segment file."""

    name: str
    model: str
    """The name of the model, for people."""
    bytes: int
    """Bytes of its file."""
    last_use: int
    """When it was last used: a count of uses of all segments."""
    records: int
    """How many records the index finds in it."""


class SegmentIndex:
    """The SQLite index of segments and records. Any thread may use it. Its methods raise sqlite3.Error for every
    problem: the file, the folder, or other processes in the way.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / INDEX_NAME
        self._path = path
        self._file_id = _create_file(path)  # SQLite makes its journal with the file's own mode
        self._lock = threading.Lock()
        self._file = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            with self._locked_connection():
                for setting in ("journal_mode=DELETE", "synchronous=OFF", "trusted_schema=OFF", "cell_size_check=ON"):
                    self._file.execute(f"PRAGMA {setting}")
                self._file.executescript(_TABLES)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file, or leave it open if another thread is stuck in it."""
        if self._lock.acquire(timeout=_BUSY_SECONDS):
            try:
                self._file.close()
            finally:
                self._lock.release()

    @property
    def is_lost(self) -> bool:
        """Whether its file is no longer in the folder: it was removed, or another process made a new one."""
        try:
            status = os.stat(self._path)
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self._file_id

    @contextlib.contextmanager
    def _locked_connection(self) -> Iterator[sqlite3.Connection]:
        """Yield the SQLite connection, locked for this thread.

        If SQLite's message quotes damaged bytes that are no text, Python raises ValueError. This becomes
        sqlite3.DatabaseError.
        """
        with self._lock:
            try:
                yield self._file
            except ValueError as error:
                raise sqlite3.DatabaseError(f"it is damaged: {error}") from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection in a write transaction, which is rolled back if the body raises."""
        with self._locked_connection() as file:
            file.execute("BEGIN IMMEDIATE")
            try:
                yield file
                file.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error, ValueError):
                    file.execute("ROLLBACK")
                raise

    def find(self, keys: Sequence[bytes]) -> dict[bytes, RecordLocation]:
        """Return where the records with these keys are. Unknown keys are left out."""
        with self._locked_connection() as file:
            return _find_records(file, keys)

    def add_segment(self, name: str, model: str, size: int, locations: Sequence[RecordLocation]) -> None:
        """Add a segment that was just written, as the most recently used one, with its records."""
        with self._transaction() as file:
            _insert_segment(
                file, name, model, size, locations, "coalesce((SELECT max(used) FROM segments), 0) + 1", "REPLACE"
            )
            keys = [p.key for p in locations]
            if len(_find_records(file, keys)) < len(keys):  # nobody else can have removed them yet
                raise sqlite3.DatabaseError("what was added is not there")

    def add_recovered_segments(self, segments: Iterable[tuple[str, str, int, Sequence[RecordLocation]]]) -> None:
        """Add segments (name, model, bytes, locations) that were found in the folder, as the least recently used
        ones. A record that an indexed segment has, too, keeps its location there.

        All are one change, since each change takes SQLite milliseconds.
        """
        with self._transaction() as file:
            for name, model, size, locations in segments:
                _insert_segment(
                    file, name, model, size, locations, "coalesce((SELECT min(used) FROM segments), 1) - 1", "IGNORE"
                )

    def mark_used(self, names: Sequence[str]) -> None:
        """Mark segments as the most recently used ones, the last name last."""
        with self._transaction() as file:
            for name in names:
                file.execute("UPDATE segments SET used = (SELECT max(used) + 1 FROM segments) WHERE name = ?", (name,))

    def remove_records(self, keys: Sequence[bytes]) -> None:
        """Remove records that turned out to be missing."""
        with self._transaction() as file:
            file.executemany("DELETE FROM records WHERE key = ?", [(key,) for key in keys])
            if _find_records(file, keys):  # nobody else can have written them again yet
                raise sqlite3.DatabaseError("what was forgotten is still there")

    def remove_segments(self, names: Sequence[str]) -> None:
        """Remove segments and their records."""
        with self._transaction() as file:
            for name in names:
                file.execute("DELETE FROM records WHERE segment = ?", (name,))
                file.execute("DELETE FROM segments WHERE name = ?", (name,))

    def keys(self) -> list[bytes]:
        """Return the keys of all records."""
        with self._locked_connection() as file:
            rows = file.execute("SELECT key FROM records").fetchall()
        return [key for (key,) in rows if isinstance(key, bytes) and len(key) == 16]

    def data_version(self) -> int:
        """Return SQLite's data version, which changes whenever another process changes the index."""
        with self._locked_connection() as file:
            return int(file.execute("PRAGMA data_version").fetchone()[0])

    def segments(self) -> list[SegmentInfo]:
        """Return all segments, the least recently used first."""
        query = (
            "SELECT name, model, bytes, used, (SELECT count(*) FROM records WHERE segment = name) FROM segments "
            "ORDER BY used, name"
        )
        with self._locked_connection() as file:
            rows = file.execute(query).fetchall()
        try:
            return [SegmentInfo(_check_segment_name(n), str(m), int(b), int(u), int(c)) for n, m, b, u, c in rows]
        except (ValueError, TypeError, OverflowError) as error:
            raise sqlite3.DatabaseError(str(error)) from None


def _insert_segment(
    file: sqlite3.Connection,
    name: str,
    model: str,
    size: int,
    locations: Sequence[RecordLocation],
    last_use_sql: str,
    verb: str,
) -> None:
    """Insert a segment and its records. `last_use_sql` is an SQL expression, `verb` is REPLACE or IGNORE."""
    file.execute(
        f"INSERT OR REPLACE INTO segments(name, model, bytes, used) VALUES (?, ?, ?, {last_use_sql})",
        (name, model, size),
    )
    rows = [(p.key, p.segment, p.offset, p.size, layout_text(p.layout), p.proof) for p in locations]
    file.executemany(f"INSERT OR {verb} INTO records({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", rows)


def _create_file(path: Path) -> tuple[int, int]:
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
        statuses = [os.fstat(descriptor)]
    finally:
        os.close(descriptor)
    for suffix in ("-journal", "-wal"):
        with contextlib.suppress(FileNotFoundError):
            statuses.append(os.lstat(f"{path}{suffix}"))
    if not all(stat.S_ISREG(each.st_mode) and each.st_uid == os.geteuid() for each in statuses):
        raise sqlite3.DatabaseError(f"{path} is no file of this user's")
    return statuses[0].st_dev, statuses[0].st_ino


def _find_records(file: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, RecordLocation]:
    """Return where the records with these keys are, by queries of at most 500 keys."""
    locations: dict[bytes, RecordLocation] = {}
    for start in range(0, len(keys), _KEYS_PER_QUERY):
        batch_keys = keys[start : start + _KEYS_PER_QUERY]
        query = f"SELECT {_COLUMNS} FROM records WHERE key IN ({','.join('?' * len(batch_keys))})"
        rows = file.execute(query, batch_keys).fetchall()
        locations.update((location.key, location) for row in rows if (location := _location_from_row(row)) is not None)
    return locations


def _location_from_row(row: Sequence[Any]) -> RecordLocation | None:
    """Return a record's location from its row; None if the row is damaged."""
    key, segment, offset, size, layout, proof = row
    try:
        location = RecordLocation(
            key, _check_segment_name(segment), int(offset), int(size), parse_layout(layout), proof
        )
    except (ValueError, TypeError, OverflowError):
        return None
    is_complete = location.offset >= 0 and location.size == sum(
        array_nbytes(dtype, shape) for dtype, shape in location.layout
    )
    return location if is_complete and isinstance(proof, bytes) else None


def _check_segment_name(name: Any) -> str:
    """Return `name` if it names a segment file, or raise ValueError, so that nothing else becomes a path."""
    if not isinstance(name, str) or not SEGMENT_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no segment")
    return name


def delete_index(folder: Path) -> None:
    """Delete the index file and its journals, so that it is made again. Raises OSError."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        (folder / (INDEX_NAME + suffix)).unlink(missing_ok=True)
