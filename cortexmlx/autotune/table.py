"""ChoiceTable: the times of candidates on disk, in one file for each identity. Without mlx."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cortexmlx.autotune.timing import Timing
from cortexmlx.system.files import cache_folder, write_atomically

_log = logging.getLogger(__name__)

MAX_ENTRIES = 1000
"""Entries of a file. Beyond them, the oldest go."""

MAX_FILES = 16
"""Files of a folder. Beyond them, those that were written longest ago go."""

_MAX_BYTES = 4 << 20
"""A larger file is not ours."""


@dataclass(frozen=True)
class TimingIdentity:
    """The hardware and software that timings are valid for. If any part of it changes, everything is timed again."""

    device: str
    """The GPU's name, or the CPU."""
    system: str
    """The operating system's version: Apple's compiler is part of it."""
    mlx: str
    texts: str
    """A digest of the texts of all kernels."""
    cortexmlx: str

    @property
    def file_name(self) -> str:
        """The name of the file that holds the timings of this identity."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:24] + ".json"


@dataclass(frozen=True)
class TimedJob:
    """The stored timing of one job."""

    label: str
    """The job in a line of a table, without its class."""
    batch: str
    """The class of rows and lengths in a line of a table."""
    usual: str
    """The candidate that the rules choose without a timing."""
    timing: Timing


class ChoiceTable:
    """The timed jobs of one identity, by `TuningJob.key`, in a file of `folder` (None: among the user's caches).

    A file that cannot be read, is damaged, or belongs to another identity has no entries. A file that cannot be written
    is not written. Neither is an error: times can be taken again. Several processes may use it at once.
    """

    def __init__(self, identity: TimingIdentity, folder: Path | None = None) -> None:
        self.identity = identity
        self._folder = folder

    @property
    def path(self) -> Path:
        """The table's file on disk."""
        folder = cache_folder() / "choices" if self._folder is None else self._folder
        return folder / self.identity.file_name

    def read(self) -> dict[str, TimedJob]:
        """Return the stored entries by job key. Damaged entries are left out."""
        try:
            path = self.path
            if not path.is_file() or path.stat().st_size > _MAX_BYTES:
                return {}
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            _log.info("the times of earlier runs are not readable (%s): they are taken again", error)
            return {}
        if not isinstance(content, dict) or content.get("identity") != asdict(self.identity):
            return {}
        entries = content.get("entries")
        parsed_entries = (
            {key: _parse_entry(value) for key, value in entries.items()} if isinstance(entries, dict) else {}
        )
        return {key: entry for key, entry in parsed_entries.items() if entry is not None}

    def add(self, entries: Mapping[str, TimedJob]) -> bool:
        """Add entries to the file, or replace those with the same key. Return whether the file was written.

        If two processes add at once, entries of one may be lost, and are timed again.
        """
        merged_entries = {key: entry for key, entry in self.read().items() if key not in entries} | dict(entries)
        newest_entries = dict(list(merged_entries.items())[-MAX_ENTRIES:])
        content = {
            "identity": asdict(self.identity),
            "entries": {key: asdict(entry) for key, entry in newest_entries.items()},
        }
        try:
            path = self.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(path) as file:
                file.write(json.dumps(content, indent=1).encode())
            with suppress(OSError):  # another process removes them, too
                files = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
                for oldest in files[:-MAX_FILES]:
                    oldest.unlink()
        except OSError as error:
            _log.info("the times of this run are not kept: %s", error)
            return False
        return True


def _parse_entry(value: Any) -> TimedJob | None:
    """Return the entry that a JSON value describes; None if it is incomplete."""
    if not isinstance(value, dict):
        return None
    texts = [value.get(name) for name in ("label", "batch", "usual")]
    timing = value.get("timing")
    if not all(isinstance(text, str) for text in texts) or not isinstance(timing, dict):
        return None
    seconds, refused = timing.get("seconds"), timing.get("refused")
    if not isinstance(seconds, dict) or not isinstance(refused, dict) or not seconds:
        return None
    if not all(type(s) in (int, float) and 0 <= s <= sys.float_info.max for s in seconds.values()):
        return None
    if not all(isinstance(reason, str) for reason in refused.values()) or seconds.keys() & refused.keys():
        return None
    label, batch, default_candidate = map(str, texts)
    return TimedJob(
        label, batch, default_candidate, Timing({name: float(s) for name, s in seconds.items()}, dict(refused))
    )
