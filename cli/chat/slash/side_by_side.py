"""Several answers to one question: they grow side by side, and the user chooses one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from cortexmlx.cli.chat.slash.commands import LEAVING_WORDS, LeaveChat
from cortexmlx.cli.chat.view import MAX_WIDTH
from cortexmlx.cli.markdown.flows import fold_rows, wrap_words
from cortexmlx.cli.markdown.stream import render_markdown
from cortexmlx.cli.terminal.console import is_terminal, print_indented
from cortexmlx.cli.terminal.drawing import LiveDrawing, SuspensionGuard
from cortexmlx.cli.terminal.harmless import strip_controls
from cortexmlx.types.request import Completion, FinishReason

if TYPE_CHECKING:
    from cortexmlx.sessions.reply import Reply

MIN_COLUMN_WIDTH = 24
"""Columns of an answer, at least. In a narrower window, the answers stand below each other."""

_GAP = 3


class SideBySideDisplay:
    """Shows several answers to one question in columns: their last rows while they grow, whole answers at the end."""

    def __init__(self, console: Console, count: int, suspension_guard: SuspensionGuard = nullcontext) -> None:
        self._console = console
        self._guard = suspension_guard
        self._texts = [""] * count
        self._token_count = 0

    def show_reply(self, reply: Reply) -> Completion:
        """Show all answers and return the completion. Raises the request's error."""
        if not is_terminal(self._console.file):
            for _ in reply:
                pass
        else:
            with LiveDrawing(self._console, lambda: ((), self._live_rows()), self._live_rows, self._guard) as drawing:
                for event in reply:
                    with drawing.lock:
                        self._texts[event.index] += event.text
                        self._token_count += event.token_id is not None
                    drawing.request_redraw()
        completion = reply.result()
        answers = (completion, *completion.others)
        width = self._answer_width()
        for line in self._layout([*map(_answer_title, answers)], [_answer_rows(each, width) for each in answers]):
            self._console.print(line, soft_wrap=True)
        return completion

    def _live_rows(self) -> list[Text]:
        """Return the rows to show while the answers grow: the end of each answer, and a count of tokens."""
        width, rows = self._answer_width(), max(self._console.height - 6, 3)
        rows = rows if self._fits_columns() else max(rows // len(self._texts) - 1, 1)
        count = len(self._texts)
        last_rows = [_last_rows(text, width, rows) for text in self._texts]
        answer_rows = self._layout([str(number) for number in range(1, count + 1)], last_rows)
        return [*answer_rows, Text(f"{count} answers · {self._token_count:,} tokens", style="dim")]

    def _layout(self, titles: Sequence[str], columns: Sequence[Sequence[Text]]) -> list[Text]:
        """Return the rows of all answers below their titles, in columns or one below the other."""
        styles = ("bold reverse" if len(title) == 1 else "bold" for title in titles)
        titled_columns = [
            [Text(title, style), *rows] for title, style, rows in zip(titles, styles, columns, strict=True)
        ]
        return (
            join_columns(titled_columns, self._answer_width())
            if self._fits_columns()
            else [row for rows in titled_columns for row in rows]
        )

    def _fits_columns(self) -> bool:
        """Return whether the window is wide enough for all columns."""
        return self._column_width(len(self._texts)) >= MIN_COLUMN_WIDTH

    def _answer_width(self) -> int:
        """Return the width of one answer, in cells."""
        return self._column_width(len(self._texts) if self._fits_columns() else 1)

    def _column_width(self, count: int) -> int:
        """Return the width of one of `count` columns, in cells."""
        return (self._console.width - _GAP * (count - 1)) // count


def join_columns(columns: Sequence[Sequence[Text]], width: int) -> list[Text]:
    """Return the rows of columns that are `width` cells wide, with a gap between two columns."""
    rows = []
    for number in range(max(map(len, columns))):
        row = Text()
        for column in columns[:-1]:
            cell = column[number] if number < len(column) else Text()
            row += cell + Text(" " * (width + _GAP - cell.cell_len))
        row += columns[-1][number] if number < len(columns[-1]) else Text()
        row.rstrip()
        rows.append(row)
    return rows


def _last_rows(text: str, width: int, rows: int) -> list[Text]:
    """Return the last rows of a text. Only the end of the text is read."""
    texts = []
    for line in strip_controls(text[-width * rows :]).split("\n"):
        texts += [Text(line[start:end]) for start, end, _ in wrap_words(line, 0, width)] or [Text()]
    return texts[-rows:]


def _answer_title(answer: Completion) -> str:
    """Return the title of a finished answer: its number, its tokens, and whether it was cut or stopped."""
    end_notes = {FinishReason.LENGTH: " · cut", FinishReason.CANCELLED: " · stopped"}
    return f"{answer.index + 1} · {answer.usage.completion_tokens} tokens{end_notes.get(answer.finish_reason, '')}"


def _answer_rows(answer: Completion, width: int) -> list[Text]:
    """Return a finished answer as rendered rows."""
    lines = render_markdown(answer.text.strip() or "(nothing)", min(width, MAX_WIDTH))
    return [row for line in lines for row in fold_rows(line, width)]


def choose_answer(
    answers: Sequence[Completion], ask: Callable[[str], str | None], console: Console
) -> Completion | None:
    """Ask the user to choose one of the answers; return None for 0. Raises LeaveChat for `/bye` and Ctrl-D."""
    by_number = {str(number): answer for number, answer in enumerate(answers, 1)}
    while True:
        input_text = ask(f"which one goes on? 1-{len(answers)}, 0 for none: ")
        if input_text is None or (choice := input_text.strip()).lower() in LEAVING_WORDS:
            raise LeaveChat
        if choice == "0" or choice in by_number:
            return by_number.get(choice)
        print_indented(console, f"{choice!r} is not a number from 0 to {len(answers)}")
