"""What is typed while nobody asks: nothing of it is shown, cut or lost."""

from __future__ import annotations

import os
import pty
import select
import termios
from collections.abc import Iterator

import pytest
from prompt_toolkit.input.typeahead import get_typeahead
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import DummyOutput

from cortexmlx.cli.chat.input import Typeahead

Keyboard = tuple[int, Vt100Input, Typeahead]


@pytest.fixture
def keyboard() -> Iterator[Keyboard]:
    """A terminal to type into, what reads it, and what takes its keys meanwhile."""
    master, slave = pty.openpty()
    with os.fdopen(slave) as terminal:
        keys = Vt100Input(terminal)
        yield master, keys, Typeahead(keys, DummyOutput())
        get_typeahead(keys)
        os.close(master)


def test_a_long_paste_waits_as_one_and_is_not_shown(keyboard: Keyboard) -> None:
    master, keys, ahead = keyboard
    text = "\n".join(f"line {number} {'é' * 50}" for number in range(400))
    ahead.disable_echo()
    with ahead.collect_keys():
        data = f"ab\r\x1b[200~{text}\x1b[201~\r".encode()
        while data:  # far more than the kernel keeps
            data = data[os.write(master, data[:1000]) :]
        while select.select([keys.fileno()], [], [], 0.05)[0]:
            pass
    pressed = get_typeahead(keys)
    assert [each.key for each in pressed] == ["a", "b", Keys.ControlM, Keys.BracketedPaste, Keys.ControlM]
    assert pressed[3].data == text
    assert not select.select([master], [], [], 0.0)[0], "no echo"


def test_a_key_that_does_something_at_once_does_it_and_only_by_itself(keyboard: Keyboard) -> None:
    master, keys, ahead = keyboard
    done: list[str] = []
    ahead.disable_echo()
    with ahead.collect_keys({"c-t": lambda: done.append("t")}):
        os.write(master, b"a\x14b\x1b[200~x\x14y\x1b[201~\x14")
        while select.select([keys.fileno()], [], [], 0.05)[0] or len(done) < 2:
            pass
    pressed = get_typeahead(keys)
    assert [each.key for each in pressed] == ["a", "b", Keys.BracketedPaste] and pressed[2].data == "x\x14y"
    assert done == ["t", "t"]


def test_the_terminal_is_left_as_it_was_and_ctrl_c_stays_a_signal_that_throws_nothing_away(keyboard: Keyboard) -> None:
    _, keys, ahead = keyboard
    before = termios.tcgetattr(keys.fileno())
    ahead.disable_echo()
    flags = termios.tcgetattr(keys.fileno())[3]
    assert flags & termios.ISIG and flags & termios.NOFLSH and not flags & (termios.ECHO | termios.ICANON)
    ahead.restore_echo()
    assert termios.tcgetattr(keys.fileno()) == before
