"""Input of a chat: an editing line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from cortexmlx.cli.chat.completion import completer
from cortexmlx.cli.chat.quotes import TypedQuotes, is_open
from cortexmlx.cli.chat.slash.command import Command
from cortexmlx.cli.chat.typeahead import NO_KEYS, AtOnce, Typeahead
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import prompt_output
from cortexmlx.system.files import state_folder

PROMPT = ">>> "
CONTINUATION = "... "


class LineCleared(Exception):
    """Ctrl-C was typed as a key, into the input line."""


class QuestionSource(Protocol):
    """A source of the user's messages."""

    def ask(self, prompt: str = PROMPT, draft: str = "") -> str | None:
        """Return what the user types, beginning with `draft`; None at the end of the input. Raises LineCleared on
        Ctrl-C.
        """

    def busy(self, at_once: AtOnce = NO_KEYS) -> AbstractContextManager[None]:
        """Return a context in which an answer is written. Typed text does not appear in the answer and waits for the
        next prompt. Where single keys can be read, the keys in `at_once` act at once.
        """

    def close(self) -> None:
        """Restore the terminal. Safe to call again."""


class PlainInput:
    """Lines from stdin, with a prompt on stderr if a person types them. Three quotes begin and end a message of several
    lines.
    """

    _echoing: list[Any] | None = None
    """The terminal's modes from before an answer, while the answer is written."""

    def ask(self, prompt: str = PROMPT, draft: str = "") -> str | None:
        """Return the next line, or the lines between three quotes. A draft cannot be edited here, so it is printed
        above.
        """
        if draft:
            console.tell(draft)
        text = self._line(prompt)
        while text is not None and is_open(text):
            more = self._line(CONTINUATION)
            if more is None:
                break
            text += "\n" + more
        return text

    @contextmanager
    def busy(self, at_once: AtOnce = NO_KEYS) -> Iterator[None]:
        """Turn the terminal's echo off in this context."""
        if sys.stdin.isatty():
            self._silence()
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Turn the terminal's echo on again."""
        if self._echoing is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._echoing)
            self._echoing = None

    def _silence(self) -> None:
        terminal = sys.stdin.fileno()
        self._echoing = termios.tcgetattr(terminal)
        quiet = termios.tcgetattr(terminal)
        quiet[3] &= ~termios.ECHO
        termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)

    def _line(self, prompt: str) -> str | None:
        if sys.stdin.isatty():
            console.tell(prompt, end="")
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None


class TerminalInput:
    """prompt_toolkit's input line: history, editing, several lines, bracketed paste, completion with Tab.

    Alt-Enter and Ctrl-J begin a new line, Ctrl-X Ctrl-E opens the editor. A paste is a part of the message, quotes and
    all.
    """

    def __init__(self, commands: Mapping[str, Command], history: Path | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.shortcuts import CompleteStyle

        class Kept(FileHistory):
            def store_string(self, string: str) -> None:
                with suppress(OSError, ValueError):  # full disk or half a character: the line is sent anyway
                    super().store_string(string)

        class Remembered(History):
            """A history that holds messages as they can be typed."""

            def append_string(self, string: str) -> None:
                super().append_string(quotes.message(string))

            def load_history_strings(self) -> Iterable[str]:
                return kept.load_history_strings()

            def store_string(self, string: str) -> None:
                kept.store_string(string)

        quotes = TypedQuotes()
        keys = KeyBindings()

        @keys.add("escape", "enter")
        @keys.add("c-j")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        # Nothing is drawn around the line, so the cursor position is not needed. Not every terminal reports it.
        os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
        kept: History = Kept(str(history)) if history and private_file(history) else InMemoryHistory()
        output = prompt_output()
        session: PromptSession[str]
        session = PromptSession(
            history=Remembered(),
            output=output,
            erase_when_done=True,
            key_bindings=keys,
            completer=completer(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_history_search=True,
            enable_open_in_editor=True,
            multiline=Condition(lambda: quotes.is_open(session.default_buffer.text)),
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else CONTINUATION,
            enable_suspend=True,
            interrupt_exception=LineCleared,
        )
        # Older entries are inserted first as they are loaded. Counted from the end, an entry keeps its number.
        session.default_buffer.on_text_changed += lambda buffer: quotes.changed(
            buffer.text, len(buffer._working_lines) - buffer.working_index - 1
        )
        self._quotes = quotes
        self._session = session
        self._asides: PromptSession[str] = PromptSession(
            output=output, enable_suspend=True, interrupt_exception=LineCleared
        )
        self._ahead = Typeahead(session.input, session.output)
        self._ahead.silence()

    def ask(self, prompt: str = PROMPT, draft: str = "") -> str | None:
        """Return the next message, or the answer to another `prompt`."""
        try:
            if prompt != PROMPT:  # the answer to such a question is no message
                with self._ahead.set_aside():
                    return self._asides.prompt(prompt, default=draft)
            self._quotes.begin(draft)
            try:
                return self._quotes.message(self._session.prompt(prompt, default=draft))
            finally:
                self._echo(self._session.default_buffer.text)
        except EOFError:
            return None

    def _echo(self, text: str) -> None:
        """Write the message in place of the input line. The terminal wraps it, so that it is copied as it was typed."""
        console.say(PROMPT + text.replace("\n", f"\n{CONTINUATION}"), flush=True)

    def busy(self, at_once: AtOnce = NO_KEYS) -> AbstractContextManager[None]:
        """Let a thread read the keys in this context."""
        return self._ahead.collecting(at_once)

    def close(self) -> None:
        """Restore the terminal."""
        self._ahead.restore()


def history_path() -> Path:
    """Return the path of the input history."""
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
