"""The lock of a kept chat, which one open chat holds."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

_FOLDER = "locks"


class ChatLock:
    """The right to write one chat's file. One chat holds it, in this process or another, until it ends.

    A chat never waits for another, and no two chats write one file. The system releases the lock when a process dies.
    If nothing can be locked (a folder that cannot be written, a file system without locks), every chat gets the lock.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path = path
        self._close = None if descriptor is None else weakref.finalize(self, os.close, descriptor)

    @classmethod
    def take(cls, chat: Path, state: Path) -> ChatLock | None:
        """Return the lock of a chat's file; None if another chat holds it. `state` is the state folder."""
        name = blake2b(os.fsencode(os.path.realpath(chat)), digest_size=16).hexdigest()
        path = state / _FOLDER / f"{name}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _folder_locked(path.parent, fcntl.LOCK_SH):
                return cls._take(path)
        except OSError:
            return cls(path, None)

    @classmethod
    def _take(cls, path: Path) -> ChatLock | None:
        """Return the lock in a file. Raises OSError if there can be no such file."""
        while True:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
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
        """Release the lock for other chats."""
        if self._close is not None and self._close.alive:
            with suppress(OSError):
                self._path.unlink()
            self._drop()

    def _drop(self) -> None:
        if self._close is not None:
            self._close()


def remove_dead_locks(state: Path) -> None:
    """Remove the lock files of chats that were killed. Nobody takes a lock meanwhile, so a lock that can be taken is
    dead.
    """
    folder = state / _FOLDER
    with suppress(OSError), _folder_locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        for path in folder.glob("*.lock"):
            with suppress(OSError):  # it is held, or has gone
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(descriptor)


@contextmanager
def _folder_locked(folder: Path, operation: int) -> Iterator[None]:
    """Lock the folder of all locks in this context. Those who take a lock share it. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)
