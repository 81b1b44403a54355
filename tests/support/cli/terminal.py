"""The chat in a real pseudo-terminal, for a test to sit at: type, look, change the window's size.

    with Terminal("--no-history", columns=40, lines=10) as terminal:
        terminal.wait_for_prompt()
        terminal.ask([*pieces("# Some Markdown\\n\\nand "), STOP, *pieces("so on.")])
        terminal.wait_for_stop()            # the engine waits, the answer is half on the screen
        terminal.resize(columns=30, lines=8)
        terminal.go_on()
        terminal.wait_for_prompt()
        assert terminal.answer() == ["Some Markdown", "", "and so on."]

The command runs in a process of its own (`fork_server`), on the fake engine of `cli_fakes`; the screen is pyte's.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import struct
import tempfile
import termios
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import pyte

from support.cli.emulator import Emulator
from support.cli.fork_server import ForkedCommand
from support.patience import PATIENCE

STOP = None
"""In the pieces of an answer: the engine waits for `go_on`."""
PROMPT = ">>>"
FIGURES = re.compile(r"^[\d,]+ tokens · ")
"""The line below an answer."""
POLL_SECONDS = 0.02


class Terminal:
    """A window with `chat fake *arguments` in it, or another command; or another `program`, which really starts."""

    def __init__(
        self,
        *arguments: str,
        columns: int = 80,
        lines: int = 24,
        reflow: bool = True,
        term: str = "xterm-256color",
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = ("chat", "fake"),
        program: Sequence[str] = (),
        folder: Path | None = None,
        held: bool = False,
    ) -> None:
        """`held`: `!read` computes a piece of its prompt with each `go_on`."""
        self.screen = Emulator(columns, lines, reflow=reflow)
        self.screen.write_process_input = self.type  # type: ignore[method-assign]  (what the terminal answers)
        self.raw = b""
        self.seen = ""
        self.stops = 0
        self._stream = pyte.ByteStream(self.screen)
        self._folder = Path(tempfile.mkdtemp())
        self._exit: int | None = None
        if held:
            (self._folder / "script.held").touch()
        unwanted = ("NO_COLOR", "COLORTERM", "COLUMNS", "LINES")
        given = {name: value for name, value in os.environ.items() if name not in unwanted}
        given |= {"TERM": term, "FAKE_SCRIPT": str(self._folder / "script"), **(environment or {})}
        self._forked: ForkedCommand | None = None
        if not program:
            self.master, its = pty.openpty()
            _set_size(its, columns, lines)
            self._forked = ForkedCommand([*command, *arguments], its, given, folder)
            self.pid = self._forked.pid
            os.close(its)
            return
        line = [*program, *command, *arguments]
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.chdir(folder or ".")
            _set_size(0, columns, lines)
            os.execve(line[0], line, given)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def type(self, text: str) -> None:
        """Press keys: \\r is Enter, \\x03 Ctrl-C, \\x1b Escape."""
        os.write(self.master, text.encode())

    def enter(self, line: str, *shown: str) -> None:
        """Type a line, and wait for each of these texts and then for an empty prompt."""
        self.type(f"{line}\r")
        for text in shown:
            self.wait_for(text)
        self.wait_for_prompt()

    def paste(self, text: str) -> None:
        """What a terminal sends for a paste if the program has asked to be told."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def resize(self, columns: int, lines: int) -> None:
        """The window gets another size, and the program is told by SIGWINCH."""
        self._read(0.0)
        self.screen.resize(lines, columns)
        _set_size(self.master, columns, lines)

    def ask(self, steps: Sequence[str | None]) -> None:
        """Ask a question that the engine answers with these pieces."""
        self.script(steps)
        self.type("!script\r")

    def script(self, steps: Sequence[str | None]) -> None:
        """What the engine says to that question from now on."""
        self.stops = 0
        for path in self._folder.iterdir():
            path.unlink()
        (self._folder / "script").write_text(json.dumps(steps))

    def wait_for_stop(self) -> None:
        """Until the engine waits at the next STOP."""
        self.wait_until(lambda: (self._folder / f"script.stop{self.stops}").exists(), "the engine's stop")

    def go_on(self) -> None:
        """Let the engine go on."""
        (self._folder / f"script.go{self.stops}").touch()
        self.stops += 1

    def wait_for(self, text: str, seconds: float = PATIENCE) -> str:
        """What was written since the last wait, up to and with `text`, without control sequences."""
        self.wait_until(lambda: text in self.seen, repr(text), seconds)
        before, found, self.seen = self.seen.partition(text)
        return before + found

    def wait_for_prompt(self) -> None:
        """Until the chat asks for a question: the line with the cursor is an empty prompt."""
        self.wait_until(lambda: self.screen.rows()[self.screen.cursor.y] == PROMPT, "an empty prompt")

    def shows(self, text: str, seconds: float = PATIENCE) -> None:
        """Until `text` stands on the screen, in one row."""
        self.wait_until(lambda: any(text in row for row in self.screen.rows()), f"{text!r} on the screen", seconds)

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        """Read what the program writes until `condition` holds. Who stops the test takes none of its time."""
        for _ in range(int(seconds / POLL_SECONDS)):
            if condition():
                return
            if not self._read(POLL_SECONDS):
                what += f" when the program ended with {self._reap()}"
                break
        assert condition(), f"no sign of {what}:\n{self}"

    def lines(self) -> list[str]:
        """Scrollback and screen, as they would be copied."""
        self._read(0.0)
        return self.screen.text_lines()

    def answer(self) -> list[str]:
        """The lines between the last question that was asked and the figures of its answer."""
        said = self.lines()
        end = max(number for number, line in enumerate(said) if FIGURES.match(line))
        begin = max(number for number, line in enumerate(said[:end]) if line.startswith(PROMPT))
        body = said[begin + 1 : end]
        while body and not body[0]:
            body.pop(0)
        while body and not body[-1]:
            body.pop()
        return body

    def exit_code(self, seconds: float = PATIENCE) -> int:
        """Wait for the end of the program."""
        for _ in range(int(seconds / POLL_SECONDS)):
            if not self._read(POLL_SECONDS):
                return self._reap()
        raise AssertionError(f"the program goes on:\n{self}")

    def hang_up(self) -> int:
        """Close the window; return the program's exit code."""
        os.close(self.master)
        return self._reap()

    def close(self) -> None:
        """End the program, whatever it does."""
        if self._exit is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._reap()
        with suppress(OSError):
            os.close(self.master)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __str__(self) -> str:
        frame = "-" * self.screen.columns
        return "\n".join([frame, *self.screen.rows(), frame, f"last written: {self.raw[-300:]!r}"])

    def _reap(self) -> int:
        if self._exit is None and self._forked is not None:
            self._exit = self._forked.exit_code()
        elif self._exit is None:
            self._exit = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._exit

    def _read(self, seconds: float) -> bool:
        """Read what is there, waiting so long for it; False at the end."""
        while select.select([self.master], [], [], seconds)[0]:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return False
            if not data:
                return False
            self.raw += data
            self._stream.feed(data)
            self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", data.decode("utf-8", "replace"))
            seconds = 0.0
        return True


def pieces(text: str, seed: int = 0) -> list[str]:
    """`text` in pieces as tokens come: a few characters each, seldom with the word's end."""
    chance, cut, at = random.Random(seed), [], 0
    while at < len(text):
        size = chance.choice((1, 2, 3, 4, 4, 5, 6, 9))
        cut.append(text[at : at + size])
        at += size
    return cut


def _set_size(terminal: int, columns: int, lines: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
