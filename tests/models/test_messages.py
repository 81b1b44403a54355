"""What a foreign exception says, inside one of our own messages."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cortexmlx.models.messages import one_line, unreadable_message


@given(st.builds(lambda text, times: text * times, st.text(max_size=12), st.integers(0, 60)))
@example("x" * 300)
@example("x" * 301)
def test_it_is_one_line_that_is_neither_empty_nor_endless(text: str) -> None:
    line = one_line(ValueError(text))
    assert 0 < len(line) <= 300 and len(line.splitlines()) == 1
    words = " ".join(text.split())
    if len(words) <= 300:
        assert line == (words or "ValueError")
    else:
        assert words.startswith(line.removesuffix("...")) and line.endswith("...")


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EACCES, "x.json cannot be read: Permission denied. See who may: `ls -ld x.json`."),
        (
            errno.ENOENT,
            "x.json cannot be read: No such file or directory. It is a link to nothing, or was just removed",
        ),
        (errno.EISDIR, "x.json cannot be read: Is a directory. There should be a file: download the model again."),
        (errno.EIO, "x.json cannot be read: Input/output error."),
    ],
)
def test_a_file_that_the_system_does_not_give_says_why_and_what_next(number: int, says: str) -> None:
    assert unreadable_message(Path("x.json"), OSError(number, os.strerror(number))).startswith(says)
