"""Write files atomically: whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_ALL = 0o666
_OWN = 0o600


_UNFINISHED = f".{'[0-9a-f]' * 16}.unfinished"


@contextmanager
def in_place_of(path: Path, *, private: bool = False, beside: Path | None = None) -> Iterator[BinaryIO]:
    """A new file to write, which is on the disk and in the place of `path` when the block ends. What is there stays
    until then, and if anything fails: nobody ever finds half of it. Where `path` is a link, that is what it leads to.

    It has the mode of the file that was there, or is `private`: for its user's eyes only. Meanwhile it lies in the same
    folder, under a name of its own, or `beside`: then what a process left there that died is written over.

    Raises OSError, also for what is there and is no file.
    """
    path = Path(os.path.realpath(path))
    mode = _mode(path)
    unfinished = path.with_name(f".{secrets.token_hex(8)}.unfinished") if beside is None else beside
    if beside is not None:
        beside.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWN if private else _ALL)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None and not private:
                os.fchmod(descriptor, mode)
            yield file
            file.flush()
            os.fsync(descriptor)
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def remove_unfinished(folder: Path, seconds: float) -> None:
    """Remove files of a folder that processes left unfinished which died, `seconds` ago or earlier."""
    for path in folder.glob(_UNFINISHED):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > seconds:
                path.unlink()


def _mode(path: Path) -> int | None:
    """That of the file; None if there is none. Raises OSError for what is none: whoever may write everywhere would make
    a file of a device.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return stat.S_IMODE(status.st_mode)
