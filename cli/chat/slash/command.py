"""A slash command: a function, and what /help, Tab and the parser know about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, Question, QuestionDraft


def no_values() -> Iterable[str]:
    """Return no completions: the values of the argument are not known."""
    return ()


@dataclass(frozen=True)
class SlashCommand:
    """A slash command and its completion. `@partial(SlashCommand, name, argument, help)` makes one from a function."""

    name: str
    """The name with its slash."""
    argument: str
    """As /help shows it: `PATH`, or `[WORD]` if it may be left out."""
    help: str
    """What it does, in a line of /help."""
    run: Callable[[ChatSession, str, Console], Question | QuestionDraft | None]
    """Takes the chat, the argument and the console. What it returns is answered or edited next."""
    aliases: tuple[str, ...] = ()
    """Other names, each with its slash."""
    complete_values: Callable[[], Iterable[str]] = no_values
    """The arguments that Tab offers."""
    values_meaning: str = ""
    """What the values are. Shown where Tab offers files, too."""
    takes_path: bool = False
    """Whether Tab offers files."""
    multiline: tuple[str, ...] = ()
    """The argument may have several lines if it begins with one of these. Elsewhere a line break makes a message."""

    def __call__(self, chat: ChatSession, argument: str, console: Console) -> Question | QuestionDraft | None:
        """Run the command."""
        return self.run(chat, argument, console)
