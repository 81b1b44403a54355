"""The tables of all models: tokens of one mean nothing to another."""

from __future__ import annotations

import logging
from pathlib import Path

from cortexmlx.server.transcripts.saved import SavedTranscripts
from cortexmlx.server.transcripts.table import Table

log = logging.getLogger("cortexmlx")


class Tables:
    """A table for each model, of at most `most` bytes; 0: none. With a `folder` they outlive the process."""

    def __init__(self, most: int, folder: Path | None = None) -> None:
        self._most = most
        self._folder = folder
        self._tables: dict[str, Table] = {}

    def of(self, identity: str) -> Table | None:
        """Return the table of the model with this identity; None if nothing is kept."""
        if not self._most:
            return None
        if identity not in self._tables:
            self._tables[identity] = Table(self._most, self._shelf(identity))
        return self._tables[identity]

    def _shelf(self, identity: str) -> SavedTranscripts | None:
        try:
            return None if self._folder is None else SavedTranscripts(self._folder, identity)
        except OSError as error:
            log.warning("transcripts are not kept on disk: %s", error)
            return None
