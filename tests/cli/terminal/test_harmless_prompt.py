"""What prompt_toolkit writes: sequences of its own, and text that is harmless."""

from __future__ import annotations

import os
import pty
import sys

import pytest

from cortexmlx.cli.terminal.harmless import prompt_output
from support.cli.hostile import HOSTILE, offences


def test_text_is_harmless_and_movements_are_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as window:
        monkeypatch.setattr(sys, "stdout", window)
        output = prompt_output()
        for text in HOSTILE:
            output.write(text.replace("\r", ""))
        output.write("[\u202e]\r\n")  # turns the order of letters, and takes no cell
        output.cursor_backward(1)
        output.cursor_backward(0)
        output.enable_bracketed_paste()
        output.flush()
        written = os.read(master, 65536)
    os.close(master)
    assert offences(written) == [] and b"[]\r\r\n" in written and written.endswith(b"\x1b[1D\x1b[?2004h")
