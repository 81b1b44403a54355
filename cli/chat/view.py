"""An answer on the screen while it streams: final text, then the open part and a status line."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

from rich.console import Console
from rich.spinner import Spinner
from rich.text import Text

from cortexmlx.cli.chat.status import Status
from cortexmlx.cli.markdown.flows import folded
from cortexmlx.cli.markdown.stream import MarkdownStream
from cortexmlx.cli.markdown.styles import FAINT, THOUGHT
from cortexmlx.cli.terminal import console as terminal
from cortexmlx.cli.terminal.console import ThoughtsPrinter
from cortexmlx.cli.terminal.drawing import Away, Drawing
from cortexmlx.types.request import TokenEvent

WIDEST = 100
"""Cells of a row of words, at most. Code and lines that the terminal breaks may be wider."""
MOST_PENDING = 12
"""Pending rows, at most. At half the width, they still fit on the screen."""


@dataclass
class ThoughtDisplay:
    """How the next answers show their thoughts."""

    folded: bool = False
    """Whether thoughts take only one line."""


class AnswerView(Protocol):
    """A display of one answer."""

    def __enter__(self) -> AnswerView: ...

    def __exit__(self, *exception: object) -> None: ...

    def feed(self, text: str, thought: bool = False) -> None:
        """Show more text of the answer, or of the model's thoughts before it."""

    def note(self, event: TokenEvent) -> None:
        """Update the figures with an event."""


class RawView:
    """Plain text as it arrives, for pipes and dumb terminals."""

    def __init__(self) -> None:
        self._thoughts = ThoughtsPrinter()

    def __enter__(self) -> RawView:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thoughts.end()
        terminal.say(flush=True)

    def feed(self, text: str, thought: bool = False) -> None:
        """Print the text. Thoughts go to stderr."""
        if thought:
            self._thoughts.show(text)
            return
        if text:
            self._thoughts.end()
        terminal.say(text, end="", flush=True)

    def note(self, event: TokenEvent) -> None:
        """Do nothing: plain text shows no figures."""


class MarkdownView:
    """Rendered Markdown on a terminal, above its `status`. Thoughts are dim, or one line if `folded`."""

    def __init__(
        self, console: Console, status: Status, *, thinking: bool, folded: bool = False, away: Away = nullcontext
    ) -> None:
        self._console = console
        self._status = status
        self._stream = MarkdownStream()
        self._thought = thinking
        self._folded = folded
        self._spinner = Spinner("dots")
        self._pieces = 0
        self._started = time.monotonic()
        self._drawn: tuple[int, int, int] | None = None
        self._drawing = Drawing(console, self._news, self._rows, away)
        self._region = self._drawing.region
        self._stack = ExitStack()

    def __enter__(self) -> MarkdownView:
        self._stack.enter_context(self._status)
        self._stack.enter_context(self._drawing)
        return self

    def __exit__(self, *exception: object) -> None:
        self._drawing.end()
        with self._drawing.lock:
            self._close()
        self._stack.close()

    def feed(self, text: str, thought: bool = False) -> None:
        """Add a piece of text. It is drawn now or a moment later."""
        with self._drawing.lock:
            self._pieces += 1
            if text:
                self._take(text, thought)
            self._drawing.soon()

    def note(self, event: TokenEvent) -> None:
        """Update the status with an event."""
        self._status.note(event)

    def _news(self) -> tuple[list[Text], list[Text]]:
        """Return the rows that have become final, and the rows below them: the rest of the answer and the figures."""
        columns, rows = self._console.size
        state = (self._pieces, columns, rows)
        lines: list[Text] = []
        if state != self._drawn:  # else only the figures have changed
            self._drawn = state
            lines = self._styled(self._stream.settle(self._width, self._room))
        return lines, self._rows()

    def _rows(self) -> list[Text]:
        return [*self._pending(), *self._below()]

    def _pending(self) -> list[Text]:
        """Return the rows that may still change; of folded thoughts, only the last row."""
        rows = [row for line in self._stream.pending for row in folded(line, self._console.width)]
        rows = rows[-1 if self._thought and self._folded else -self._room :]
        return self._as_thoughts(rows) if self._thought else rows

    @property
    def _width(self) -> int:
        return min(self._console.width, WIDEST)

    @property
    def _room(self) -> int:
        return max(min((self._console.height - 1) // 2 - len(self._picture()) - 1, MOST_PENDING), 1)

    def _take(self, text: str, thought: bool) -> None:
        if thought != self._thought:
            self._close()
            if self._stream.begun:
                self._region.show([Text()], [])
            self._stream = MarkdownStream()
            self._thought = thought
        self._stream.feed(text)

    def _close(self) -> None:
        """Print the rest of the thoughts or of the answer."""
        lines = self._styled(self._stream.rest(self._width))
        if self._thought and self._folded and self._stream.begun:
            lines = [Text(f"thought for {time.monotonic() - self._started:.0f} s (/thoughts shows it)", THOUGHT)]
        self._region.show(lines, [])

    def _styled(self, lines: list[Text]) -> list[Text]:
        if not self._thought:
            return lines
        return [] if self._folded else self._as_thoughts(lines)

    def _as_thoughts(self, lines: list[Text]) -> list[Text]:
        styled = [line.copy() for line in lines]
        for line in styled:
            line.stylize(THOUGHT)
        return styled

    def _below(self) -> list[Text]:
        """Return the status line, with as many figures as fit, and the picture of the arena."""
        spinner = cast(Text, self._spinner.render(time.monotonic()))
        figures, room = self._status.figures().split(" · "), self._console.width - 4
        while len(figures) > 1 and len(" · ".join(figures)) > room:
            figures.pop()
        return [Text.assemble(spinner, " ", " · ".join(figures), style=FAINT), *self._picture()]

    def _picture(self) -> list[Text]:
        arena, size = self._status.arena, self._console.size
        return arena.rows(size.width, size.height, plain=self._console.options.ascii_only) if arena else []
