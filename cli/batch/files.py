"""The files that a batch writes: OUT, the one for errors, and OUT.run beside OUT."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType

from cortexmlx.cli.batch.output import BatchWriter, RecordFile, RecordStream
from cortexmlx.cli.batch.resume import RunFile, RunIdentity, beside
from cortexmlx.errors import InvalidRequest


class Mode(Enum):
    """What becomes of a file that is there already."""

    NEW = "it is refused"
    FORCE = "it is begun again"
    RESUME = "what it holds stays, and is not asked again"
    RETRY = "the same, but for errors"


class BatchFiles:
    """Where the records of a run go. What they would do to a file is checked before anything is loaded: raises
    InvalidRequest or CortexError with what to do. Regular files are kept: they are synced, resumed and put into order;
    stdout, pipes and devices are only written. `created` is when the run first began, in seconds since 1970, `done` has
    the keys of all records that are there, `failed` is how many of them are errors.
    """

    def __init__(self, output: Path | None, errors: Path | None, mode: Mode, source: str) -> None:
        for path in (output, errors):
            if path is not None:
                _check(path, source, mode)
        if output is not None and errors is not None and output.resolve() == errors.resolve():
            raise InvalidRequest(f"{output} is for answers and for errors: leave out --errors, or give it another name")
        if output is not None:
            _check_own(output, errors, source)
        self.kept = output is not None and is_regular(output)
        if mode in (Mode.RESUME, Mode.RETRY) and not self.kept:
            raise InvalidRequest(f"{output} is no file, so there is nothing to go on with: leave out --resume")
        self.done: set[str] = set()
        self.failed = 0
        self.created = int(time.time())
        self._output = output
        self._errors = errors
        self._mode = mode
        self._opened: list[RecordFile | RecordStream] = []
        self._run = RunFile(output) if output is not None and self.kept else None

    def __enter__(self) -> BatchFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._opened:
            file.close()
        if self._run is not None:
            self._run.close()

    def check(self, identity: RunIdentity) -> None:
        """Raises InvalidRequest if the run that is to go on was another one."""
        if self._run is not None and self._goes_on:
            self.created = self._run.check(identity)

    def open(self, identity: RunIdentity) -> BatchWriter:
        """Begin, or go on."""
        self.check(identity)
        if self._run is not None and not self._goes_on:
            for path in (self._output, self._errors):
                if path is not None and path.exists() and is_regular(path):
                    os.truncate(path, 0)
            self.created = self._run.start(identity)
        out = self._open(self._output)
        return BatchWriter(out, out if self._errors is None else self._open(self._errors))

    def remember(self, digests: Mapping[str, str]) -> None:
        """Keep what the lines of the input said. Raises InvalidRequest if one says something else than when its record
        was written.
        """
        if self._run is not None:
            self._run.remember(digests, self.done)

    def arrange(self, lines: Mapping[str, int]) -> None:
        """Put the records of files into the order of the input's `lines`."""
        for file in self._opened:
            if isinstance(file, RecordFile):
                file.arrange(lines)

    @property
    def _goes_on(self) -> bool:
        going = self._mode in (Mode.RESUME, Mode.RETRY)
        return going and any(path is not None and _size(path) > 0 for path in (self._output, self._errors))

    def _open(self, path: Path | None) -> RecordFile | RecordStream:
        if path is None or not is_regular(path):
            stream = RecordStream(path)
            self._opened.append(stream)
            return stream
        file = RecordFile(path, (lambda record: not record.get("error")) if self._mode is Mode.RETRY else None)
        self._opened.append(file)
        self.done.update(file.keys)
        self.failed += file.failed
        return file


def is_regular(path: Path) -> bool:
    """A file, or none yet."""
    return path.is_file() or not path.exists()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _check_own(output: Path, errors: Path | None, source: str) -> None:
    """What lies beside OUT is written as well."""
    for own in beside(output):
        for other in (Path(source), errors):
            if other is not None and other.resolve() == own:
                raise InvalidRequest(f"{other} is what a batch to {output} keeps for itself: give -o another name")


def _check(path: Path, source: str, mode: Mode) -> None:
    if path.is_dir():
        raise InvalidRequest(f"{path} is a folder: give -o a file")
    if not path.absolute().parent.is_dir():
        raise InvalidRequest(f"no folder {path.absolute().parent} to write {path.name} into")
    if path.exists() and Path(source).exists() and path.samefile(source):
        raise InvalidRequest(f"{source} is both input and output: give -o another name")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise InvalidRequest(f"{path} may not be written: give -o another name")
    if mode is Mode.NEW and _size(path):
        raise InvalidRequest(
            f"{path} is there already: --resume goes on with it, --force begins it again and loses what it holds"
        )
