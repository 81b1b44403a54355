"""The files of one run of embed: OUT, and OUT.run with its settings and a digest of each text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cortexmlx.cli.embed.jsonl import JsonlRowFile, RowStream
from cortexmlx.cli.embed.npy import NpyRowFile
from cortexmlx.cli.embed.rows import EmbeddingRow, RowFile
from cortexmlx.cli.embed.texts import TextLine
from cortexmlx.cli.files.outputs import (
    STDOUT,
    ExistingFileMode,
    check_extension,
    check_output,
    check_side_files,
    file_size,
    is_regular,
)
from cortexmlx.cli.files.run_file import LockedRunFile, run_path
from cortexmlx.errors import InvalidRequest


@dataclass(frozen=True)
class EmbedSettings:
    """The settings that must be equal for a run to resume another one's file."""

    model: str
    adapter: str | None = None
    prompt: str | None = None
    dimensions: int | None = None
    truncate: bool = False
    kv_bits: int | None = None
    kv_group_size: int | None = None
    weights: str | None = None
    """Identity of the content of the model's files. None before they are loaded."""
    instruction: str | None = None
    """The text before each text. None before the model is loaded."""
    longest_text: int | None = None
    """Tokens of the longest text; longer ones are cut off. None before the model is loaded, or if they are refused."""


class EmbedFiles:
    """The files of an embed run: OUT and OUT.run. Both are checked before a model is loaded.
    Raises InvalidRequest or CortexError, each with the next step.

    Regular files are synced and resumed. Stdout, pipes and devices are only written.
    """

    def __init__(self, output: Path, source: str, mode: ExistingFileMode) -> None:
        self.is_resumable = is_regular(output)
        """Whether OUT is a regular file, so that a later run can go on with it."""
        self._output = output
        self._digests: dict[int, str] = {}
        self._run: LockedRunFile | None = None
        self._is_open = False
        extension = output.suffix.lower()
        if output != STDOUT:
            resuming = mode is ExistingFileMode.RESUME
            check_output(output, "-o", source, mode, "embed")
            if extension != ".npy":
                check_extension(output, "-o", mode, "embed")
            check_side_files(output, [run_path(output)], (Path(source),), "embed")
            if resuming and not self.is_resumable:
                raise InvalidRequest(f"{output} is no file, so there is nothing to continue: leave out --resume")
        if not self.is_resumable and extension == ".npy":
            raise InvalidRequest(f"{output} is no file, and npy needs one: give -o a file, or another ending")
        if self.is_resumable:
            self._run = LockedRunFile(output, "embed")
        self._is_resuming = mode is ExistingFileMode.RESUME and bool(file_size(output))
        try:
            self.rows = self._make_row_file(output, extension)
        except BaseException:
            self.__exit__()
            raise
        self.previous_rows = self.rows.count
        """Rows that an earlier run has written."""

    def __enter__(self) -> EmbedFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_open:
            self.rows.close()
        if self._run is not None:
            self._run.close()

    def check_settings(self, settings: EmbedSettings) -> None:
        """Raise InvalidRequest if the run to resume had other settings."""
        if self._run is None or not self._is_resuming:
            return
        saved_settings = self._run.read_settings()
        current_settings = {
            name: value for name, value in _settings_json(settings).items() if not _is_set_on_load(name, settings)
        }
        if changed_names := [name for name, value in current_settings.items() if saved_settings.get(name) != value]:
            raise InvalidRequest(
                f"{self._output.name} was written with another {' and '.join(changed_names)}: use the same, or --force "
                "to begin again"
            )
        for entry in self._run.read_entries():
            self._digests |= enumerate(entry["digests"], int(entry["first"]))

    def check_line(self, row_index: int, line: TextLine) -> None:
        """Raise InvalidRequest if the text of an existing row has changed."""
        if self._digests.get(row_index, line.digest) != line.digest:
            raise InvalidRequest(
                f"the input has changed: row {row_index + 1} of {self._output.name} is of another text than line "
                f"{line.number} has now: use the same input, or --force to begin again"
            )

    def open(self, settings: EmbedSettings, dimensions: int) -> None:
        """Begin or resume the run."""
        if self._is_resuming:
            self.check_settings(settings)
        self.open_rows(dimensions)
        if self._run is not None and not self._is_resuming:
            self._run.start_run(_settings_json(settings))

    def open_rows(self, dimensions: int | None) -> None:
        """Open OUT without OUT.run. `dimensions` is the length of a vector; None: as its rows have."""
        self.rows.open(dimensions)
        self._is_open = True

    def append(self, rows: Sequence[EmbeddingRow]) -> None:
        """Write rows, after the digests of their texts: rows without digests could not be checked by a later run."""
        if self._run is not None:
            self._run.append({"first": self.rows.count, "digests": [row.line.digest for row in rows]}, b"\n")
        self.rows.append(rows)

    def _make_row_file(self, output: Path, extension: str) -> RowFile:
        """Return the row file for OUT's format."""
        overwrite = not self._is_resuming
        if not self.is_resumable:
            return RowStream(None if output == STDOUT else output)
        return (NpyRowFile if extension == ".npy" else JsonlRowFile)(output, overwrite=overwrite)


def _is_set_on_load(name: str, settings: EmbedSettings) -> bool:
    """Return whether a setting is still unknown because the model is not loaded yet."""
    return name in ("weights", "instruction", "longest_text") and settings.weights is None


def _settings_json(settings: EmbedSettings) -> dict[str, Any]:
    """Return the settings as JSON, with the adapter's full path."""
    adapter = settings.adapter
    adapter_path = None if adapter is None else str(Path(os.path.expanduser(adapter)).resolve())
    return asdict(replace(settings, adapter=adapter_path))
