"""Writes files atomically: completely or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_ALL = 0o666
_OWN = 0o600


_UNFINISHED = f".{'[0-9a-f]' * 16}.unfinished"


@contextmanager
def write_atomically(path: Path, *, private: bool = False, temp_path: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a new file to write, which atomically replaces `path`, on disk, when the block ends. If anything fails,
    the old file stays, and nobody ever finds half of the new one. If `path` is a link, the file that it leads to is
    replaced.

    It gets the mode of the old file. If it is `private`, only its user can read it. Meanwhile it has a name of its own
    in the same folder. With `temp_path` it has that name, and replaces what a dead process left there.

    Raises OSError, also if `path` exists and is no regular file.
    """
    path = Path(os.path.realpath(path))
    mode = _file_mode(path)
    unfinished_path = path.with_name(f".{secrets.token_hex(8)}.unfinished") if temp_path is None else temp_path
    if temp_path is not None:
        temp_path.unlink(missing_ok=True)
    descriptor = os.open(unfinished_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWN if private else _ALL)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None and not private:
                os.fchmod(descriptor, mode)
            yield file
            file.flush()
            os.fsync(descriptor)
        unfinished_path.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished_path.unlink()
        raise


@contextmanager
def lock_folder(folder: Path, operation: int) -> Iterator[None]:
    """Lock a folder in this context, shared or not (`fcntl.LOCK_SH`, `LOCK_EX`). Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path, seconds: float) -> None:
    """Remove the temporary files that dead processes left in a folder at least `seconds` ago."""
    for path in folder.glob(_UNFINISHED):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > seconds:
                path.unlink()


def _file_mode(path: Path) -> int | None:
    """Return the mode of a regular file; None if it does not exist. Raises OSError for a device or a folder, which a
    process with root's rights could otherwise replace by a file.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return stat.S_IMODE(status.st_mode)


# The user's folders: for caches, and for what programs keep.


def cache_folder() -> Path:
    """Return this program's cache folder: in `XDG_CACHE_HOME`, or else where the system has the user's caches."""
    default_folder = Path("Library", "Caches") if sys.platform == "darwin" else Path(".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / default_folder) / "cortexmlx"


def state_folder() -> Path:
    """Return this program's folder for data kept between runs, by the XDG convention."""
    state = os.environ.get("XDG_STATE_HOME") or home_folder() / ".local" / "state"
    return Path(state) / "cortexmlx"


def home_folder() -> Path:
    """Return the user's own folder, or a temporary one for a user without a folder, as in some containers."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"cortexmlx-{os.geteuid()}"
