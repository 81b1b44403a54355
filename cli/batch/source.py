"""The input of a batch: what kind of file it is, and which are refused because they are something else."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from cortexmlx.cli.batch.input import Ids, survey
from cortexmlx.errors import InvalidRequest


class Format(str, Enum):
    """How to read the input."""

    auto = "auto"
    jsonl = "jsonl"
    lines = "lines"


STDIN = "-"
_JSON = (".jsonl", ".ndjson", ".json")
_OTHERS = {
    **dict.fromkeys((".csv", ".tsv"), "a table"),
    **dict.fromkeys((".yaml", ".yml", ".toml", ".xml", ".html", ".htm", ".ipynb", ".rtf"), "a text of another form"),
}
_PACKED = {b"\x1f\x8b": "gzip -dc", b"\x28\xb5\x2f\xfd": "zstd -dc", b"BZh": "bzip2 -dc", b"\xfd7zXZ": "xz -dc"}
_BINARY = (b"PK\x03\x04", b"PAR1", b"%PDF")
_HEAD_BYTES = 1 << 16
_PATIENCE_SECONDS = 0.05
"""How long a pipe may say nothing before what has finished is looked for."""


@contextmanager
def opened(source: str, input_format: Format) -> Iterator[Iterable[bytes | None]]:
    """The input's lines as bytes, and None where a pipe has nothing yet. Raises InvalidRequest for a file that is no
    list of requests, OSError for none.
    """
    if source == STDIN:
        yield _coming(sys.stdin.buffer)
        return
    with Path(source).open("rb") as file:
        if Path(source).is_file():
            _check(Path(source), file.read(_HEAD_BYTES), input_format)
            file.seek(0)
            yield file
        else:
            yield _coming(file)


def _coming(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a pipe as they come. Nothing else may have read of it."""
    try:
        descriptor = file.fileno()
    except OSError:  # an object in the place of stdin
        yield from file
        return
    begun: list[bytes] = []
    while True:
        if not select.select([descriptor], [], [], _PATIENCE_SECONDS)[0]:
            yield None
            continue
        data = os.read(descriptor, _HEAD_BYTES)
        if not data:
            break
        *lines, rest = data.split(b"\n")
        for line in lines:
            yield b"".join([*begun, line])
            begun = []
        begun.append(rest)
    yield b"".join(begun)


def is_jsonl(source: str, input_format: Format) -> bool | None:
    """True for JSON lines, False for plain ones, None to look at the first line."""
    if input_format is not Format.auto:
        return input_format is Format.jsonl
    return True if Path(source).suffix.lower() in _JSON else None


def ids_of(source: str, input_format: Format) -> Ids | None:
    """The ids of a regular file, read ahead; None of a pipe, which is read once. Raises InvalidRequest if one occurs
    twice.
    """
    path = Path(source)
    if source == STDIN or not path.is_file():
        return None
    with path.open("rb") as file:
        return survey(file, is_jsonl(source, input_format))


def _check(path: Path, head: bytes, input_format: Format) -> None:
    for magic, unpack in _PACKED.items():
        if head.startswith(magic):
            raise InvalidRequest(f"{path} is compressed: {unpack} {path} | cortexmlx batch ... -")
    if head.startswith(_BINARY) or b"\0" in head:
        raise InvalidRequest(f"{path} is no text: batch reads JSONL or plain lines, in UTF-8")
    if input_format is not Format.auto:
        return
    if (kind := _OTHERS.get(path.suffix.lower())) is not None:
        raise InvalidRequest(
            f"{path} is {kind}: batch reads JSONL, a request a line, or plain lines, a prompt a line. With --format "
            "lines every line of it is a prompt, the first one too"
        )
    first = head.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")[0].strip()
    if first == b"{" or (first.startswith(b"[") and path.suffix.lower() in _JSON):
        what = ".[]" if first != b"{" else "."
        raise InvalidRequest(
            f"{path} is one JSON value over several lines, but must have a request on each line: "
            f"jq -c '{what}' {path} | cortexmlx batch ... -"
        )
