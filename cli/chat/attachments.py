"""Files whose text goes into a message: named by `/file PATH`, or as `@path` in the message itself."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from cortexmlx.cli.chat.session import AttachedFile
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes

MAX_FILE_BYTES = 4 << 20
"""Bytes of a file that may go into a message, at most: about a million tokens."""

_BINARY_KINDS = {b"%PDF": "a PDF", b"PK\x03\x04": "an archive or an office document", b"\x89PNG": "an image"}
_MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_FILE_NAME = re.compile(r"[^(\[]*\w\.\w{1,8}")
"""A word with a file ending. Code of several lines has such words, too: decorators such as `@functools.cache`."""
_TRAILING_PUNCTUATION = ".,;:!?)]}'\""
"""Characters after a path that may not belong to it."""


def read_attachment(name: str) -> AttachedFile:
    """Read a text file to attach to a message. Raises InvalidRequest if it is missing, not text, empty or too large."""
    path = Path(os.path.expanduser(name.strip().strip("\"'")))
    try:
        if not path.is_file():
            problem = "is a folder: name the files in it" if path.is_dir() else "is not there"
            raise InvalidRequest(f"{path} {problem if path.is_dir() or not path.exists() else 'is no file'}")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InvalidRequest(
                f"{path} has {format_bytes(size)}, and {format_bytes(MAX_FILE_BYTES)} of a file are read"
            )
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return AttachedFile(path, _decode_text(path, data))


def _decode_text(path: Path, data: bytes) -> str:
    """Return the text of a file's bytes. Raises InvalidRequest if they are not text, or empty."""
    binary_kind = next((kind for magic, kind in _BINARY_KINDS.items() if data.startswith(magic)), None)
    if binary_kind is not None or b"\0" in data:
        raise InvalidRequest(f"{path} is {binary_kind or 'a binary file'}, and only text can be read")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{path} is no UTF-8 text: byte {error.start:,} is {data[error.start]:#04x}. Convert it first (iconv)."
        ) from None
    if not text.strip():
        raise InvalidRequest(f"{path} is empty")
    return text


def read_mentions(message: str) -> tuple[list[AttachedFile], list[str]]:
    """Read the files that a message names as `@path`. Return them in order, and the names that look like paths but are
    no files.

    Other words with an @ are words. Raises InvalidRequest for a file that cannot go into a message.
    """
    files: dict[Path, AttachedFile] = {}
    missing_names = []
    for quoted_name, plain_name in _MENTION.findall(message):
        path = _resolve_mention(quoted_name or plain_name)
        if path is not None:
            files.setdefault(path, read_attachment(str(path)))
        elif (
            quoted_name
            or "/" in plain_name
            or ("\n" not in message and _FILE_NAME.fullmatch(plain_name.rstrip(_TRAILING_PUNCTUATION)))
        ):
            missing_names.append(quoted_name or plain_name)
    return list(files.values()), missing_names


def _resolve_mention(name: str) -> Path | None:
    """Return the path of a mentioned file, also if punctuation follows its name; None if there is no such file."""
    for each in dict.fromkeys((name, name.rstrip(_TRAILING_PUNCTUATION))):
        path = Path(os.path.expanduser(each))
        try:
            if each and path.is_file():
                return path
        except (OSError, ValueError):
            return None
    return None


def prepend_files(files: Sequence[AttachedFile], message: str) -> str:
    """Return the message after the texts of its files, each in a code fence below its path."""
    return "\n\n".join([*map(_fence_file, files), message])


def _fence_file(file: AttachedFile) -> str:
    """Return a file's text in a code fence, below its path."""
    longest_run = max(map(len, re.findall(r"`{3,}", file.text)), default=2)
    fence = "`" * (longest_run + 1)
    return f"{file.path}:\n{fence}{file.path.suffix.removeprefix('.')}\n{file.text.rstrip()}\n{fence}"
