"""What was typed: a command of the chat, or a message to the model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cortexmlx.cli.chat.typed.quotes import QUOTES, unquoted
from cortexmlx.errors import InvalidRequest

BARE = {"exit": "/exit", "quit": "/exit", "exit()": "/exit", "quit()": "/exit", ":q": "/exit", "help": "/help"}
"""Words that stand for a command when they are all that is typed."""

_NEAR = 0.76
"""How alike a word and a command must be for it to be a mistyped command: /tmp and /etc are paths."""


class Named(Protocol):
    """What is known of a command here: the beginnings of arguments that may have several lines."""

    @property
    def text_after(self) -> tuple[str, ...]: ...


C = TypeVar("C", bound=Named)


@dataclass(frozen=True)
class Typed:
    """What was typed: a command with its argument, or a message, which is empty if nothing was."""

    command: str | None
    text: str


def read(typed: str, commands: Mapping[str, C]) -> Typed:
    """Tell commands from messages. Only known names are commands, alone in their line; so pasted code and paths are
    messages, and so is everything between three quotes or behind a blank. Raises InvalidRequest for a name that is
    almost that of a command.
    """
    if typed.strip().startswith(QUOTES):
        return Typed(None, unquoted(typed))
    alone = BARE.get(typed.strip().lower())
    if alone is not None:
        return Typed(alone, "")
    if not typed.startswith("/"):
        return Typed(None, typed if typed.strip() else "")
    first, *rest = typed.split(maxsplit=1)
    name, argument = first.lower(), "".join(rest).strip()
    if name in commands:
        pasted = "\n" in typed.strip() and not argument.startswith(commands[name].text_after)
        return Typed(None, typed) if pasted else Typed(name, argument)
    near = difflib.get_close_matches(name, commands, n=1, cutoff=_NEAR)
    if near and re.fullmatch(r"/\w+", name) and "\n" not in typed:
        raise InvalidRequest(
            f"no command {name}: did you mean {near[0]}? (A message that begins so: a blank before it.)"
        )
    return Typed(None, typed)
