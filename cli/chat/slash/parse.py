"""Parse a typed line: a slash command or a message to the model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cortexmlx.cli.chat.quotes import QUOTES, strip_quotes
from cortexmlx.cli.chat.slash.command import SlashCommand
from cortexmlx.cli.chat.slash.settings import OTHER_NAMES, UNSUPPORTED_NAMES, setting_names
from cortexmlx.errors import InvalidRequest

BARE_COMMANDS = {"exit": "/exit", "quit": "/exit", "exit()": "/exit", "quit()": "/exit", ":q": "/exit", "help": "/help"}
"""Words that stand for a command when they are all that is typed."""

_MIN_SIMILARITY = 0.76
"""The similarity to a command from which on a word is a mistyped command. /tmp and /etc are paths."""


COMMAND_SYNONYMS = {
    "/new": "/clear",
    "/retry": "/regen",
    "/regenerate": "/regen",
    "/settings": "/set",
    "/list": "/model",
    "/ls": "/model",
    "/resume": "/load NAME",
    "/history": "/show messages",
    "/read": "/file PATH",
    "/models": "/model",
    "/q": "/exit",
}
"""Commands of other chat programs, and the same commands here."""


@dataclass(frozen=True)
class ParsedInput:
    """A parsed input line: a command with its argument, or a message. The message is empty if nothing was typed."""

    command: str | None
    text: str


def parse_input(line: str, commands: Mapping[str, SlashCommand]) -> ParsedInput:
    """Parse a typed line as a slash command or a message.

    Only a known name, alone in its line, is a command. So pasted code and paths are messages, and so is everything
    between three quotes or after a blank.

    Raises InvalidRequest for a name that is almost that of a command, or that of a setting or of another program's
    command. Raises it, too, for a single word after a slash and nothing else: that is meant as a command.
    """
    if line.strip().startswith(QUOTES):
        return ParsedInput(None, strip_quotes(line))
    bare_command = BARE_COMMANDS.get(line.strip().lower())
    if bare_command is not None:
        return ParsedInput(bare_command, "")
    if not line.startswith("/"):
        return ParsedInput(None, line if line.strip() else "")
    first, *rest = line.split(maxsplit=1)
    name, argument = first.lower(), "".join(rest).strip()
    if name in commands:
        is_pasted = "\n" in line.strip() and not argument.startswith(commands[name].multiline)
        return ParsedInput(None, line) if is_pasted else ParsedInput(name, argument)
    if not re.fullmatch(r"/[\w-]+", name) or "\n" in line.strip():
        return ParsedInput(None, line)
    meant_lines = _meant_lines(name, argument, commands)
    if argument and not meant_lines:
        return ParsedInput(None, line)
    hint = f"did you mean {' or '.join(meant_lines)}? " if meant_lines else ""
    raise InvalidRequest(
        f"no command {name}: {hint}/help lists all commands. To send this as a message, put a blank in front."
    )


def _meant_lines(name: str, argument: str, commands: Mapping[str, SlashCommand]) -> list[str]:
    """Return the lines that may be meant by an unknown command; without an argument, also less similar ones."""
    if name in COMMAND_SYNONYMS:
        return [re.sub("PATH|NAME", lambda place: argument or place[0], COMMAND_SYNONYMS[name])]
    word, settings = name[1:], [*setting_names(), *OTHER_NAMES, *UNSUPPORTED_NAMES]
    similar_names = difflib.get_close_matches(name, commands, n=1, cutoff=_MIN_SIMILARITY)
    min_similarity = _MIN_SIMILARITY if len(word) > 4 and not similar_names else 1.0
    for setting in difflib.get_close_matches(word, settings, n=1, cutoff=min_similarity):
        return [f"/set {setting} {argument or 'VALUE'}"]
    if not argument:
        similar_names = similar_names or difflib.get_close_matches(name, commands, n=3, cutoff=0.6)
    return [f"{each} {argument}" if argument and commands[each].argument else each for each in similar_names]
