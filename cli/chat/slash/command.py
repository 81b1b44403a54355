"""A slash command: a function, with what /help, Tab and the parser know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, Draft, Question


def no_values() -> Iterable[str]:
    """The argument has no known values."""
    return ()


@dataclass(frozen=True)
class Command:
    """A slash command. `@partial(Command, name, argument, help)` makes one of a function."""

    name: str
    """With its slash."""
    argument: str
    """As /help shows it: `PATH`, or `[WORD]` if it may be left out."""
    help: str
    """What it does, in a line of /help."""
    run: Callable[[ChatSession, str, Console], Question | Draft | None]
    """Takes the chat, the argument and the console. What it returns is answered or edited next."""
    aliases: tuple[str, ...] = ()
    """Other names, each with its slash."""
    values: Callable[[], Iterable[str]] = no_values
    """The arguments that Tab offers."""
    values_are: str = ""
    """What these are, where Tab offers files beside them."""
    takes_path: bool = False
    """Tab offers files."""
    multiline: tuple[str, ...] = ()
    """The argument may have several lines if it begins with one of these. Elsewhere a line break makes a message."""

    def __call__(self, chat: ChatSession, argument: str, console: Console) -> Question | Draft | None:
        """Carry it out."""
        return self.run(chat, argument, console)
