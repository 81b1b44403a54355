"""Where output goes, and what a stream cannot show."""

from __future__ import annotations

import os
import subprocess
import sys

from support import cli_fakes

FAKE_COMMAND = [sys.executable, cli_fakes.__file__]


def test_a_terminal_that_cannot_show_a_character_gets_a_question_mark() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*FAKE_COMMAND, "generate", "fake", "-p", "né"], capture_output=True, env=environment, stdin=-3
    )
    assert (done.returncode, done.stdout) == (0, b"You said: n?\n")
