"""The folder of a store: its permissions and its secret key."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from cortexmlx.system.files import cache_folder

log = logging.getLogger("cortexmlx")

SECRET = "secret"
HASHES = "weights.hashes"
_SECRET_BYTES = 32
_OTHERS = 0o077
"""Bits of a file's mode that let other users read, write or execute it."""

_STORE_FILE = re.compile(
    r"secret|weights\.hashes|index\.sqlite(-.+)?|[0-9a-f]{32}\.(safetensors|unfinished|transcript|prefix)"
    r"|\.[0-9a-f]{16}\.unfinished"
)
TRANSCRIPT = re.compile(r"[0-9a-f]{32}\.transcript")
"""The names of files with transcripts, which a server keeps here."""
_AMBIGUOUS_NAMES = {SECRET, HASHES, "index.sqlite"}
"""Names that other programs use, too."""

_FOLDER_VARIABLE = "CORTEXMLX_KV_STORE"


def default_folder() -> Path:
    """Return the folder of the commands' store: `CORTEXMLX_KV_STORE`, or else a folder in the user's cache."""
    return Path(os.environ.get(_FOLDER_VARIABLE) or cache_folder() / "kv")


def absolute_path(path: str | Path) -> Path:
    """Return the absolute path of a folder, which stays right if the program changes its working directory. A path that
    cannot be resolved is returned unchanged: opening it will raise.
    """
    try:
        return Path(os.path.expanduser(path)).absolute()
    except (OSError, ValueError):
        return Path(path)


def printable_path(path: str | Path) -> str:
    """Return a path as text that any log can write, since a name on a disk need not be UTF-8."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def open_folder(path: Path) -> bytes:
    """Create the folder, mode 0700, if it does not exist, and return its secret, which all users of the folder share.

    The secret is part of the keys and proofs of everything that is stored. So files from elsewhere are not believed,
    and nobody can guess the key of another's text. A new secret is made if it is lost or damaged, or if other users
    could read or write it; then earlier records are no longer found. Raises OSError if the folder cannot be created or
    written, if the secret belongs to another user, or if the folder holds other things beside files with a store's
    names.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(3):
        try:
            with open_regular_file(path / SECRET) as file:
                status = os.fstat(file.fileno())
                if status.st_uid != (user := os.geteuid()):
                    owner = f"belongs to user {status.st_uid}, not to user {user}, who runs this"
                    raise PermissionError(f"{path / SECRET} {owner}")
                secret = file.read(_SECRET_BYTES + 1)
            private = not status.st_mode & _OTHERS
            if len(secret) == _SECRET_BYTES and private:
                return secret
            _check_not_foreign(path)
            if not private:
                log.warning(
                    "others could read %s: it is made anew, and what was stored is computed anew",
                    printable_path(path / SECRET),
                )
            if os.path.samestat(os.lstat(path / SECRET), status):  # or another process has made a new one
                (path / SECRET).unlink()
        except FileNotFoundError:
            _check_not_foreign(path)
        _make_secret(path)
    raise OSError(
        f"{path / SECRET} does not stay what it is, for its user alone: use a folder on a file system that keeps modes"
    )


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for others: links lead elsewhere, and opening a pipe waits."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no file")
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def transcript_sizes(folder: Path) -> dict[Path, int]:
    """Return the size in bytes of each transcript file that servers keep in a folder."""
    sizes = {}
    for name in os.listdir(folder):
        if TRANSCRIPT.fullmatch(name):
            with contextlib.suppress(OSError):
                sizes[folder / name] = os.lstat(folder / name).st_size
    return sizes


def remove_transcripts(folder: Path) -> int:
    """Remove the transcript files that servers keep in a folder. Return their bytes. Raises OSError if one stays."""
    sizes = transcript_sizes(folder)
    for path in sizes:
        path.unlink(missing_ok=True)
    return sum(sizes.values())


def _check_not_foreign(path: Path) -> None:
    """Raise OSError if a folder may be another program's, whose files a store would overwrite."""
    names = set(os.listdir(path))
    foreign_names = sorted(name for name in names if not _STORE_FILE.fullmatch(name))
    if foreign_names and (ambiguous_names := names & _AMBIGUOUS_NAMES):
        raise OSError(
            f"it holds other things, such as {foreign_names[0]}, and {min(ambiguous_names)} may be theirs: use a "
            "folder of its own"
        )


def _make_secret(path: Path) -> None:
    """Write a new secret atomically, and never over one that another process has just made."""
    temporary_path = path / f"{secrets.token_hex(16)}.unfinished"
    descriptor = os.open(temporary_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # or it is taken for what a dead process left
            os.link(temporary_path, path / SECRET)
    finally:
        temporary_path.unlink(missing_ok=True)
