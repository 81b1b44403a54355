"""How this program was started, so that commands in its messages can be typed as they stand."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

NAME = "cortexmlx"

STARTED_BY = "CORTEXMLX_STARTED_BY"
"""The environment variable in which the Makefile says that it starts the program: `make`."""

MAKE_TARGETS = ("chat", "serve", "bench")
"""The commands that are also targets of the Makefile, which takes MODEL and ARGS."""

COMMANDS = "chat|chats|generate|batch|serve|launch|eval|plan|cache|models|doctor|bench"

_SUGGESTED_COMMAND = re.compile(rf"(?<![\w./-]){NAME} ((?:{COMMANDS}|COMMAND|--help|--version)\b[^`\n]*)")
"""A command within a message: up to the quotation mark after it, or to the end of its line."""


def program_name() -> str:
    """Return what to type for `cortexmlx`: the name if the shell finds this script by it, otherwise what was typed:
    `.venv/bin/cortexmlx` or `.venv/bin/python -m cortexmlx`.
    """
    script = Path(sys.argv[0])
    if script.name == "__main__.py" and script.parent.name == NAME:
        return shlex.join([sys.orig_argv[0], "-m", NAME])
    installed_path = shutil.which(NAME)
    if script.name != NAME or (installed_path and script.exists() and script.samefile(installed_path)):
        return NAME
    return shlex.quote(sys.argv[0])


def adapt_commands(text: str) -> str:
    """Return a message with each command of this program written as it must be typed here."""
    return _SUGGESTED_COMMAND.sub(lambda each: _command_line(each[1]), text)


def _command_line(rest: str) -> str:
    """Return the line to type to run `cortexmlx` with these arguments."""
    default_line = f"{program_name()} {rest}"
    try:
        command, *arguments = shlex.split(rest)
    except ValueError:  # quotation marks of the sentence
        return default_line
    if os.environ.get(STARTED_BY) != "make" or command not in MAKE_TARGETS or "  " in rest:
        return default_line
    words = ["make", command]
    if arguments and not arguments[0].startswith("-"):
        words.append(f"MODEL={shlex.quote(arguments.pop(0))}")
    if arguments:
        words.append(f"ARGS={shlex.quote(shlex.join(arguments).replace('$', '$$'))}")
    return " ".join(words)
