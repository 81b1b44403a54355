"""An answer on the screen while it is written: finished lines above, one transient line of status below."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, cast

from rich.console import Console, Group
from rich.live import Live
from rich.segment import Segment, Segments
from rich.spinner import Spinner
from rich.style import Style
from rich.table import Table
from rich.text import Text

from cortexmlx.cli.chat.markdown import Line, MarkdownStream
from cortexmlx.cli.chat.status import Status
from cortexmlx.cli.chat.thinking import ThinkSplitter
from cortexmlx.cli.terminal.console import is_terminal
from cortexmlx.request import TokenEvent

WIDEST = 100
SHARE = 10
"""Rendering takes at most one tenth of the time: after d seconds of it, the next comes 10 d later."""
SOONEST_SECONDS = 0.03


class AnswerView(Protocol):
    """Where the text of an answer goes."""

    def __enter__(self) -> AnswerView: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def feed(self, text: str) -> None:
        """More text."""

    def note(self, event: TokenEvent) -> None:
        """What the figures say of an event."""


class RawView:
    """Plain text as it comes, for pipes and dumb terminals."""

    def __enter__(self) -> RawView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        print(flush=True)

    def feed(self, text: str) -> None:
        """Print it."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, event: TokenEvent) -> None:
        """Plain text says nothing of it."""


class MarkdownView:
    """Rendered Markdown on a terminal, above its `status`."""

    def __init__(self, console: Console, status: Status, *, thinking: bool) -> None:
        self._console = console
        self._status = status
        self._splitter = ThinkSplitter(thinking=thinking)
        self._stream = self._new_stream()
        self._thought = thinking
        self._spinner = Spinner("dots")
        self._due = 0.0
        self._live = Live(
            get_renderable=self._below,
            console=console,
            transient=True,
            refresh_per_second=8,
            redirect_stderr=is_terminal(sys.stderr),  # a warning goes above the status, not into it
        )

    def __enter__(self) -> MarkdownView:
        self._status.__enter__()
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in self._splitter.rest():
            self._take(part.text, part.thought)
        self._print(self._stream.rest())
        self._live.stop()
        self._status.__exit__(kind, error, trace)

    def feed(self, text: str) -> None:
        """One more piece; what has become final is printed, but not at every piece."""
        for part in self._splitter.feed(text):
            self._take(part.text, part.thought)
        begun = time.monotonic()
        if begun >= self._due:
            self._print(self._stream.lines())
            self._due = time.monotonic() + max(SHARE * (time.monotonic() - begun), SOONEST_SECONDS)

    def note(self, event: TokenEvent) -> None:
        """The status says so."""
        self._status.note(event)

    def _take(self, text: str, thought: bool) -> None:
        if thought != self._thought:
            self._print(self._stream.rest())
            if self._stream.begun:
                self._console.print()
            self._stream = self._new_stream()
            self._thought = thought
        self._stream.feed(text)

    def _new_stream(self) -> MarkdownStream:
        return MarkdownStream(self._console, min(self._console.width, WIDEST))

    def _print(self, lines: Iterable[Line]) -> None:
        style = Style(dim=True, italic=True) if self._thought else None
        for line in lines:
            self._console.print(Segments([*Segment.apply_style(line, style), Segment.line()]), end="")

    def _below(self) -> Group:
        """The words of the line that is being written, how it goes, and what is wanted below that."""
        grid = Table.grid(expand=True)
        grid.add_column(no_wrap=True, ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        figures = Text(f" {self._status.figures()} ", style="dim")
        figures.append_text(cast(Text, self._spinner.render(time.monotonic())))
        room = max(min(self._console.width, WIDEST) - figures.cell_len - 1, 0)
        grid.add_row(Text(self._stream.unfinished[-room:] if room else "", style="dim"), figures)
        arena, size = self._status.arena, self._console.size
        picture = arena.rows(size.width, size.height, plain=self._console.options.ascii_only) if arena else []
        return Group(grid, *picture)
