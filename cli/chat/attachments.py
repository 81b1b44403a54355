"""Files that go into a message: named by `/file PATH` or `/image PATH`, as `@path` in the message, or dropped."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cortexmlx.cli.chat.session import AttachedFile, AttachedImage, Attachment, Question
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.vision.images import MAX_FILE_BYTES as MAX_IMAGE_BYTES

MAX_FILE_BYTES = 4 << 20
"""Bytes of a file that may go into a message, at most: about a million tokens."""

_BINARY_KINDS = {b"%PDF": "a PDF", b"PK\x03\x04": "an archive or an office document"}
_IMAGE = re.compile(
    rb"\x89PNG\r\n|\xff\xd8\xff|RIFF.{4}WEBP|GIF8[79]a|BM.{12}.\0\0\0|II\*\0|MM\0\*|.{4}ftyp(?:hei|hev|mif|msf|avi)",
    re.DOTALL,
)
"""How files of images begin, also of kinds that must be converted."""
ONLY_TEXT = "only text can be read"
_MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_DROPPED = re.compile(r"""(?=['"]?(?:/|~/|\./|file://))(?:'([^'\n]+)'|"([^"\n]+)"|((?:\\.|[^\s\\])+))(?!\S)""")
"""A path that is more than a name, first in a line."""
_FILE_NAME = re.compile(r"[^(\[]*\w\.\w{1,8}")
"""A word with a file ending. Code of several lines has such words, too: decorators such as `@functools.cache`."""
_TRAILING_PUNCTUATION = ".,;:!?)]}'\""
"""Characters after a path that may not belong to it."""


def read_attachment(name: str, why_no_images: str = ONLY_TEXT) -> Attachment:
    """Read a text file or an image to attach to a message. `why_no_images` is empty if the model sees images. Raises
    InvalidRequest if the file is missing, neither, empty or too large.
    """
    path = Path(os.path.expanduser(name.strip().strip("\"'")))
    try:
        if not path.is_file():
            problem = "is a folder: name the files in it" if path.is_dir() else "is not there"
            raise InvalidRequest(f"{path} {problem if path.is_dir() or not path.exists() else 'is no file'}")
        is_image, size = is_image_file(path), path.stat().st_size
        if is_image and why_no_images:
            raise InvalidRequest(f"{path} is an image, and {why_no_images}")
        limit = MAX_IMAGE_BYTES if is_image else MAX_FILE_BYTES
        if size > limit:
            raise InvalidRequest(f"{path} has {format_bytes(size)}, and {format_bytes(limit)} of a file are read")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return AttachedImage(path, data) if is_image else AttachedFile(path, _decode_text(path, data))


def read_image(name: str) -> AttachedImage:
    """Read an image to attach to a message. Raises InvalidRequest if the file is no image."""
    file = read_attachment(name, "")
    if isinstance(file, AttachedFile):
        raise InvalidRequest(f"{file.path} is no image but a text: /file puts it in front of the next message")
    return file


def is_image_file(path: Path) -> bool:
    """Return whether a file begins as image files do. Raises OSError."""
    with path.open("rb") as file:
        return _IMAGE.match(file.read(64)) is not None


def find_dropped_image(line: str) -> tuple[str, str] | None:
    """Return the path of an image that was dropped or pasted at the beginning of a line, and the text after it; None if
    there is none. Terminals quote blanks in paths, or put a backslash before them.
    """
    found = _DROPPED.match(line)
    if found is None:
        return None
    candidates = [(line.strip(), "")] if "\n" not in line else []
    name = found[1] or found[2] or re.sub(r"\\(.)", r"\1", found[3])
    for each, rest in [*candidates, (name, line[found.end() :].strip())]:
        path = Path(os.path.expanduser(each.removeprefix("file://")))
        try:
            if path.is_file() and is_image_file(path):
                return str(path), rest
        except (OSError, ValueError):
            continue
    return None


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


def read_mentions(message: str, why_no_images: str = ONLY_TEXT) -> tuple[list[Attachment], list[str]]:
    """Read the files that a message names as `@path`. Return them in order, and the names that look like paths but are
    no files.

    Other words with an @ are words. Raises InvalidRequest for a file that cannot go into a message.
    """
    files: dict[Path, Attachment] = {}
    missing_names = []
    for quoted_name, plain_name in _MENTION.findall(message):
        path = _resolve_mention(quoted_name or plain_name)
        if path is not None:
            files.setdefault(path, read_attachment(str(path), why_no_images))
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


def add_files(question: Question, files: Sequence[Attachment]) -> Question:
    """Return the question with the texts of its files before it, and with their images."""
    texts = [file for file in files if isinstance(file, AttachedFile)]
    images = [file for file in files if isinstance(file, AttachedImage)]
    return replace(question, text=prepend_files(texts, question.text), images=(*question.images, *images))


def prepend_files(files: Sequence[AttachedFile], message: str) -> str:
    """Return the message with the texts of its files before it, each in a code fence below its path."""
    return "\n\n".join([*map(_fence_file, files), message])


def _fence_file(file: AttachedFile) -> str:
    """Return a file's text in a code fence, below its path."""
    longest_run = max(map(len, re.findall(r"`{3,}", file.text)), default=2)
    fence = "`" * (longest_run + 1)
    return f"{file.path}:\n{fence}{file.path.suffix.removeprefix('.')}\n{file.text.rstrip()}\n{fence}"
