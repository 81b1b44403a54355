"""Input of a chat: an editing line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from cortexmlx.cli.chat.quotes import QUOTES, TypedQuotes, add_quotes, is_open_block
from cortexmlx.cli.chat.slash.command import SlashCommand
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import make_prompt_output
from cortexmlx.system.files import state_folder

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding.key_processor import KeyPress
    from prompt_toolkit.output import Output


_PATH = re.compile(r'(?:^|\s)@"?([^\s"]*)$')


def completions(text_before_cursor: str, commands: Mapping[str, SlashCommand]) -> Iterator[tuple[str, int, str]]:
    """Yield completions of the text before the cursor: the word, its number of typed characters, and its meaning."""
    name, blank, argument = text_before_cursor.partition(" ")
    if not blank:
        for command in dict.fromkeys(commands.values()):
            if text_before_cursor and command.name.startswith(text_before_cursor):
                yield command.name, len(text_before_cursor), command.help
    elif name in commands:
        argument, values = argument.lstrip(), tuple[str, ...]()
        with suppress(OSError):  # their folder may not be readable
            values = tuple(commands[name].complete_values())
        for value in values:
            if value.lower().startswith(argument.lower()):
                yield value, len(argument), commands[name].values_meaning


def path_prefix(text_before_cursor: str, commands: Mapping[str, SlashCommand]) -> str | None:
    """Return the partial path at the end of the text before the cursor; None where no path can be."""
    mention = _PATH.search(text_before_cursor)
    if mention is not None:
        return mention[1]
    name, blank, argument = text_before_cursor.partition(" ")
    return argument.lstrip() if blank and name in commands and commands[name].takes_path else None


def make_completer(commands: Mapping[str, SlashCommand]) -> Completer:
    """Return a prompt_toolkit completer for these commands."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    files = PathCompleter(expanduser=True)

    class ChatCompleter(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            text_before_cursor = document.text_before_cursor
            if "\n" in text_before_cursor and not _PATH.search(text_before_cursor):
                return
            for text, typed_count, meaning in completions(text_before_cursor, commands):
                yield Completion(text, start_position=-typed_count, display_meta=meaning)
            if (path := path_prefix(text_before_cursor, commands)) is not None:
                for each in files.get_completions(Document(path), event):
                    kind = "folder" if each.display_text.endswith("/") else "file"
                    yield Completion(each.text, each.start_position, each.display, display_meta=kind)

    return ChatCompleter()


# Text typed or pasted while an answer streams waits for the next prompt.


KeyActions = Mapping[str, Callable[[], None]]
"""Keys, by their names in prompt_toolkit, and what they do while an answer is written."""

NO_KEYS: KeyActions = MappingProxyType({})


class Typeahead:
    """Reads keys while an answer is written. Text waits for the next prompt; keys such as Ctrl-T act at once.

    The terminal neither shows typed text nor collects it into lines, and still marks pasted text. Ctrl-C remains a
    signal and discards nothing. A thread reads the keys: the kernel keeps 4 KiB of them, and a paste may be longer.
    """

    def __init__(self, keys: Input, output: Output) -> None:
        self._keys = keys
        self._output = output
        self._terminal = keys.fileno()
        self._saved_modes = termios.tcgetattr(self._terminal)

    def disable_echo(self) -> None:
        """Turn the terminal's echo off, except in a prompt. Lines that were typed before wait for the next prompt."""
        from prompt_toolkit.input.typeahead import store_typeahead
        from prompt_toolkit.key_binding.key_processor import KeyPress
        from prompt_toolkit.keys import Keys

        quiet = termios.tcgetattr(self._terminal)
        quiet[0] &= ~termios.ICRNL  # Enter stays Enter, as in a prompt
        quiet[3] = quiet[3] & ~(termios.ECHO | termios.ICANON | termios.IEXTEN) | termios.NOFLSH
        quiet[6][termios.VMIN], quiet[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, quiet)
        if select.select([self._terminal], [], [], 0)[0]:  # the terminal made a line break of each Enter
            enter = KeyPress(Keys.ControlM, "\r")
            pressed = [enter if each.key == Keys.ControlJ else each for each in self._keys.read_keys()]
            store_typeahead(self._keys, pressed)

    def restore_echo(self) -> None:
        """Restore the terminal as it was before. The modes are set first, since the writes after that raise
        RuntimeError if a signal's handler calls this while Python's buffers are being written.
        """
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._saved_modes)
        self._output.disable_bracketed_paste()
        self._output.flush()

    @contextmanager
    def collect_keys(self, at_once: KeyActions = NO_KEYS) -> Iterator[None]:
        """Collect typed keys in this context for the next prompt. The keys in `at_once` run their action at once."""
        from prompt_toolkit.input.typeahead import store_typeahead

        self._output.enable_bracketed_paste()  # a prompt switches it off at its end
        self._output.flush()
        key_presses: list[KeyPress] = []
        stop, stopper = os.pipe()
        reader = threading.Thread(
            target=self._read_keys, args=(stop, key_presses, at_once), name="cortexmlx-keys", daemon=True
        )
        reader.start()
        try:
            yield
        finally:
            os.close(stopper)
            reader.join()
            os.close(stop)
            store_typeahead(self._keys, key_presses)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Set typed text aside for the next message, so that it does not answer a question asked in this context."""
        from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead

        typed_keys = get_typeahead(self._keys)
        while select.select([self._terminal], [], [], 0)[0] and (new_keys := self._keys.read_keys()):
            typed_keys += new_keys
        try:
            yield
        finally:
            store_typeahead(self._keys, typed_keys + get_typeahead(self._keys))

    def _read_keys(self, stop: int, key_presses: list[KeyPress], at_once: KeyActions) -> None:
        """Read keys until `stop` is readable: run those in `at_once`, append the others to `key_presses`."""
        while not self._keys.closed:
            readable_fds, _, _ = select.select([self._terminal, stop], [], [])
            if stop in readable_fds:
                return
            for press in self._keys.read_keys():
                act = at_once.get(press.key.value if isinstance(press.key, Enum) else press.key)
                if act is None:
                    key_presses.append(press)
                else:
                    act()


PROMPT = ">>> "
CONTINUATION = "... "


class LineCleared(Exception):
    """Raised when Ctrl-C clears the input line."""


class QuestionSource(Protocol):
    """A source of the user's messages: an editable line, or plain lines."""

    def ask(self, prompt: str = PROMPT, draft: str = "", *, typed_ahead: bool = False) -> str | None:
        """Read a message, with `draft` in the input line; None at the input's end. Raises LineCleared on Ctrl-C.

        Text that was typed before only answers another `prompt` if it may be `typed_ahead`.
        """

    def collect_keys(self, at_once: KeyActions = NO_KEYS) -> AbstractContextManager[None]:
        """Hold typed text back while an answer is written: it does not appear in the answer and waits for the next
        prompt. Where single keys can be read, the keys in `at_once` act immediately.
        """

    def close(self) -> None:
        """Restore the terminal. Safe to call again."""


