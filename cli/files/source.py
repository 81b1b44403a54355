"""The input of a batch: its format, and the rejection of files that are something else."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from cortexmlx.cli.terminal import console
from cortexmlx.errors import InvalidRequest


class InputFormat(str, Enum):
    """The format of the input lines: JSONL, plain, or found by the first line."""

    auto = "auto"
    jsonl = "jsonl"
    lines = "lines"


STDIN = "-"
_JSON = (".jsonl", ".ndjson", ".json")
_TABLE = "a table"
_OTHER_FORMATS = {
    **dict.fromkeys((".csv", ".tsv"), _TABLE),
    **dict.fromkeys((".yaml", ".yml", ".toml", ".xml", ".html", ".htm", ".ipynb", ".rtf"), "a text of another form"),
}
GUIDE = "https://github.com/cortexmlx/cortexmlx/blob/main/docs/batch.md"
"""The page on batch files, for users who have only the package."""

_COMPRESSED = {b"\x1f\x8b": "gzip -dc", b"\x28\xb5\x2f\xfd": "zstd -dc", b"BZh": "bzip2 -dc", b"\xfd7zXZ": "xz -dc"}
_WIDE_ENCODINGS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_BINARY = (b"PK\x03\x04", b"PAR1", b"%PDF")
_BLANK = b"\xef\xbb\xbf \t\r\n"
_HEAD_BYTES = 1 << 16
_PATIENCE_SECONDS = 0.05
"""How long to wait for a silent pipe before looking for finished requests."""
_SILENCE_SECONDS = 1.0
"""How long to wait for a pipe without a writer before a note says so: silence looks like a hang."""


@contextmanager
def open_lines(source: str, input_format: InputFormat) -> Iterator[Iterable[bytes | None]]:
    """Open the input and yield its lines as bytes. None stands for a line that a pipe does not have yet.

    Raises InvalidRequest for a file that is no list of requests, OSError for one that cannot be opened.
    """
    if source == STDIN:
        yield _pipe_lines(sys.stdin.buffer, source, input_format)
        return
    with _open_file(Path(source)) as file:
        if Path(source).is_file():
            _reject_other_formats(source, file.read(_HEAD_BYTES), input_format)
            file.seek(0)
            yield file
        else:
            yield _pipe_lines(file, source, input_format)


def _open_file(path: Path) -> BinaryIO:
    """Open a file or a pipe for reading. Opening a pipe waits for a writer, and a note says so."""
    if not path.is_fifo():
        return path.open("rb")
    note = threading.Timer(_SILENCE_SECONDS, console.print_note, [f"waiting for somebody to write to {path} ..."])
    note.daemon = True
    note.start()
    try:
        return path.open("rb")
    finally:
        note.cancel()


def _pipe_lines(file: BinaryIO, source: str, input_format: InputFormat) -> Iterator[bytes | None]:
    """Yield the lines of a pipe as they arrive, and None while there is no new one. Nothing else may have read from
    the pipe.

    Raises InvalidRequest if the pipe's first bytes are no list of requests.
    """
    try:
        descriptor = file.fileno()
    except OSError:  # an object that stands in for stdin
        yield from file
        return
    line_parts: list[bytes] = []
    is_first = True
    while True:
        if not select.select([descriptor], [], [], _PATIENCE_SECONDS)[0]:
            yield None
            continue
        data = os.read(descriptor, _HEAD_BYTES)
        if not data:
            break
        if is_first:
            _reject_other_formats(source, data, input_format)
            is_first = False
        *lines, rest = data.split(b"\n")
        for line in lines:
            yield b"".join([*line_parts, line])
            line_parts = []
        line_parts.append(rest)
    yield b"".join(line_parts)


def is_jsonl(source: str, input_format: InputFormat) -> bool | None:
    """Return True for JSON lines, False for plain lines, None if the first line must decide."""
    if input_format is not InputFormat.auto:
        return input_format is InputFormat.jsonl
    return True if Path(source).suffix.lower() in _JSON else None


@contextmanager
def open_ahead(source: str) -> Iterator[BinaryIO | None]:
    """Open a regular file for a first reading before the run. Yield None for a pipe, which can be read only once."""
    path = Path(source)
    if source == STDIN or not path.is_file():
        yield None
        return
    with path.open("rb") as file:
        yield file


def _reject_other_formats(source: str, head: bytes, input_format: InputFormat) -> None:
    """Raise InvalidRequest if name or first bytes show another format than JSONL or lines; say how to convert it."""
    retry_command = "cortexmlx batch ... -"
    name, file = ("stdin", "") if source == STDIN else (source, f" {source}")
    for magic, unpack in _COMPRESSED.items():
        if head.startswith(magic):
            raise InvalidRequest(f"{name} is compressed: {unpack}{file} | {retry_command}")
    for mark, encoding in _WIDE_ENCODINGS.items():
        if head.startswith(mark):
            convert = f"iconv -f {encoding} -t UTF-8{file}"
            raise InvalidRequest(f"{name} is {encoding}, and batch reads UTF-8: {convert} | {retry_command}")
    if head.startswith(_BINARY) or b"\0" in head:
        raise InvalidRequest(f"{name} is no text: batch reads JSONL or plain lines, in UTF-8")
    if input_format is not InputFormat.auto:
        return
    suffix = Path(source).suffix.lower()
    if (kind := _OTHER_FORMATS.get(suffix)) is not None:
        conversion_hint = f". Five lines of Python make JSONL of one: {GUIDE}" if kind == _TABLE else ""
        raise InvalidRequest(
            f"{name} is {kind}: batch reads JSONL, a request a line, or plain lines, "
            f"a prompt a line. With --format lines every line of it is a prompt, the "
            f"first one too{conversion_hint}"
        )
    first, newline, _ = head.lstrip(_BLANK).partition(b"\n")
    first = first.strip()
    if (first in (b"{", b"[") and newline) or (first.startswith(b"[") and suffix in _JSON):
        jq_filter = ".[]" if first != b"{" else "."
        raise InvalidRequest(
            f"{name} is one JSON value, but must have a request on each line: jq -c '{jq_filter}'{file} | "
            f"{retry_command}"
        )
    if first and suffix in _JSON and not any(line.lstrip(_BLANK).startswith(b"{") for line in head.splitlines()):
        raise InvalidRequest(f"{name} has no JSON object: --format lines reads each line of it as a prompt")
