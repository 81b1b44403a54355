"""The folder of a store: its mode, and its secret."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

SECRET = "secret"
_SECRET_BYTES = 32


SWITCH = "CORTEXMLX_KV_STORE"


def default_folder() -> Path:
    """Where the commands keep their store: what `CORTEXMLX_KV_STORE` says, else a folder in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(SWITCH) or cache / "cortexmlx" / "kv")


def open_folder(path: Path) -> bytes:
    """Make the folder, mode 0700, if it is not there, and return its secret, which all who share it have.

    The secret goes into the keys and proofs of all that is stored: so files from elsewhere are not believed, and nobody
    can guess the key of another's text. Without it nothing here is of use; a new one is made if it is lost. Raises
    OSError if the folder cannot be made or written.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(3):
        try:
            known = (path / SECRET).read_bytes()
            if len(known) == _SECRET_BYTES:
                return known
            (path / SECRET).unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        _make_secret(path)
    raise OSError(f"{path / SECRET} does not stay what it is")


def _make_secret(path: Path) -> None:
    """As a whole or not at all, and never in the place of one that another process has just made."""
    made = path / f"{secrets.token_hex(16)}.unfinished"
    descriptor = os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # or it is taken for what a dead process left
            os.link(made, path / SECRET)
    finally:
        made.unlink(missing_ok=True)
