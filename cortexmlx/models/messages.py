"""Texts of errors about files, and messages of other packages, which are quoted in errors or sent to the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("cortexmlx")

_LONGEST = 300

LFS_POINTER = b"version https://git-lfs"
"""The first bytes of the file that git leaves in place of a large one."""


def one_line(error: Exception | str) -> str:
    """Return the text of `error` on one line, cut to 300 characters; its type's name if it has no text."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def lfs_pointer_message(path: Path) -> str:
    """Return the message about a git-lfs pointer file, which lies in place of the file itself."""
    return f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder."


def unreadable_message(path: Path, error: OSError) -> str:
    """Return the message about a file that the system cannot read, with the next step."""
    advice = {
        PermissionError: f"See who may: `ls -ld {path}`.",
        FileNotFoundError: "It is a link to nothing, or was just removed: download it again.",
        IsADirectoryError: "There should be a file: download the model again.",
    }
    return " ".join([f"{path} cannot be read: {error.strerror}.", advice.get(type(error), "")]).rstrip()


@contextmanager
def redirect_log(library: str) -> Iterator[None]:
    """Send what `library` would print through its logger to this package's logger instead.

    So a program that sets up no logging sees only its own output.
    """

    def log_here(record: logging.LogRecord) -> bool:
        log.log(record.levelno, "%s", " ".join(record.getMessage().split()))
        return False

    stream_handlers = [h for h in logging.getLogger(library).handlers if type(h) is logging.StreamHandler]
    for handler in stream_handlers:
        handler.addFilter(log_here)
    try:
        yield
    finally:
        for handler in stream_handlers:
            handler.removeFilter(log_here)
