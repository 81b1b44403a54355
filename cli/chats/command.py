"""`cortexmlx chats`: list, find, rename and delete kept chats."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from cortexmlx.cli.chats.lock import ChatLock
from cortexmlx.cli.chats.saved_chats import chats_folder, find_kept, kept_paths, tidy
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import in_a_line
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.system.files import state_folder

_LONGEST_NAME = 200
"""Bytes of a name. Most file systems allow 255 with the ending."""


def chats(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Kept chats: names, their beginnings, or last.", show_default=False),
    ] = None,
    path: Annotated[bool, typer.Option("--path", help="Print the files of the chats.")] = False,
    rename: Annotated[
        str | None, typer.Option("--rename", metavar="NEW", help="Give the chat another name.", show_default=False)
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the chats.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without a question.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON record.")] = False,
) -> None:
    """List kept chats, the newest first, or show, rename or delete those that are named.

    `cortexmlx chat --resume NAME` continues one. A chat that is open is neither renamed nor deleted. Keys and values
    of its texts are kept elsewhere: see `cortexmlx cache`.
    """
    if (delete, rename is not None, path).count(True) > 1:
        raise typer.BadParameter("--path, --rename and --delete are three different things: give one of them")
    if (delete or rename is not None) and not names:
        raise typer.BadParameter("name the chat: `cortexmlx chats` lists them", param_hint="NAME")
    if rename is not None and len(names or ()) != 1:
        raise typer.BadParameter(f"--rename takes one chat, not {len(names or ())}", param_hint="NAME")
    tidy()
    found = list(dict.fromkeys(map(find_kept, names))) if names else kept_paths()
    if rename is not None:
        found = [renamed(found[0], rename)]
    elif delete:
        if not (yes or agreed(found)):
            raise typer.Exit(1)
        for each in found:
            deleted(each)
    if as_json:
        records = [
            {"name": each.stem, "path": str(each), "deleted": True} if delete else record(each) for each in found
        ]
        show(json.dumps({"folder": str(chats_folder()), "chats": records}))
    elif delete or rename is not None:
        for each in found:
            show(f"deleted {each.stem}" if delete else f"renamed to {each.stem}")
    elif path:
        for each in found if names else [chats_folder()]:
            show(str(each))
    else:
        table(found)


def show(line: str) -> None:
    """Print one line to stdout."""
    console.stdout().print(line, markup=False, highlight=False, soft_wrap=True)


def record(chat: Path) -> dict[str, object]:
    """Return what is known of a chat without reading it. A chat that is being deleted has no size."""
    try:
        status = chat.stat()
    except OSError:
        return {"name": chat.stem, "path": str(chat), "modified": None, "bytes": None}
    return {"name": chat.stem, "path": str(chat), "modified": int(status.st_mtime), "bytes": status.st_size}


def table(found: list[Path]) -> None:
    """Print time, size and name of each chat."""
    if not found:
        console.note("no chats are kept yet: a chat in a terminal is kept after every turn")
    for each in found:
        try:
            status = each.stat()
        except OSError:
            continue
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        show(f"{when}  {format_bytes(status.st_size):>9}  {in_a_line(each.stem)}")


def agreed(found: list[Path]) -> bool:
    """Ask whether to delete the chats. Raises typer.BadParameter if nobody can be asked."""
    if not (sys.stdin.isatty() and console.is_terminal(sys.stderr)):
        raise typer.BadParameter("nobody can be asked here: --yes deletes without a question", param_hint="--delete")
    names = ", ".join(in_a_line(each.stem) for each in found)
    console.note(f"delete {names} for ever? y or n")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def deleted(chat: Path) -> None:
    """Delete a chat's file. Raises InvalidRequest if the chat is open, CortexError if the file cannot be deleted."""
    lock = taken(chat)
    try:
        chat.unlink(missing_ok=True)
    except OSError as error:
        raise CortexError(f"{chat} cannot be deleted: {error.strerror or error}") from error
    finally:
        lock.release()


def renamed(chat: Path, name: str) -> Path:
    """Give a chat another name. Raises InvalidRequest if it is open, or if the name cannot be used."""
    target = chats_folder() / f"{checked_name(name)}.json"
    if target == chat:
        return chat
    lock = taken(chat)
    try:
        other = ChatLock.take(target, state_folder())
        if other is None or target.exists() or target.is_symlink():
            raise InvalidRequest(f"there is a chat {target.stem} already: give --rename another name")
        try:
            chat.rename(target)
        except OSError as error:
            raise CortexError(f"{chat} cannot be renamed: {error.strerror or error}") from error
        finally:
            other.release()
    finally:
        lock.release()
    return target


def taken(chat: Path) -> ChatLock:
    """Return the lock of a chat. Raises InvalidRequest if the chat is open."""
    lock = ChatLock.take(chat, state_folder())
    if lock is None:
        raise InvalidRequest(f"{chat.stem} is open in a chat: leave that chat first")
    return lock


def checked_name(name: str) -> str:
    """Return a name that is one file in the folder of chats and can be typed. Raises InvalidRequest for any other."""
    name = name.removesuffix(".json")
    if not name or name != name.strip() or name[0] in ".-~" or "/" in name or "\\" in name or not name.isprintable():
        raise InvalidRequest(
            f"{name!r} cannot be the name of a chat: it has no / or \\ in it, and begins with no . - or ~"
        )
    if name == "last":
        raise InvalidRequest("last is the chat that was kept most recently: give --rename another name")
    if (size := len(name.encode("utf-8", "replace"))) > _LONGEST_NAME:
        raise InvalidRequest(f"a name of {size} bytes is too long: {_LONGEST_NAME} at most")
    return name
