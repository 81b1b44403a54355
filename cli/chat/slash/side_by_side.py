"""Several answers to one question: they grow side by side, and the user chooses one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from cortexmlx.cli.chat.view import WIDEST
from cortexmlx.cli.markdown.flows import folded, wrapped
from cortexmlx.cli.markdown.stream import printed
from cortexmlx.cli.terminal.console import is_terminal, print_indented
from cortexmlx.cli.terminal.drawing import Away, Drawing
from cortexmlx.cli.terminal.harmless import harmless
from cortexmlx.types.request import Completion, FinishReason

if TYPE_CHECKING:
    from cortexmlx.sessions.reply import Reply

NARROWEST = 24
"""Columns of an answer, at least. In a narrower window, the answers stand below each other."""

_GAP = 3


class SideBySide:
    """A display of a reply with `count` answers: their last rows while they grow, the whole answers at the end."""

    def __init__(self, console: Console, count: int, away: Away = nullcontext) -> None:
        self._console = console
        self._away = away
        self._texts = [""] * count
        self._pieces = 0

    def follow(self, reply: Reply) -> Completion:
        """Show all answers and return the completion. Raises the request's error."""
        if not is_terminal(self._console.file):
            for _ in reply:
                pass
        else:
            with Drawing(self._console, lambda: ((), self._growing()), self._growing, self._away) as drawing:
                for event in reply:
                    with drawing.lock:
                        self._texts[event.index] += event.text
                        self._pieces += event.token_id is not None
                    drawing.soon()
        completion = reply.result()
        answers = (completion, *completion.others)
        width = self._width()
        for line in self._laid_out([*map(_title, answers)], [_whole(each, width) for each in answers]):
            self._console.print(line, soft_wrap=True)
        return completion

    def _growing(self) -> list[Text]:
        width, rows = self._width(), max(self._console.height - 6, 3)
        rows = rows if self._fits() else max(rows // len(self._texts) - 1, 1)
        count = len(self._texts)
        ends = [_end(text, width, rows) for text in self._texts]
        shown = self._laid_out([str(number) for number in range(1, count + 1)], ends)
        return [*shown, Text(f"{count} answers · {self._pieces:,} tokens", style="dim")]

    def _laid_out(self, titles: Sequence[str], columns: Sequence[Sequence[Text]]) -> list[Text]:
        """Return the rows of all answers below their titles."""
        titled = [[_bar(title), *rows] for title, rows in zip(titles, columns, strict=True)]
        return beside(titled, self._width()) if self._fits() else [row for rows in titled for row in rows]

    def _fits(self) -> bool:
        return self._width_of(len(self._texts)) >= NARROWEST

    def _width(self) -> int:
        return self._width_of(len(self._texts) if self._fits() else 1)

    def _width_of(self, count: int) -> int:
        return (self._console.width - _GAP * (count - 1)) // count


def beside(columns: Sequence[Sequence[Text]], width: int) -> list[Text]:
    """Return the rows of columns of `width` cells, with a gap between two columns."""
    made = []
    for number in range(max(map(len, columns))):
        row = Text()
        for column in columns[:-1]:
            cell = column[number] if number < len(column) else Text()
            row += cell + Text(" " * (width + _GAP - cell.cell_len))
        row += columns[-1][number] if number < len(columns[-1]) else Text()
        row.rstrip()
        made.append(row)
    return made


def _end(text: str, width: int, rows: int) -> list[Text]:
    """Return the last rows of a text. Only the end of the text is read."""
    made = []
    for line in harmless(text[-width * rows :]).split("\n"):
        made += [Text(line[begin:end]) for begin, end, _ in wrapped(line, 0, width)] or [Text()]
    return made[-rows:]


def _bar(title: str) -> Text:
    return Text(title, style="bold reverse" if len(title) == 1 else "bold")


def _title(answer: Completion) -> str:
    ends = {FinishReason.LENGTH: " · cut", FinishReason.CANCELLED: " · stopped"}
    return f"{answer.index + 1} · {answer.usage.completion_tokens} tokens{ends.get(answer.finish_reason, '')}"


def _whole(answer: Completion, width: int) -> list[Text]:
    lines = printed(answer.text.strip() or "(nothing)", min(width, WIDEST))
    return [row for line in lines for row in folded(line, width)]


def choose(answers: Sequence[Completion], ask: Callable[[str], str | None], console: Console) -> Completion | None:
    """Return the answer that the user chooses; None for 0 or at the end of the input."""
    by_number = {str(number): answer for number, answer in enumerate(answers, 1)}
    while True:
        typed = ask(f"which one goes on? 1-{len(answers)}, 0 for none: ")
        if typed is None or typed.strip() == "0":
            return None
        if typed.strip() in by_number:
            return by_number[typed.strip()]
        print_indented(console, f"{typed.strip()!r} is not a number from 0 to {len(answers)}")
