"""The view of an answer while it streams: final text, then the unfinished part and a status line."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

from rich.console import Console
from rich.spinner import Spinner
from rich.text import Text

from cortexmlx.cli.chat.status import AnswerStatus
from cortexmlx.cli.markdown.flows import fold_rows
from cortexmlx.cli.markdown.stream import MarkdownStream
from cortexmlx.cli.markdown.styles import FAINT, THOUGHT
from cortexmlx.cli.terminal import console as terminal
from cortexmlx.cli.terminal.console import ThoughtsPrinter
from cortexmlx.cli.terminal.drawing import LiveDrawing, SuspensionGuard
from cortexmlx.types.request import TokenEvent

MAX_WIDTH = 100
"""Cells of a row of words, at most. Code and lines that the terminal breaks may be wider."""
MAX_PENDING_ROWS = 12
"""Pending rows, at most. At half the width, they still fit on the screen."""


@dataclass
class ThoughtDisplay:
    """Whether the thoughts of the next answers are folded or shown."""

    is_folded: bool = False
    """Whether thoughts take only one line."""


class AnswerView(Protocol):
    """A display of one streaming answer."""

    def __enter__(self) -> AnswerView: ...

    def __exit__(self, *exception: object) -> None: ...

    def feed(self, text: str, is_thought: bool = False) -> None:
        """Show more text of the answer, or of the model's thoughts before it."""

    def update_status(self, event: TokenEvent) -> None:
        """Update the status line with an event of the answer."""


class PlainTextView:
    """Prints an answer as plain text while it arrives, for pipes and dumb terminals."""

    def __init__(self) -> None:
        self._thoughts = ThoughtsPrinter()

    def __enter__(self) -> PlainTextView:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thoughts.end()
        terminal.print_result(flush=True)

    def feed(self, text: str, is_thought: bool = False) -> None:
        """Print the text. Thoughts go to stderr."""
        if is_thought:
            self._thoughts.print_thought(text)
            return
        if text:
            self._thoughts.end()
        terminal.print_result(text, end="", flush=True)

    def update_status(self, event: TokenEvent) -> None:
        """Do nothing: plain text has no status line."""


class MarkdownView:
    """Renders an answer as Markdown on a terminal, above its status line. Thoughts are dim, or one line if folded."""

    def __init__(
        self,
        console: Console,
        status: AnswerStatus,
        *,
        thinking: bool,
        is_folded: bool = False,
        suspension_guard: SuspensionGuard = nullcontext,
    ) -> None:
        self._console = console
        self._status = status
        self._stream = MarkdownStream()
        self._is_thought = thinking
        self._is_folded = is_folded
        self._spinner = Spinner("dots")
        self._feed_count = 0
        self._started = time.monotonic()
        self._drawn_state: tuple[int, int, int] | None = None
        self._drawing = LiveDrawing(console, self._take_rows, self._live_rows, suspension_guard)
        self._region = self._drawing.region
        self._stack = ExitStack()

    def __enter__(self) -> MarkdownView:
        self._stack.enter_context(self._status)
        self._stack.enter_context(self._drawing)
        return self

    def __exit__(self, *exception: object) -> None:
        self._drawing.end()
        with self._drawing.lock:
            self._print_rest()
        self._stack.close()

    def feed(self, text: str, is_thought: bool = False) -> None:
        """Add a piece of text. It is drawn now or a moment later."""
        with self._drawing.lock:
            self._feed_count += 1
            if text:
                self._feed(text, is_thought)
            self._drawing.request_redraw()

    def update_status(self, event: TokenEvent) -> None:
        """Update the status line with an event of the answer."""
        self._status.update(event)

    def _take_rows(self) -> tuple[list[Text], list[Text]]:
        """Return the rows that have become final, and the rows to show below them: unfinished text and the status."""
        columns, rows = self._console.size
        state = (self._feed_count, columns, rows)
        lines: list[Text] = []
        if state != self._drawn_state:  # else only the figures have changed
            self._drawn_state = state
            lines = self._style_rows(self._stream.take_final_rows(self._width, self._max_pending_rows))
        return lines, self._live_rows()

    def _live_rows(self) -> list[Text]:
        """Return the rows that may still change, and the status below them."""
        return [*self._pending_rows(), *self._status_rows()]

    def _pending_rows(self) -> list[Text]:
        """Return the rows of the answer that may still change; of folded thoughts, only the last row."""
        rows = [row for line in self._stream.pending for row in fold_rows(line, self._console.width)]
        rows = rows[-1 if self._is_thought and self._is_folded else -self._max_pending_rows :]
        return self._dim_rows(rows) if self._is_thought else rows

    @property
    def _width(self) -> int:
        """The width of the answer, in cells."""
        return min(self._console.width, MAX_WIDTH)

    @property
    def _max_pending_rows(self) -> int:
        """How many rows that may still change fit on the screen."""
        return max(min((self._console.height - 1) // 2 - len(self._arena_rows()) - 1, MAX_PENDING_ROWS), 1)

    def _feed(self, text: str, is_thought: bool) -> None:
        """Add text to the stream; begin a new one where thoughts end or begin."""
        if is_thought != self._is_thought:
            self._print_rest()
            if self._stream.has_printed:
                self._region.show([Text()], [])
            self._stream = MarkdownStream()
            self._is_thought = is_thought
        self._stream.feed(text)

    def _print_rest(self) -> None:
        """Print the rest of the thoughts or of the answer."""
        lines = self._style_rows(self._stream.take_remaining_rows(self._width))
        if self._is_thought and self._is_folded and self._stream.has_printed:
            lines = [Text(f"thought for {time.monotonic() - self._started:.0f} s (/thoughts shows it)", THOUGHT)]
        self._region.show(lines, [])

    def _style_rows(self, lines: list[Text]) -> list[Text]:
        """Return the rows as they are shown: thoughts dim, or none if folded."""
        if not self._is_thought:
            return lines
        return [] if self._is_folded else self._dim_rows(lines)

    def _dim_rows(self, lines: list[Text]) -> list[Text]:
        """Return the rows in the style of thoughts."""
        styled_lines = [line.copy() for line in lines]
        for line in styled_lines:
            line.stylize(THOUGHT)
        return styled_lines

    def _status_rows(self) -> list[Text]:
        """Return the status line, with as many statistics as fit, and the picture of the arena."""
        spinner = cast(Text, self._spinner.render(time.monotonic()))
        figures, max_width = self._status.line().split(" · "), self._console.width - 4
        while len(figures) > 1 and len(" · ".join(figures)) > max_width:
            figures.pop()
        return [Text.assemble(spinner, " ", " · ".join(figures), style=FAINT), *self._arena_rows()]

    def _arena_rows(self) -> list[Text]:
        """Return the rows of the arena's picture; none if it is hidden."""
        arena, size = self._status.arena, self._console.size
        return arena.rows(size.width, size.height, plain=self._console.options.ascii_only) if arena else []
