"""Transcripts on disk, beside the keys and values of the same texts, so that agents go on after a restart.

Each is a file of its own in the store's folder, readable by its user alone, and signed with the folder's secret. A file
that is damaged, or from elsewhere, is removed.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from cortexmlx.disk.folder import TRANSCRIPT, open_folder, open_plain
from cortexmlx.server.transcripts.answered import Answered
from cortexmlx.server.transcripts.table import Remembered
from cortexmlx.sessions.transcript import Transcript
from cortexmlx.structured.tools import ToolCall
from cortexmlx.system.files import in_place_of, remove_unfinished

log = logging.getLogger("cortexmlx")

_SIGNATURE = 32
_VERSION = 1
_OLDEST = 30 * 24 * 3600.0
"""Seconds after which a transcript that nobody continued is removed."""
_FOR_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)
"""Errors of a process that has too much open, which say nothing of a file."""
_ABANDONED = 3600.0
"""Seconds after which an unfinished file is that of a dead process."""


class SavedTranscripts:
    """The transcripts of one model in a folder. They are written and removed on a thread, in order.

    Raises OSError if the folder cannot be used.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._identity = identity
        self._key = hmac.digest(open_folder(folder), b"transcripts", sha256)
        self._thread = ThreadPoolExecutor(1, "cortexmlx transcripts")
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[str, Remembered] | None] = {}
        """What is to be written, or removed, by id. A slow disk keeps no more here than the table does."""

    def read(self, most: int) -> list[tuple[str, Remembered]]:
        """Return this model's transcripts with their clients, the newest `most` bytes of files, the oldest first. The
        others of this model are removed, and so is what cannot be used or is too old.
        """
        found: list[tuple[str, Remembered]] = []
        total, now = 0, time.time()
        with suppress(OSError):
            remove_unfinished(self._folder, _ABANDONED)
        for path, size, changed in self._files():
            try:
                each = None if now - changed > _OLDEST else self._read(path)
            except OSError as error:
                if error.errno in _FOR_NOW:
                    continue
                each = None
            mine = each is not None and each[0] == self._identity
            total += size if mine else 0
            if each is None or (mine and total > most):
                with suppress(OSError):
                    path.unlink()
            elif mine:
                found.append(each[1:])
        return found[::-1]

    def put(self, client: str, remembered: Remembered) -> None:
        """Write a transcript, soon."""
        self._ask(remembered.id, (client, remembered))

    def remove(self, remembered: Remembered) -> None:
        """Remove a transcript, soon."""
        self._ask(remembered.id, None)

    def close(self) -> None:
        """Wait until all is written."""
        self._thread.shutdown()

    def _files(self) -> list[tuple[Path, int, float]]:
        """Return the files of all models with their bytes and times, the newest first."""
        listed = []
        with suppress(OSError):
            for path in self._folder.iterdir():
                if TRANSCRIPT.fullmatch(path.name):
                    with suppress(OSError):
                        status = path.lstat()
                        listed.append((path, status.st_size, status.st_mtime))
        return sorted(listed, key=lambda each: each[2], reverse=True)

    def _read(self, path: Path) -> tuple[str, str, Remembered] | None:
        """Return the model, the client and the transcript in a file; None if it is not one of ours. Raises OSError."""
        try:
            with open_plain(path) as file:
                signature, data = file.read(_SIGNATURE), file.read()
            if not hmac.compare_digest(signature, hmac.digest(self._key, data, sha256)):
                return None
            said = json.loads(data)
            if said["version"] != _VERSION:
                return None
            return said["model"], said["client"], _remembered(said["transcript"], path.stem)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def _ask(self, id: str, wanted: tuple[str, Remembered] | None) -> None:
        with self._lock:
            known = id in self._asked
            self._asked[id] = wanted
        if not known:
            self._thread.submit(self._carry_out, id)

    def _carry_out(self, id: str) -> None:
        with self._lock:
            wanted = self._asked.pop(id)
        if wanted is None:
            with suppress(OSError):
                self._path(id).unlink()
        else:
            self._write(*wanted)

    def _write(self, client: str, remembered: Remembered) -> None:
        said = {"version": _VERSION, "model": self._identity, "client": client, "transcript": _plain(remembered)}
        data = json.dumps(said, separators=(",", ":")).encode()
        try:
            with in_place_of(self._path(remembered.id), private=True) as file:
                file.write(hmac.digest(self._key, data, sha256) + data)
        except OSError as error:
            log.warning("a transcript is not kept on disk: %s", error)

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.transcript"


def _plain(remembered: Remembered) -> dict[str, Any]:
    answers = [
        {**vars(each), "calls": [vars(call) for call in each.calls]}
        for each in (remembered.answered, *remembered.earlier)
    ]
    return {"read": vars(remembered.read), "place": remembered.place, "answers": answers}


def _remembered(said: dict[str, Any], id: str) -> Remembered:
    read = said["read"]
    transcript = Transcript(read["text"], tuple(read["tokens"]), tuple((a, b) for a, b in read["cuts"]))
    answered, *earlier = (_answered(each) for each in said["answers"])
    return Remembered(transcript, said["place"], answered, tuple(earlier), id)


def _answered(said: dict[str, Any]) -> Answered:
    calls = tuple(ToolCall(**call) for call in said["calls"])
    return Answered(**{**said, "calls": calls, "tokens": tuple(said["tokens"]), "omitted": tuple(said["omitted"])})
