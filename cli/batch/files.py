"""The files that a batch writes: OUT, the file for errors, and OUT.run beside OUT."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from cortexmlx.cli.batch.output import BatchWriter, RecordFile
from cortexmlx.cli.batch.resume import RunFile, RunIdentity, beside
from cortexmlx.cli.files.outputs import STDOUT, Mode, check_ending, check_output, check_own, is_regular, size_of
from cortexmlx.cli.files.stream import RecordStream
from cortexmlx.errors import InvalidRequest


class BatchFiles:
    """The files for the records of a run.

    All paths are checked before a model is loaded. Raises InvalidRequest or CortexError, each with the next step.
    Regular files are synced, resumed and put into order. Stdout, pipes and devices are only written.

    - `kept`: whether OUT is a regular file.
    - `created`: when the run first began, in seconds since 1970.
    - `done`: the keys of all existing records.
    - `failed`: the keys of the error records among them.
    """

    def __init__(self, output: Path, errors: Path | None, mode: Mode, source: str) -> None:
        for path, option in ((output, "-o"), (errors, "--errors")):
            if path is not None and path != STDOUT:
                check_output(path, option, source, mode)
                check_ending(path, option, mode)
        if errors is not None and _are_one(output, errors):
            raise InvalidRequest(f"{output} is for answers and for errors: leave out --errors, or give it another name")
        if output != STDOUT:
            check_own(output, beside(output), (Path(source), errors))
        self.kept = is_regular(output)
        if mode in (Mode.RESUME, Mode.RETRY) and not self.kept:
            raise InvalidRequest(f"{output} is no file, so there is nothing to continue: leave out --resume")
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self.created = int(time.time())
        self._output = output
        self._errors = errors
        self._mode = mode
        self._read: dict[Path, RecordFile] = {}
        self._opened: list[RecordFile | RecordStream] = []
        self._run = RunFile(output) if self.kept else None

    def __enter__(self) -> BatchFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._opened:
            file.close()
        if self._run is not None:
            self._run.close()

    def check(self, identity: RunIdentity, digests: Mapping[str, str]) -> None:
        """Read the records of the run to resume; do nothing for a new run. `digests` has a digest of each input line.

        Raises InvalidRequest if that run had other settings, or if a line has changed since its record was written.
        """
        if self._run is not None and self._goes_on:
            self.created = self._run.check(identity)
            for path in (self._output, self._errors):
                if path is not None and is_regular(path):
                    self._records(path)
            self._run.check_lines(digests, self.done, self.failed)

    def open(self, identity: RunIdentity, digests: Mapping[str, str]) -> BatchWriter:
        """Begin or resume the run, keep the digests of the input's lines, and return the writer."""
        going = self._run is not None and self._goes_on
        if self._run is not None and going:
            self.created = self._run.check(identity)
        out = self._open(self._output, anew=not going)
        writer = BatchWriter(out, out if self._errors is None else self._open(self._errors, anew=not going))
        if self._run is not None:
            if not going:
                self.created = self._run.start(identity)
            self._run.remember(digests)
        return writer

    def arrange(self, lines: Mapping[str, int]) -> None:
        """Put the records of all files into the order of the input's `lines`."""
        for file in self._opened:
            if isinstance(file, RecordFile):
                file.arrange(lines)

    @property
    def _goes_on(self) -> bool:
        going = self._mode in (Mode.RESUME, Mode.RETRY)
        return going and any(path is not None and size_of(path) > 0 for path in (self._output, self._errors))

    def _records(self, path: Path, *, anew: bool = False) -> RecordFile:
        """Return the records of a file, which is read only once."""
        if path not in self._read:
            keep = (lambda record: not record.get("error")) if self._mode is Mode.RETRY else None
            file = self._read[path] = RecordFile(path, keep, anew=anew)
            self.done.update(file.keys)
            self.failed.update(file.failed)
        return self._read[path]

    def _open(self, path: Path, *, anew: bool) -> RecordFile | RecordStream:
        if not is_regular(path):
            self._opened.append(RecordStream(None if path == STDOUT else path))
            return self._opened[-1]
        file = self._records(path, anew=anew)
        file.open()
        self._opened.append(file)
        return file


def _are_one(output: Path, errors: Path) -> bool:
    if STDOUT in (output, errors):
        return output == errors
    if output.exists() and errors.exists():
        return output.samefile(errors)
    return os.path.realpath(output) == os.path.realpath(errors)
