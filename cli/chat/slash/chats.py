"""/chats: the chats that are kept."""

from __future__ import annotations

from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.chats.kept import kept_names
from cortexmlx.cli.terminal.console import print_indented, print_rows
from cortexmlx.cli.terminal.harmless.characters import in_a_line

_SHOWN = 20


def chats(chat: ChatSession, argument: str, console: Console) -> None:
    """/chats [WORD]: the newest kept chats, or those with a word in their names."""
    names = [name for name in kept_names() if argument.lower() in name.lower()]
    here = chat.keeper.path.stem if chat.keeper is not None and chat.keeper.path is not None else None
    for name in names[:_SHOWN]:
        print_rows(console, [(f" {'*' if name == here else ' '}", in_a_line(name))], 3)
    if not names:
        none = f"no kept chat has {argument!r} in its name" if argument else "no chats are kept yet"
        return print_indented(console, none)
    if len(names) > _SHOWN:
        print_indented(console, f"and {len(names) - _SHOWN:,} older: /chats WORD finds them")
    said = "/load NAME goes on with one; `cortexmlx chats` renames and deletes them"
    print_indented(console, said)
