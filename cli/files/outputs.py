"""Output files: checked before anything is computed. Those of a batch are locked, and continued by later runs."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterable
from enum import Enum
from io import FileIO
from pathlib import Path

import typer

from cortexmlx.errors import CortexError, InvalidRequest

_STANDARD = ("stdin", "stdout", "stderr")
_DESCRIPTOR = re.compile(rf"(?:/dev/({'|'.join(_STANDARD)})|(?:/dev|/proc/self)/fd/(\d+))")
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


class ExistingFileMode(Enum):
    """What a run does with an output file that exists already."""

    NEW = "it is refused"
    FORCE = "it is begun again"
    RESUME = "what it holds stays, and is not asked again"
    RETRY = "the same, but for errors"


def choose_mode(output: Path, *, resume: bool, retry_errors: bool, force: bool) -> ExistingFileMode:
    """Return what to do with an existing OUT. Raises typer.BadParameter for options that do not go together."""
    needed = ["--resume"] if retry_errors and not resume else []
    needed += ["-o OUT"] if (resume or retry_errors) and output == STDOUT else []
    if needed:
        raise typer.BadParameter(f"{'--resume' if resume else '--retry-errors'} needs {' and '.join(needed)}")
    if resume and force:
        raise typer.BadParameter("--resume continues OUT, and --force starts again: give one of them")
    if resume:
        return ExistingFileMode.RETRY if retry_errors else ExistingFileMode.RESUME
    return ExistingFileMode.FORCE if force else ExistingFileMode.NEW


def output_path(path: Path | None) -> Path:
    """Return the path of OUT; `STDOUT` for None, `-` and `/dev/stdout`."""
    return STDOUT if path is None or path in (STDOUT, Path("/dev/stdout")) else path


def rewrite_path(path: Path) -> Path:
    """Return the path of the file that replaces a record file in a rewrite."""
    return path.with_name(path.name + ".new")


def open_locked(path: Path) -> FileIO:
    """Open a file to append to, locked against other runs. Raises InvalidRequest if another run writes the file, and
    OSError if it cannot be opened.
    """
    file = FileIO(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if not isinstance(error, BlockingIOError):
            raise
        raise InvalidRequest(f"another batch is writing {path}: wait for it, or give another name") from None
    return file


def descriptor_of(path: Path) -> int | None:
    """Return the descriptor of this process that a path like `/dev/fd/3` names, open or not; None for other paths."""
    match = _DESCRIPTOR.fullmatch(str(path.absolute()))
    return None if match is None else int(match[2]) if match[2] else _STANDARD.index(match[1])


def is_regular(path: Path) -> bool:
    """Return whether a path is a regular file or does not exist yet; False for stdout and the process's descriptors."""
    if path == STDOUT or descriptor_of(path) is not None:
        return False
    return path.is_file() or not path.exists()


def file_size(path: Path) -> int:
    """Return the size of a regular file in bytes; 0 for anything else."""
    return path.stat().st_size if is_regular(path) and path.is_file() else 0


def check_output(path: Path, option: str) -> None:
    """Check that the file given by `option` can be written. Raises InvalidRequest, which says what to do instead."""
    target = Path(os.path.realpath(path))
    try:
        file_stat = path.stat()
    except FileNotFoundError:
        file_stat = None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}: give {option} another name") from None
    if file_stat is not None and stat.S_ISDIR(file_stat.st_mode):
        raise InvalidRequest(f"{path} is a folder: give {option} a file")
    if file_stat is None and descriptor_of(path) is not None:
        raise InvalidRequest(f"{path} is not open: give {option} another name")
    if file_stat is None and not target.parent.is_dir():
        raise InvalidRequest(f"no folder {target.parent} to write {target.name} into")
    if not os.access(path if file_stat is not None else target.parent, os.W_OK):
        raise InvalidRequest(f"{path} may not be written: give {option} another name")


def check_batch_output(path: Path, option: str, source: str, mode: ExistingFileMode) -> None:
    """Check an output file of a batch of `source` before a model is loaded. A name such as `.csv` is refused, except
    to resume a run, which an earlier version may have begun. Raises InvalidRequest with the next step.
    """
    check_output(path, option)
    if path.exists():
        if Path(source).exists() and path.samefile(source):
            raise InvalidRequest(f"{source} is both input and output: give {option} another name")
        if is_regular(path):
            open_locked(path).close()
        if mode in (ExistingFileMode.RESUME, ExistingFileMode.RETRY):
            return
    if mode is ExistingFileMode.NEW and file_size(path):
        raise InvalidRequest(
            f"{path} exists already: --resume continues it, --force starts again and deletes what it holds"
        )
    if is_regular(path) and (kind := _OTHER_FORMS.get(path.suffix.lower())):
        raise InvalidRequest(
            f"batch writes JSONL, a JSON record a line, and {path} is named like {kind}: "
            f"give {option} {path.with_name(path.stem.removesuffix('.jsonl') + '.jsonl')}"
        )


def check_side_files(output: Path, side_files: Iterable[Path], other_files: Iterable[Path | None]) -> None:
    """Check the files that a run writes beside its output. Raises InvalidRequest if one of them is one of the
    `other_files` that the user named, or another program's file.
    """
    named_files = [named_file for named_file in other_files if named_file is not None]
    for each in side_files:
        for other in named_files:
            if os.path.realpath(other) == str(each):
                raise InvalidRequest(f"{other} is what a batch to {output} keeps for itself: give -o another name")
        if each.exists() and not (each.is_file() and _is_record_file(each)):
            raise InvalidRequest(
                f"{each} is none of a batch's, and one to {output} writes over it: give -o another name"
            )


def _is_record_file(path: Path) -> bool:
    """Return whether a file is empty or begins with a JSON object. Zero bytes, as after power loss, count as empty."""
    with path.open("rb") as file:
        return file.read(2).strip(b"\0") in (b"", b"{", b'{"')


def write_error(name: str, error: OSError, file_state: str) -> CortexError:
    """Return the error for a file that cannot be written. `file_state` says what remains of it."""
    return CortexError(f"{name} cannot be written: {error.strerror or error}; {file_state}")
