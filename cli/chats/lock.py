"""The lock of a kept chat, which one open chat holds."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

_FOLDER = "locks"


class ChatLock:
    """The right to write one chat's file. One chat holds it, in this process or another, until it ends.

    So no chat waits for another, and no two write one file. The system gives the lock back when a process dies. Where
    nothing can be locked (a folder that cannot be written, a file system without locks), everybody gets the lock.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path = path
        self._close = None if descriptor is None else weakref.finalize(self, os.close, descriptor)

    @classmethod
    def take(cls, chat: Path, state: Path) -> ChatLock | None:
        """Return the lock of a chat's file, or None if another chat holds it. `state` is the state folder."""
        name = blake2b(os.fsencode(os.path.realpath(chat)), digest_size=16).hexdigest()
        path = state / _FOLDER / f"{name}.lock"
        while True:
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError:
                return cls(path, None)
            lock = cls(path, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock._drop()
                return None
            except OSError:
                lock._drop()
                return cls(path, None)
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return lock
            lock._drop()  # its holder removed the file between our two calls: try again with the next file

    def release(self) -> None:
        """Let another chat have it."""
        if self._close is not None and self._close.alive:
            with suppress(OSError):
                self._path.unlink()
            self._drop()

    def _drop(self) -> None:
        if self._close is not None:
            self._close()
