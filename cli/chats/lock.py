"""The lock of a saved chat: an open chat holds it."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from cortexmlx.system.files import lock_folder

_FOLDER = "locks"


class ChatLock:
    """The exclusive right to write a saved chat's file, held by one open chat in any process.

    A chat never waits for another, and no two chats write one file. The system releases the lock when a process dies.
    If nothing can be locked (a folder that cannot be written, a file system without locks), every chat gets the lock.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path = path
        self._close = None if descriptor is None else weakref.finalize(self, os.close, descriptor)

    @classmethod
    def acquire(cls, chat: Path, state: Path) -> ChatLock | None:
        """Lock a saved chat's file; return None if another process has it open. `state` is the state folder."""
        name = blake2b(os.fsencode(os.path.realpath(chat)), digest_size=16).hexdigest()
        path = state / _FOLDER / f"{name}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with lock_folder(path.parent, fcntl.LOCK_SH):
                return cls._acquire_file(path)
        except OSError:
            return cls(path, None)

    @classmethod
    def _acquire_file(cls, path: Path) -> ChatLock | None:
        """Lock a lock file; return None if it is held. Raises OSError if the file cannot exist."""
        while True:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            lock = cls(path, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock._close_file()
                return None
            except OSError:
                lock._close_file()
                return cls(path, None)
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return lock
            lock._close_file()  # its holder removed the file between our two calls: try again with the next file

    def release(self) -> None:
        """Release the lock for other chats."""
        if self._close is not None and self._close.alive:
            with suppress(OSError):
                self._path.unlink()
            self._close_file()

    def _close_file(self) -> None:
        """Close the lock file, which unlocks it."""
        if self._close is not None:
            self._close()


def remove_stale_locks(state: Path) -> None:
    """Remove the lock files of killed chats. No chat takes a lock meanwhile, so a lock that can be taken is stale."""
    folder = state / _FOLDER
    with suppress(OSError), lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        for path in folder.glob("*.lock"):
            with suppress(OSError):  # it is held, or has gone
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(descriptor)
