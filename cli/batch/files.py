"""The files that a batch writes: OUT, the file for errors, and OUT.run beside OUT."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from cortexmlx.cli.batch.output import BatchWriter, RecordFile, RecordStream, locked, open_descriptor
from cortexmlx.cli.batch.resume import RunFile, RunIdentity, beside
from cortexmlx.errors import InvalidRequest

STDOUT = Path("-")
_OTHER_FORMS = {
    **dict.fromkeys((".csv", ".tsv", ".xlsx", ".xls", ".ods"), "a table"),
    **dict.fromkeys((".parquet", ".arrow", ".feather", ".orc", ".avro", ".npy", ".npz", ".pkl"), "binary data"),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".duckdb"), "a database"),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z"), "a compressed file"),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".rtf", ".html", ".htm", ".md", ".ipynb"), "a document"),
    **dict.fromkeys((".yaml", ".yml", ".toml", ".xml"), "a text of another form"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg"), "an image"),
    **dict.fromkeys((".gguf", ".safetensors"), "a model"),
}


class Mode(Enum):
    """What becomes of a file that exists already."""

    NEW = "it is refused"
    FORCE = "it is begun again"
    RESUME = "what it holds stays, and is not asked again"
    RETRY = "the same, but for errors"


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
                _check(path, option, source, mode)
                _check_ending(path, option, mode)
        if errors is not None and _are_one(output, errors):
            raise InvalidRequest(f"{output} is for answers and for errors: leave out --errors, or give it another name")
        if output != STDOUT:
            _check_own(output, errors, source)
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
        return going and any(path is not None and _size(path) > 0 for path in (self._output, self._errors))

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


def named(path: Path | None) -> Path:
    """Return where OUT goes: to stdout for None, `-` and `/dev/stdout`, else to the path."""
    return STDOUT if path is None or path in (STDOUT, Path("/dev/stdout")) else path


def is_regular(path: Path) -> bool:
    """Return whether a path is a regular file or does not exist yet. False for stdout and for a path that names an open
    descriptor of this process.
    """
    if path == STDOUT or open_descriptor(path) is not None:
        return False
    return path.is_file() or not path.exists()


def _size(path: Path) -> int:
    return path.stat().st_size if is_regular(path) and path.is_file() else 0


def _are_one(output: Path, errors: Path) -> bool:
    if STDOUT in (output, errors):
        return output == errors
    if output.exists() and errors.exists():
        return output.samefile(errors)
    return os.path.realpath(output) == os.path.realpath(errors)


def _check_own(output: Path, errors: Path | None, source: str) -> None:
    """Check the files that a batch writes beside OUT. Raises InvalidRequest if one is the input, the file for errors or
    somebody else's file.
    """
    for own in beside(output):
        for other in (Path(source), errors):
            if other is not None and os.path.realpath(other) == str(own):
                raise InvalidRequest(f"{other} is what a batch to {output} keeps for itself: give -o another name")
        if own.is_file() and not _begins_as_ours(own):
            raise InvalidRequest(
                f"{own} is none of a batch's, and one to {output} writes over it: give -o another name"
            )


def _begins_as_ours(path: Path) -> bool:
    """Return whether a file is empty or begins with a JSON object. Zeros that a disk left count as empty."""
    with path.open("rb") as file:
        return file.read(2).strip(b"\0") in (b"", b"{", b'{"')


def _check_ending(path: Path, option: str, mode: Mode) -> None:
    """Raise InvalidRequest for a name with the ending of another format. A file with such a name can be resumed, since
    an earlier version may have begun it.
    """
    ending = path.suffix.lower()
    if is_regular(path) and ending in _OTHER_FORMS and not (mode in (Mode.RESUME, Mode.RETRY) and path.exists()):
        raise InvalidRequest(
            f"batch writes JSONL, a JSON record a line, and {path} is named like {_OTHER_FORMS[ending]}: "
            f"give {option} {path.with_name(path.stem.removesuffix('.jsonl') + '.jsonl')}"
        )


def _check(path: Path, option: str, source: str, mode: Mode) -> None:
    target = Path(os.path.realpath(path))
    try:
        there = path.stat()
    except FileNotFoundError:
        there = None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}: give {option} another name") from None
    if there is not None and stat.S_ISDIR(there.st_mode):
        raise InvalidRequest(f"{path} is a folder: give {option} a file")
    if there is None and open_descriptor(path) is not None:
        raise InvalidRequest(f"{path} is not open: give {option} another name")
    if there is None and not target.parent.is_dir():
        raise InvalidRequest(f"no folder {target.parent} to write {target.name} into")
    if there is not None and Path(source).exists() and path.samefile(source):
        raise InvalidRequest(f"{source} is both input and output: give {option} another name")
    if not os.access(path if there is not None else target.parent, os.W_OK):
        raise InvalidRequest(f"{path} may not be written: give {option} another name")
    if there is not None and is_regular(path):
        locked(path).close()
    if mode is Mode.NEW and _size(path):
        raise InvalidRequest(
            f"{path} exists already: --resume continues it, --force starts again and deletes what it holds"
        )
