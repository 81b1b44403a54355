"""Files whose text goes into a message: named by `/file PATH`, or as `@path` in the message itself."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from cortexmlx.cli.chat.session import Attached
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes

LARGEST = 4 << 20
"""Bytes of a file that may go into a message, at most: about a million tokens."""

_KNOWN = {b"%PDF": "a PDF", b"PK\x03\x04": "an archive or an office document", b"\x89PNG": "an image"}
_MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_FILE_NAME = re.compile(r"[^(\[]*\w\.\w{1,8}")
"""A word with a file ending. Code of several lines has such words, too: decorators such as `@functools.cache`."""
_BEHIND = ".,;:!?)]}'\""
"""Characters after a path that may not belong to it."""


def attach(name: str) -> Attached:
    """Return a file with its text. Raises InvalidRequest if there is no such file, if it is no text, or if it is empty
    or too large.
    """
    path = Path(os.path.expanduser(name.strip().strip("\"'")))
    try:
        if not path.is_file():
            what = "is a folder: name the files in it" if path.is_dir() else "is not there"
            raise InvalidRequest(f"{path} {what if path.is_dir() or not path.exists() else 'is no file'}")
        size = path.stat().st_size
        if size > LARGEST:
            raise InvalidRequest(f"{path} has {format_bytes(size)}, and {format_bytes(LARGEST)} of a file are read")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return Attached(path, _as_text(path, data))


def _as_text(path: Path, data: bytes) -> str:
    known = next((what for begin, what in _KNOWN.items() if data.startswith(begin)), None)
    if known is not None or b"\0" in data:
        raise InvalidRequest(f"{path} is {known or 'a binary file'}, and only text can be read")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{path} is no UTF-8 text: byte {error.start:,} is {data[error.start]:#04x}. Convert it first (iconv)."
        ) from None
    if not text.strip():
        raise InvalidRequest(f"{path} is empty")
    return text


def mentioned(message: str) -> tuple[list[Attached], list[str]]:
    """Return the files that a message names as `@path`, in order, and the names that look like paths but are no files.

    Other words with an @ are words. Raises InvalidRequest for a file that cannot go into a message.
    """
    found: dict[Path, Attached] = {}
    missing = []
    for quoted, plain in _MENTION.findall(message):
        path = _file(quoted or plain)
        if path is not None:
            found.setdefault(path, attach(str(path)))
        elif quoted or "/" in plain or ("\n" not in message and _FILE_NAME.fullmatch(plain.rstrip(_BEHIND))):
            missing.append(quoted or plain)
    return list(found.values()), missing


def _file(name: str) -> Path | None:
    """Return the file of that name, also if punctuation follows the name; None if there is no such file."""
    for each in dict.fromkeys((name, name.rstrip(_BEHIND))):
        path = Path(os.path.expanduser(each))
        try:
            if each and path.is_file():
                return path
        except (OSError, ValueError):
            return None
    return None


def with_files(files: Sequence[Attached], message: str) -> str:
    """Return the message after the texts of its files. Each text is in a fence with the file's name above it."""
    return "\n\n".join([*map(_fenced, files), message])


def _fenced(file: Attached) -> str:
    longest = max(map(len, re.findall(r"`{3,}", file.text)), default=2)
    fence = "`" * (longest + 1)
    return f"{file.path}:\n{fence}{file.path.suffix.removeprefix('.')}\n{file.text.rstrip()}\n{fence}"
