"""/chats: the chats that are kept."""

from __future__ import annotations

from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.chats.kept import kept_names
from cortexmlx.cli.terminal.harmless.characters import in_a_line

_SHOWN = 20


def chats(chat: ChatSession, argument: str, console: Console) -> None:
    """/chats [WORD]: the newest kept chats, or those with a word in their names."""
    names = [name for name in kept_names() if argument.lower() in name.lower()]
    here = chat.keeper.path.stem if chat.keeper is not None and chat.keeper.path is not None else None
    for name in names[:_SHOWN]:
        console.print(f" {'*' if name == here else ' '} {in_a_line(name)}", style="dim", markup=False)
    if not names:
        none = f"no kept chat has {argument!r} in its name" if argument else "no chats are kept yet"
        return console.print(f"  {none}", style="dim", markup=False)
    if len(names) > _SHOWN:
        console.print(f"  and {len(names) - _SHOWN:,} older: /chats WORD finds them", style="dim", markup=False)
    said = "/load NAME goes on with one; `cortexmlx chats` renames and deletes them"
    console.print(f"  {said}", style="dim", markup=False)
