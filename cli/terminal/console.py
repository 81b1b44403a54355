"""Output of all commands: results to stdout, everything else to stderr, colours on a terminal only."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from cortexmlx.cli.program import adapt_commands
from cortexmlx.cli.terminal.harmless import strip_controls, unfiltered
from cortexmlx.cli.terminal.region import AboveRegionWriter

if TYPE_CHECKING:
    from rich.console import Console

PRINTING = threading.RLock()
"""Held while a line is printed and while a bar is removed: a line of another thread would join the bar."""

NARROW = 80
"""Columns of a terminal that does not tell its width."""


def is_terminal(stream: IO[str]) -> bool:
    """Return whether `stream` is a terminal that can do more than print lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def is_coloured(stream: TextIO) -> bool:
    """Return whether to use colours on `stream`."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and not isinstance(stream, AboveRegionWriter)


def stdout() -> Console:
    """Return a rich console on stdout. NO_COLOR, a pipe or a dumb terminal get plain text."""
    return console_on(unfiltered(sys.stdout))


def stderr() -> Console:
    """Return a rich console on stderr, for progress and notes."""
    return console_on(unfiltered(sys.stderr))


def console_on(stream: TextIO) -> Console:
    """Return a rich console that lets no control sequences in a text reach a terminal. Markup is not read."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class HarmlessConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            to_terminal = self.is_terminal or self.file.isatty()
            for text, style, control in super().render(renderable, options):
                unlinked_style = style.update_link(None) if style is not None and style.link else style
                yield Segment(strip_controls(text) if to_terminal and not control else text, unlinked_style, control)

    return HarmlessConsole(file=stream, highlight=False, markup=False, emoji=False)


def print_result(text: str = "", *, end: str = "\n", flush: bool = False) -> None:
    """Print a result to stdout, without control characters on a terminal."""
    _write_safely(sys.stdout, text + end, flush=flush)


def print_message(text: str = "", *, end: str = "\n") -> None:
    """Print a message that is not a result to stderr, without control characters on a terminal."""
    _write_safely(sys.stderr, text + end, flush=True)


def _write_safely(stream: TextIO, text: str, *, flush: bool) -> None:
    """Write text to a stream, without control characters on a terminal."""
    with PRINTING:
        stream.write(strip_controls(text) if stream.isatty() else text)
        if flush:
            stream.flush()


def write_control(stream: TextIO, sequence: str) -> None:
    """Write a control sequence that this program made itself to a terminal, past the filter."""
    unfiltered(stream).write(sequence)


def print_rows(console: Console, rows: Iterable[tuple[str, str]], column: int, style: str = "dim") -> None:
    """Print two columns: each label, and its text from `column` on. Further lines of the text are in the same column.
    After a long label, and in a narrow window, the text begins on the next line.
    """
    from rich.text import Text

    indent = column if console.width >= 2 * column else 4
    for label, text in rows:
        head = label.ljust(indent) if len(label) < indent else f"{label}\n{' ' * indent}"
        lines = Text(text).wrap(console, max(console.width - indent, 1))
        body = f"\n{' ' * indent}".join(line.plain.rstrip() for line in lines)
        console.print(Text(head + body, style), soft_wrap=True)


def print_indented(console: Console, text: str) -> None:
    """Print a remark below a typed line, with all lines indented by two columns."""
    print_rows(console, [("", text)], 2)


def print_note(message: str) -> None:
    """Print a note for the user on stderr."""
    print_message(wrap_for_terminal(f"cortexmlx: {adapt_commands(message)}", sys.stderr))


def print_error(message: str) -> None:
    """Print an error on stderr: one or two lines on what went wrong and what to do next."""
    label = "error:"
    rest = wrap_for_terminal(f"{label} {strip_controls(adapt_commands(message))}", sys.stderr).removeprefix(
        label
    )  # of a file's name, or what was typed
    if is_coloured(sys.stderr):
        write_control(sys.stderr, f"\x1b[1;31m{label}\x1b[0m")
        print_message(rest)
    else:
        print_message(label + rest)


def wrap_for_terminal(text: str, stream: TextIO) -> str:
    """Wrap `text` at words to fit a terminal; break only words longer than a line. A file or pipe gets it unchanged."""
    if not stream.isatty():
        return text
    from cortexmlx.cli.markdown.flows import wrap_words

    try:
        width = os.get_terminal_size(stream.fileno()).columns or NARROW
    except (OSError, ValueError):  # an object that stands in for a terminal
        width = NARROW
    rows: list[str] = []
    for line in strip_controls(text).split("\n"):
        rows += [line[begin:end] for begin, end, _ in wrap_words(line, 0, width)] or [""]
    return "\n".join(rows)


class _StderrFile(io.FileIO):
    """The file of stderr. Output that cannot be written is dropped, since that must not end an answer or a server."""

    def write(self, data: Any) -> int:
        """Write bytes; return how many were written or dropped."""
        with suppress(OSError):
            return super().write(data) or len(data)
        return len(data)


def harden_streams() -> None:
    """Print `?` for characters that the terminal's encoding lacks, and drop what cannot be written to stderr, instead
    of raising. Standard streams that were closed at the start are replaced by /dev/null.
    """
    if type(sys.stderr) is io.TextIOWrapper:
        binary_stderr = io.BufferedWriter(_StderrFile(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(binary_stderr, sys.stderr.encoding, line_buffering=True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  (for the whole process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def silence_stdout() -> None:
    """Discard all further output to stdout, even the interpreter's last flush, because its reader has gone."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def show_cursor() -> None:
    """Make the cursor visible again after a progress display."""
    if is_terminal(sys.stderr):
        os.write(2, b"\x1b[?25h\n")


class ThoughtsPrinter:
    """Prints a model's thoughts as they arrive, separated from the answer after them; nothing with `hidden`."""

    def __init__(self, *, hidden: bool = False) -> None:
        self._hidden = hidden
        self._open = False

    def print_thought(self, text: str) -> None:
        """Print a piece of the thoughts, unless it is empty."""
        if self._hidden or not text:
            return
        if not self._open and is_coloured(sys.stderr):
            write_control(sys.stderr, "\x1b[2m")
        self._open = True
        print_message(text, end="")

    def end(self) -> None:
        """End the line and its style, because the answer begins or the text has ended. Safe to call again."""
        if self._open:
            self._open = False
            if is_coloured(sys.stderr):
                write_control(sys.stderr, "\x1b[0m")
            print_message("\n")
