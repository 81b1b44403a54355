"""Messages of other packages: quoted in our errors, and logged instead of printed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("cortexmlx")

_LONGEST = 300

LFS_POINTER = b"version https://git-lfs"
"""How a file begins that git left in the place of a large one."""


def one_line(error: Exception) -> str:
    """What `error` says, on one line and not endless; its type where it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def not_the_file(path: Path) -> str:
    """What to say of a pointer in the place of a file."""
    return f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder."


def not_readable(path: Path, error: OSError) -> str:
    """What to say of a file that the system does not give, with the next step."""
    advice = {
        PermissionError: f"See who may: `ls -l {path}`.",
        FileNotFoundError: "It is a link to nothing, or was just removed: download it again.",
        IsADirectoryError: "There should be a file: download the model again.",
    }
    return " ".join([f"{path} cannot be read: {error.strerror}.", advice.get(type(error), "")]).rstrip()


@contextmanager
def logged(library: str) -> Iterator[None]:
    """Meanwhile what an imported library would print through its logger goes to this package's: a program that sets up
    no logging reads nothing that it did not print itself.
    """

    def pass_on(record: logging.LogRecord) -> bool:
        log.log(record.levelno, "%s", " ".join(record.getMessage().split()))
        return False

    printing = [h for h in logging.getLogger(library).handlers if type(h) is logging.StreamHandler]
    for handler in printing:
        handler.addFilter(pass_on)
    try:
        yield
    finally:
        for handler in printing:
            handler.removeFilter(pass_on)
