"""Where the questions come from: an editing input line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from cortexmlx.cli.chat.kept import state_folder

PROMPT = ">>> "
CONTINUATION = "... "
QUOTES = '"""'


class LineCleared(Exception):
    """Ctrl-C was typed as a key, into the input line."""


class QuestionSource(Protocol):
    """Asks for the next message."""

    def ask(self) -> str | None:
        """The next message; None when there will be no more. Raises LineCleared on Ctrl-C."""


class PlainInput:
    """Lines from stdin, with a prompt on stderr if a person types them. Three quotes open and close several lines."""

    def ask(self) -> str | None:
        """The next line, or the lines between three quotes."""
        text = self._line(PROMPT)
        while text is not None and is_open(text):
            more = self._line(CONTINUATION)
            if more is None:
                break
            text += "\n" + more
        return None if text is None else unquoted(text)

    def _line(self, prompt: str) -> str | None:
        if sys.stdin.isatty():
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None


class TerminalInput:
    """prompt_toolkit's input line: history, editing, several lines, bracketed paste, commands completed with Tab."""

    def __init__(self, commands: Sequence[tuple[str, str]], history: Path | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import CompleteEvent, Completer, Completion
        from prompt_toolkit.document import Document
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.shortcuts import CompleteStyle

        class CommandCompleter(Completer):
            def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
                typed = document.text_before_cursor
                if typed.startswith("/") and " " not in typed:
                    for name, meaning in commands:
                        if name.startswith(typed):
                            yield Completion(name, start_position=-len(typed), display_meta=meaning)

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        # Nothing is drawn around the line, so where the cursor is need not be asked; not every terminal answers.
        os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
        kept: History = FileHistory(str(history)) if history and private_file(history) else InMemoryHistory()
        session: PromptSession[str]
        session = PromptSession(
            history=kept,
            key_bindings=keys,
            completer=CommandCompleter(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_history_search=True,
            multiline=Condition(lambda: is_open(session.default_buffer.text)),
            prompt_continuation=CONTINUATION,
            interrupt_exception=LineCleared,
        )
        self._session = session

    def ask(self) -> str | None:
        """The next message."""
        try:
            return unquoted(self._session.prompt(PROMPT))
        except EOFError:
            return None


def is_open(text: str) -> bool:
    """Whether `text` has begun with three quotes and not ended with them."""
    body = text.lstrip()
    return body.startswith(QUOTES) and not (len(body) >= 2 * len(QUOTES) and body.rstrip().endswith(QUOTES))


def unquoted(text: str) -> str:
    """`text` without the three quotes around it, if it has them."""
    body = text.strip()
    if not body.startswith(QUOTES):
        return text
    return body.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def history_path() -> Path:
    """Where the history lives."""
    return state_folder() / "chat_history"


def private_file(path: Path) -> bool:
    """Make sure that `path` exists and only this user can read it; False if that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError:
        return False
    return True


@contextmanager
def no_echo() -> Iterator[None]:
    """Keep what is typed during an answer from appearing in it; it waits for the next prompt."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = termios.tcgetattr(terminal)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
