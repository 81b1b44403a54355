"""The hashes of weight files, kept in a file of the store's folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import SupportsBytes, TypeVar

from cortexmlx.disk.folder import HASHES, open_plain

_MOST = 1000
"""How many hashes are kept: the newest."""

_LINE = re.compile(rb"([0-9a-f]{32}) ([0-9a-f]{64}) ([0-9a-f]{32})")
_LINE_BYTES = 32 + 64 + 32 + 3

Stamped = TypeVar("Stamped", bound=SupportsBytes)


class KeptHashes:
    """Hashes by stamp. A stamp is what the file system says of a file, as bytes.

    Each line has a proof that needs the folder's secret, so damaged or foreign lines are ignored. The file is replaced
    as a whole: if two processes add at once, one may lose what it added. Nothing here raises.
    """

    def __init__(self, folder: Path, secret: bytes) -> None:
        self._folder = folder
        self._secret = secret

    def find(self, stamps: Iterable[Stamped]) -> dict[Stamped, bytes]:
        """Return the hashes of those stamps that are known."""
        lines = self._lines()
        names = {stamp: self._keyed(b"stamp", bytes(stamp)) for stamp in stamps}
        return {stamp: lines[name] for stamp, name in names.items() if name in lines}

    def add(self, hashes: Mapping[Stamped, bytes]) -> None:
        """Keep hashes of 32 bytes."""
        lines = self._lines()
        for stamp, digest in hashes.items():
            name = self._keyed(b"stamp", bytes(stamp))
            lines.pop(name, None)
            lines[name] = digest
        newest = list(lines.items())[-_MOST:]
        text = b"".join(b"%s %s %s\n" % (n, d.hex().encode(), self._proof(n, d)) for n, d in newest)
        unfinished = self._folder / f"{secrets.token_hex(16)}.unfinished"
        with contextlib.suppress(OSError):
            descriptor = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(text)
                unfinished.replace(self._folder / HASHES)
            finally:
                unfinished.unlink(missing_ok=True)

    def _lines(self) -> dict[bytes, bytes]:
        """Return the hash of each name, the oldest first."""
        try:
            with open_plain(self._folder / HASHES) as file:
                text = file.read(_MOST * _LINE_BYTES)
        except OSError:
            return {}
        lines = {}
        for found in map(_LINE.fullmatch, text.split(b"\n")):
            if found is not None:
                name, digest = found[1], bytes.fromhex(found[2].decode())
                if secrets.compare_digest(found[3], self._proof(name, digest)):
                    lines[name] = digest
        return lines

    def _proof(self, name: bytes, digest: bytes) -> bytes:
        return self._keyed(b"line", name + digest)

    def _keyed(self, use: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._secret, person=use, digest_size=16).hexdigest().encode()
