"""/tools: the functions that the model may call."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.chat.slash.command import SlashCommand
from cortexmlx.cli.chat.tools.functions_file import load_tools
from cortexmlx.cli.terminal.console import print_indented, print_rows

NONE = "none"


@partial(
    SlashCommand,
    "/tools",
    "[FILE.py]",
    "functions the model may call; none ends it",
    complete_values=lambda: (NONE,),
    values_meaning="no functions",
    takes_path=True,
)
def set_tools(chat: ChatSession, argument: str, console: Console) -> None:
    """/tools FILE.py: let the model call the functions of a file; /tools none: no functions; /tools: list them."""
    if argument == NONE:
        chat.set_tools(())
    elif argument:
        chat.set_tools(load_tools(Path(os.path.expanduser(argument.strip("\"'")))))
    if tools := chat.params.offered:
        print_rows(console, [(f"  {tool.name}", tool.description or "no description") for tool in tools], 22, "")
    else:
        print_indented(console, "the model may call no functions; /tools FILE.py lets it call those of a file")
