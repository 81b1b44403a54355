"""Where output goes: results to stdout, everything else to stderr, plain text wherever nobody would see colours."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

CONTROLS: dict[int, int | None] = {code: 0x2400 + code for code in range(32) if code not in (9, 10)}
CONTROLS |= {13: None, 127: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Control characters would be obeyed by the terminal; their pictures are only seen. For `str.translate`."""


def is_terminal(stream: TextIO) -> bool:
    """True if a person looks at `stream`, and the terminal can do more than print lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def is_coloured(stream: TextIO) -> bool:
    """True if colours make sense on `stream`."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def stdout() -> Console:
    """A rich console on stdout. NO_COLOR, a pipe or a dumb terminal get plain text. A terminal does not obey what
    was said, or read from a file.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Harmless(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                words = text if control or not self.is_terminal else text.translate(CONTROLS)
                yield Segment(words, style, control)

    return Harmless(file=sys.stdout, highlight=False)


def stderr() -> Console:
    """A rich console on stderr, for progress and notes."""
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False)


def print_rows(console: Console, rows: Iterable[tuple[str, str]], column: int, style: str = "dim") -> None:
    """Each row's label, and behind `column` characters its text, whose further lines stand below its first. Behind a
    long label, and in a narrow window, the text begins on the next line.
    """
    from rich.text import Text

    at = column if console.width >= 2 * column else 4
    for label, text in rows:
        head = label.ljust(at) if len(label) < at else f"{label}\n{' ' * at}"
        lines = Text(text).wrap(console, max(console.width - at, 1))
        shown = f"\n{' ' * at}".join(line.plain.rstrip() for line in lines)
        console.print(Text(head + shown, style), soft_wrap=True)


def note(message: str) -> None:
    """One line for the user that is not a result."""
    print(f"cortexmlx: {message}", file=sys.stderr)


def error(message: str) -> None:
    """The one or two lines that say what went wrong and what next."""
    message = message.translate(CONTROLS)  # of a file's name, or of what was typed
    if is_coloured(sys.stderr):
        print(f"\x1b[1;31merror:\x1b[0m {message}", file=sys.stderr)
    else:
        print(f"error: {message}", file=sys.stderr)


def harden_streams() -> None:
    """Characters that the terminal's encoding lacks print as `?` instead of ending the program. What was closed when it
    began is empty to read, and takes what is written.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  (for the whole process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def silence_stdout() -> None:
    """The reader of stdout has gone: let nothing, not even the interpreter's last flush, complain about it."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def show_cursor() -> None:
    """Undo what a progress display did to the cursor."""
    if is_terminal(sys.stderr):
        os.write(2, b"\x1b[?25h\n")
