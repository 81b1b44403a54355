"""All slash commands of a chat. `COMMANDS` collects them from the modules of this folder."""

from __future__ import annotations

from functools import partial

from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.chat.slash import display, files, models, settings, turns
from cortexmlx.cli.chat.slash.command import SlashCommand
from cortexmlx.cli.chat.slash.parse import BARE_COMMANDS
from cortexmlx.cli.terminal.console import print_rows

KEYS = (
    ('  """', "typed, begins and ends a message of several lines; a paste is one message"),
    ("  Alt-Enter, Ctrl-J", "a new line"),
    ("  @path in a message", "puts the text of that file, or that image, in front of it; Tab completes"),
    ("  Up, Ctrl-R", "what was typed before; Ctrl-R searches it"),
    ("  Ctrl-X Ctrl-E", "the message in your $EDITOR"),
    ("  Ctrl-T", "shows and hides the KV blocks below an answer while it is written"),
    ("  Ctrl-C", "stops an answer or clears the line, twice it leaves"),
    ("  Ctrl-Z", "stops the program, and fg continues it"),
    ("  Ctrl-D", "leaves"),
    ("  a blank in front", "makes a command a message"),
)


class LeaveChat(Exception):
    """Raised when the user leaves the chat."""


@partial(
    SlashCommand,
    "/help",
    "",
    "this list",
    aliases=("/?",),
    complete_values=lambda: [command.name for command in COMMANDS],
)
def show_help(chat: ChatSession, argument: str, console: Console) -> None:
    """/help: print all commands and keys, or one command."""
    matches = [c for c in COMMANDS if not argument or f"/{argument.removeprefix('/')}" in (c.name, *c.aliases)]
    for command in matches or COMMANDS:
        names = ", ".join((f"{command.name} {command.argument}".strip(), *command.aliases))
        print_rows(console, [(f"  {names}", command.help)], 26, "")
    if not argument:
        print_rows(console, KEYS, 26, "")


@partial(SlashCommand, "/exit", "", "leave", aliases=("/quit", "/bye"))
def leave(chat: ChatSession, argument: str, console: Console) -> None:
    """/exit: leave the chat."""
    raise LeaveChat


LEAVING_WORDS = {leave.name, *leave.aliases, *(word for word, name in BARE_COMMANDS.items() if name == leave.name)}

_MODULES = (turns, files, settings, models, display)
_MODULE_COMMANDS = (each for module in _MODULES for each in vars(module).values() if isinstance(each, SlashCommand))
COMMANDS: tuple[SlashCommand, ...] = (show_help, *_MODULE_COMMANDS, leave)
"""All commands, in the order of /help."""

BY_NAME = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