class PlainInput:
    """Reads messages from stdin by line, with a prompt on stderr on a terminal. Three quotes enclose several lines."""

    _saved_modes: list[Any] | None = None
    """The terminal's modes from before an answer, while the answer is written."""

    def ask(self, prompt: str = PROMPT, draft: str = "", *, typed_ahead: bool = False) -> str | None:
        """Return the next line, or the lines between three quotes. A draft is printed above, as it cannot be edited."""
        if draft:
            console.print_message(draft)
        text = self._read_line(prompt)
        while text is not None and is_open_block(text):
            next_line = self._read_line(CONTINUATION)
            if next_line is None:
                break
            text += "\n" + next_line
        return text

    @contextmanager
    def collect_keys(self, at_once: KeyActions = NO_KEYS) -> Iterator[None]:
        """Hold typed text back for the next prompt in this context: turn the terminal's echo off."""
        if sys.stdin.isatty():
            terminal = sys.stdin.fileno()
            self._saved_modes, quiet = termios.tcgetattr(terminal), termios.tcgetattr(terminal)
            quiet[3] &= ~termios.ECHO
            termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Turn the terminal's echo on again."""
        if self._saved_modes is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved_modes)
            self._saved_modes = None

    def _read_line(self, prompt: str) -> str | None:
        """Print the prompt on a terminal and read a line; None at the end of the input."""
        if sys.stdin.isatty():
            console.print_message(prompt, end="")
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None


SHOWN_LINES, SHOWN_CHARACTERS = 40, 4_000
"""Lines and characters of a paste that are shown, at most. With 1 MB in a line, each key took a second."""

_LABEL = re.compile(r"\[paste \d+: [\d,]+ (?:lines|characters)\]")


