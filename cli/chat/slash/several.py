"""Several answers to one question: they grow side by side, and one of them is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cortexmlx.cli.chat.view import WIDEST
from cortexmlx.cli.markdown.stream import printed
from cortexmlx.cli.terminal.console import CONTROLS
from cortexmlx.request import Completion, FinishReason

if TYPE_CHECKING:
    from cortexmlx.sessions.reply import Reply

NARROWEST = 24
"""Columns of an answer; where there are fewer, answers stand below each other."""

_GAP = 3


class SideBySide:
    """Reads a reply with `count` answers and shows them, while they grow by their last lines and in the end whole."""

    def __init__(self, console: Console, count: int) -> None:
        self._console = console
        self._texts = [""] * count
        self._pieces = 0

    def follow(self, reply: Reply) -> Completion:
        """All answers. Raises the request's error."""
        if not self._console.is_terminal:
            for _ in reply:
                pass
        else:
            with Live(get_renderable=self._growing, console=self._console, transient=True, refresh_per_second=8):
                for event in reply:
                    self._texts[event.index] += event.text
                    self._pieces += event.token_id is not None
        completion = reply.result()
        answers = (completion, *completion.others)
        self._console.print(self._laid_out([_whole(each, self._width()) for each in answers], [*map(_title, answers)]))
        return completion

    def _growing(self) -> RenderableType:
        width, lines = self._width(), max(self._console.height - 6, 3)
        wide = self._fits()
        lines = lines if wide else max(lines // len(self._texts) - 1, 1)
        ends = [self._end(text, width, lines) for text in self._texts]
        shown = self._laid_out(ends, [str(i) for i in range(1, len(ends) + 1)])
        return Group(shown, Text(f"{len(ends)} answers · {self._pieces:,} tokens", style="dim"))

    def _end(self, text: str, width: int, lines: int) -> Text:
        """The last lines of a text, wrapped; only so much of it is looked at."""
        wrapped = Text(text[-width * lines :].translate(CONTROLS)).wrap(self._console, width)
        return Text("\n").join(wrapped[-lines:])

    def _laid_out(self, cells: Sequence[RenderableType], titles: Sequence[str]) -> RenderableType:
        if not self._fits():
            return Group(*(part for title, cell in zip(titles, cells, strict=True) for part in (_bar(title), cell)))
        table = Table.grid(padding=(0, _GAP, 0, 0), expand=True)
        for _ in cells:
            table.add_column(ratio=1, overflow="fold")
        table.add_row(*map(_bar, titles))
        table.add_row(*cells)
        return table

    def _fits(self) -> bool:
        return self._width_of(len(self._texts)) >= NARROWEST

    def _width(self) -> int:
        return self._width_of(len(self._texts) if self._fits() else 1)

    def _width_of(self, count: int) -> int:
        return (self._console.width - _GAP * (count - 1)) // count


def _bar(title: str) -> Text:
    return Text(title, style="bold reverse" if len(title) == 1 else "bold")


def _title(answer: Completion) -> str:
    ends = {FinishReason.LENGTH: " · cut", FinishReason.CANCELLED: " · stopped"}
    return f"{answer.index + 1} · {answer.usage.completion_tokens} tokens{ends.get(answer.finish_reason, '')}"


def _whole(answer: Completion, width: int) -> RenderableType:
    return Text("\n").join(printed(answer.text.strip() or "(nothing)", min(width, WIDEST)))


def choose(answers: Sequence[Completion], ask: Callable[[str], str | None], console: Console) -> Completion | None:
    """The answer that is chosen; None if none is, or if nobody can be asked any more."""
    while True:
        typed = ask(f"which one goes on? 1-{len(answers)}, 0 for none: ")
        if typed is None or typed.strip() == "0":
            return None
        number = int(typed) if typed.strip().isdecimal() else 0
        if 1 <= number <= len(answers):
            return answers[number - 1]
        console.print(f"  {typed.strip()!r} is none of 1 to {len(answers)}, nor 0", style="dim", markup=False)
