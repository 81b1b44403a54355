"""A command of the chat as it is typed, and what it prints."""

from __future__ import annotations

import io

from rich.console import Console

from cortexmlx.cli.chat.input import PROMPT, PlainInput
from cortexmlx.cli.chat.session import ChatSession, Question, QuestionDraft
from cortexmlx.cli.chat.slash.commands import BY_NAME
from cortexmlx.cli.chat.slash.parse import parse_input


class TerminalText(io.StringIO):
    """Text that is written to a terminal, as far as a program can tell."""

    def isatty(self) -> bool:
        """It is one."""
        return True


class Lines(PlainInput):
    """What is typed, and then no more."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    def ask(self, prompt: str = PROMPT, draft: str = "", *, typed_ahead: bool = False) -> str | None:
        return next(self._lines, None)


def run_command(line: str, session: ChatSession, screen: Console) -> Question | QuestionDraft | None:
    """Carry out a line that is a command."""
    typed = parse_input(line, BY_NAME)
    assert typed.command is not None, f"{line!r} is a message"
    return BY_NAME[typed.command](session, typed.text, screen)


def printed(screen: Console) -> str:
    """All that was printed so far."""
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()