class LongPastes:
    """Long pastes, each shown as a label of one line, such as `[paste 1: 57 lines]`."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def shorten(self, pasted_text: str) -> str:
        """Return the label that is shown for a paste, or the paste if it is short."""
        line_count = len(pasted_text.splitlines())
        if line_count <= SHOWN_LINES and len(pasted_text) <= SHOWN_CHARACTERS:
            return pasted_text
        size = f"{line_count:,} lines" if line_count > SHOWN_LINES else f"{len(pasted_text):,} characters"
        label = f"[paste {len(self._texts) + 1}: {size}]"
        self._texts[label] = pasted_text
        return label

    def expand(self, text: str) -> str:
        """Return the text with pastes in place of labels. Quotes that then begin the text belong to the message."""
        whole_text = _LABEL.sub(lambda label: self._texts.get(label[0], label[0]), text)
        begins_with_paste = whole_text.lstrip().startswith(QUOTES) and not text.lstrip().startswith(QUOTES)
        return add_quotes(whole_text) if begins_with_paste else whole_text


class TerminalInput:
    """Reads messages with prompt_toolkit: history, editing, several lines, bracketed paste, completion with Tab.

    Alt-Enter and Ctrl-J begin a new line, Ctrl-X Ctrl-E opens the editor. A paste is a part of the message, quotes and
    all.
    """

    def __init__(self, commands: Mapping[str, SlashCommand], history: Path | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.shortcuts import CompleteStyle

        class HistoryFile(FileHistory):
            def store_string(self, string: str) -> None:
                with suppress(OSError, ValueError):  # full disk or half a character: the line is sent anyway
                    super().store_string(string)

        class ExpandedHistory(History):
            """A history whose messages can be sent again: pastes are expanded, and quotes protected."""

            def append_string(self, string: str) -> None:
                super().append_string(pastes.expand(quotes.protect_quotes(string)))

            def load_history_strings(self) -> Iterable[str]:
                return saved.load_history_strings()

            def store_string(self, string: str) -> None:
                saved.store_string(string)

        quotes, pastes = TypedQuotes(), LongPastes()
        keys = KeyBindings()

        @keys.add("escape", "enter")
        @keys.add("c-j")
        def insert_line_break(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("<bracketed-paste>")
        def insert_paste(event: KeyPressEvent) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            event.current_buffer.insert_text(pastes.shorten(text))

        # Nothing is drawn around the line, so the cursor position is not needed. Not every terminal reports it.
        os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
        saved: History = HistoryFile(str(history)) if history and ensure_private_file(history) else InMemoryHistory()
        output = make_prompt_output()
        session: PromptSession[str]
        session = PromptSession(
            history=ExpandedHistory(),
            output=output,
            erase_when_done=True,
            key_bindings=keys,
            completer=make_completer(commands),
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
        session.default_buffer.on_text_changed += lambda buffer: quotes.update(
            buffer.text, len(buffer._working_lines) - buffer.working_index - 1
        )
        self._quotes, self._pastes = quotes, pastes
        self._session = session
        self._asides: PromptSession[str] = PromptSession(
            output=output, enable_suspend=True, interrupt_exception=LineCleared
        )
        self._typeahead = Typeahead(session.input, session.output)
        self._typeahead.disable_echo()

    def ask(self, prompt: str = PROMPT, draft: str = "", *, typed_ahead: bool = False) -> str | None:
        """Return the next message, or the answer to another `prompt`."""
        try:
            if prompt != PROMPT:  # the answer to such a question is no message
                with nullcontext() if typed_ahead else self._typeahead.set_aside():
                    return self._asides.prompt(prompt, default=draft)
            self._quotes.begin(draft)
            try:
                return self._pastes.expand(self._quotes.protect_quotes(self._session.prompt(prompt, default=draft)))
            finally:
                # In place of the input line, so that the terminal wraps the message and it is copied as typed.
                text = self._session.default_buffer.text
                console.print_result(PROMPT + text.replace("\n", f"\n{CONTINUATION}"), flush=True)
        except EOFError:
            return None

    def collect_keys(self, at_once: KeyActions = NO_KEYS) -> AbstractContextManager[None]:
        """Collect typed keys on a thread while an answer is written."""
        return self._typeahead.collect_keys(at_once)

    def close(self) -> None:
        """Restore the terminal."""
        self._typeahead.restore_echo()


def history_path() -> Path:
    """Return the path of the input history."""
    return state_folder() / "chat_history"


def ensure_private_file(path: Path) -> bool:
    """Create `path` if missing, and let only this user read it; return False if that fails, or if it is no file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NONBLOCK, 0o600))  # a pipe waits for its reader
        if is_file := path.is_file():
            path.chmod(0o600)
    except OSError:
        return False
    return is_file
