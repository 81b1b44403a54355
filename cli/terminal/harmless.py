"""Make texts of any origin harmless for a terminal: models, files, folders, servers. Control characters become visible
symbols.

On a terminal, stdout and stderr of a command write harmless text. Only `cortexmlx.cli.terminal` writes control
sequences, past the guard (`unfiltered`).
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from prompt_toolkit.output import Output

REPLACEMENT = 0xFFFD

_CONTROLS: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(0x20)},  # C0, as the pictures that Unicode has of them
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), REPLACEMENT),  # C1
}
_DIRECTION_MARKS: dict[int, int | None] = {
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x2070)), REPLACEMENT),  # the order of what follows
    **dict.fromkeys((0x200E, 0x200F, 0x061C)),  # marks of a direction, which usual text has, too
}
_HIDDEN: dict[int, int | None] = dict.fromkeys(
    (0x180E, 0x200B, 0xFEFF, *range(0x2060, 0x2065), *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080))
)
"""Characters without a width, which can hide text inside text. Tags are among them."""

TABLE: dict[int, int | None] = _CONTROLS | _DIRECTION_MARKS | _HIDDEN | {0x09: 0x09, 0x0A: 0x0A, 0x0D: None}
"""Replacements for `str.translate`. Tabs and line feeds stay. A carriage return would write over the line."""

_LINE = TABLE | {0x09: 0x2409, 0x0A: 0x240A, 0x0D: 0x240D}


def strip_controls(text: str) -> str:
    """Return `text` with characters that control a terminal or hide text made visible or removed."""
    return text.translate(TABLE)


def to_single_line(name: str) -> str:
    """Return a name, path or id for use in a line: control characters, line breaks and tabs become visible symbols."""
    return name.translate(_LINE)


class ControlFilter(io.TextIOBase):
    """A text stream to `raw_stream` with control characters made visible. It has no `buffer`: bytes would bypass it."""

    def __init__(self, raw_stream: TextIO) -> None:
        self.raw_stream = raw_stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream below."""
        return self.raw_stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """How the stream below treats characters that are not in its encoding."""
        return self.raw_stream.errors

    def isatty(self) -> bool:
        """Return whether the stream below is a terminal."""
        return self.raw_stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream below."""
        return self.raw_stream.fileno()

    def writable(self) -> bool:
        """Return True: the stream is for writing."""
        return True

    def flush(self) -> None:
        """Flush the stream below."""
        self.raw_stream.flush()

    def close(self) -> None:
        """Do nothing: the stream below belongs to other code and stays open."""

    def write(self, text: str) -> int:
        """Write the text as `strip_controls` changes it."""
        self.raw_stream.write(strip_controls(text))
        return len(text)


def unfiltered(stream: TextIO) -> TextIO:
    """Return the stream below a filter, which lets control sequences through. Write only this program's text to it."""
    return stream.raw_stream if isinstance(stream, ControlFilter) else stream


@contextmanager
def filter_streams() -> Iterator[None]:
    """Make control characters in stdout and stderr visible in this context, unless they go to a file or a pipe."""
    old_streams = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        stream: TextIO = getattr(sys, name)
        if stream.isatty() and not isinstance(stream, ControlFilter):
            setattr(sys, name, cast(TextIO, ControlFilter(stream)))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = old_streams


_WITHOUT_WIDTH = {code: None if to == 0xFFFD else to for code, to in TABLE.items()} | {0x0D: 0x0D}
"""prompt_toolkit counts no cell for characters that change direction or hide text, so nothing may replace them. It ends
rows with CR LF.
"""


def make_prompt_output() -> Output:
    """Return stdout for prompt_toolkit. Control characters typed, pasted or completed become symbols or are dropped."""
    from prompt_toolkit.output.vt100 import Vt100_Output

    class HarmlessOutput(Vt100_Output):
        def write(self, data: str) -> None:
            super().write(data.translate(_WITHOUT_WIDTH))

        def cursor_backward(self, amount: int) -> None:
            if amount:
                self.write_raw(f"\x1b[{amount}D")

    return HarmlessOutput.from_pty(unfiltered(sys.stdout), term=os.environ.get("TERM"))
