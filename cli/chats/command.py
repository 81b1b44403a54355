"""`cortexmlx chats`: list, find, rename and delete saved chats."""

from __future__ import annotations

import json
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from cortexmlx.cli.chats.lock import ChatLock
from cortexmlx.cli.chats.saved_chats import chats_folder, find_in_history, matching_chats, remove_leftovers, saved_paths
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.system.files import state_folder

_LONGEST_NAME = 200
"""Bytes of a name. Most file systems allow 255 with the ending."""


def chats(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Saved chats: names, their beginnings, words in them, or last.", show_default=False
        ),
    ] = None,
    path: Annotated[bool, typer.Option("--path", help="Print the files of the chats.")] = False,
    rename: Annotated[
        str | None, typer.Option("--rename", metavar="NEW", help="Give the chat another name.", show_default=False)
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the chats.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without a question.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON record.")] = False,
) -> None:
    """List, rename or delete saved chats, the newest first. Words list all that have them in their names, or else their
    texts; to delete one, give its name or its beginning.

    `cortexmlx chat --resume NAME` continues one. A chat that is open is neither renamed nor deleted. Keys and values
    of its texts are kept elsewhere: see `cortexmlx cache`.
    """
    if (delete, rename is not None, path).count(True) > 1:
        raise typer.BadParameter("--path, --rename and --delete are three different things: give one of them")
    if (delete or rename is not None) and not names:
        raise typer.BadParameter("name the chat: `cortexmlx chats` lists them", param_hint="NAME")
    if rename is not None and len(names or ()) != 1:
        raise typer.BadParameter(f"--rename takes one chat, not {len(names or ())}", param_hint="NAME")
    remove_leftovers()
    if delete or rename is not None:
        paths = list(dict.fromkeys(find_in_history(name, by_words=not delete) for name in names or ()))
    else:
        paths = list(dict.fromkeys(chain(*map(matching_chats, names)))) if names else saved_paths()
    if rename is not None:
        paths = [rename_chat(paths[0], rename)]
    elif delete:
        if not (yes or confirm_delete(paths)):
            raise typer.Exit(1)
        for each in paths:
            delete_chat(each)
    if as_json:
        records = [
            {"name": each.stem, "path": str(each), "deleted": True} if delete else chat_record(each) for each in paths
        ]
        print_line(json.dumps({"folder": str(chats_folder()), "chats": records}))
    elif delete or rename is not None:
        for each in paths:
            print_line(f"deleted {each.stem}" if delete else f"renamed to {each.stem}")
    elif path:
        for each in paths if names else [chats_folder()]:
            print_line(str(each))
    else:
        print_table(paths)


def print_line(line: str) -> None:
    """Print one line to stdout."""
    console.stdout().print(line, markup=False, highlight=False, soft_wrap=True)


def chat_record(chat: Path) -> dict[str, object]:
    """Return a chat's name, time and size for `--json`, without reading it. One being deleted has no time or size."""
    try:
        status = chat.stat()
    except OSError:
        return {"name": chat.stem, "path": str(chat), "modified": None, "bytes": None}
    return {"name": chat.stem, "path": str(chat), "modified": int(status.st_mtime), "bytes": status.st_size}


def print_table(paths: list[Path]) -> None:
    """Print time, size and name of each saved chat."""
    if not paths:
        console.print_note("no chats are saved yet: a chat in a terminal is saved after every turn")
    for each in paths:
        try:
            status = each.stat()
        except OSError:
            continue
        time_text = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        print_line(f"{time_text}  {format_bytes(status.st_size):>9}  {to_single_line(each.stem)}")


def confirm_delete(paths: list[Path]) -> bool:
    """Ask whether to delete the chats. Raises typer.BadParameter if nobody can be asked."""
    if not (sys.stdin.isatty() and console.is_terminal(sys.stderr)):
        raise typer.BadParameter("nobody can be asked here: --yes deletes without a question", param_hint="--delete")
    names = ", ".join(to_single_line(each.stem) for each in paths)
    console.print_note(f"delete {names} for ever? y or n")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def delete_chat(chat: Path) -> None:
    """Delete a chat's file. Raises InvalidRequest if the chat is open, CortexError if the file cannot be deleted."""
    lock = lock_chat(chat)
    try:
        chat.unlink(missing_ok=True)
    except OSError as error:
        raise CortexError(f"{chat} cannot be deleted: {error.strerror or error}") from error
    finally:
        lock.release()


def rename_chat(chat: Path, name: str) -> Path:
    """Rename a chat's file, and return its new path. Raises InvalidRequest if it is open or the name cannot be used."""
    target = chats_folder() / f"{check_name(name)}.json"
    if target == chat:
        return chat
    lock = lock_chat(chat)
    try:
        target_lock = ChatLock.acquire(target, state_folder())
        if target_lock is None or target.exists() or target.is_symlink():
            raise InvalidRequest(f"there is a chat {target.stem} already: give --rename another name")
        try:
            chat.rename(target)
        except OSError as error:
            raise CortexError(f"{chat} cannot be renamed: {error.strerror or error}") from error
        finally:
            target_lock.release()
    finally:
        lock.release()
    return target


def lock_chat(chat: Path) -> ChatLock:
    """Lock a chat and return the lock. Raises InvalidRequest if the chat is open."""
    lock = ChatLock.acquire(chat, state_folder())
    if lock is None:
        raise InvalidRequest(f"{chat.stem} is open in a chat: leave that chat first")
    return lock


def check_name(name: str) -> str:
    """Return the name if it can be a file in the folder of chats and be typed. Raises InvalidRequest for any other."""
    name = name.removesuffix(".json")
    if not name or name != name.strip() or name[0] in ".-~" or "/" in name or "\\" in name or not name.isprintable():
        raise InvalidRequest(
            f"{name!r} cannot be the name of a chat: it has no / or \\ in it, and begins with no . - or ~"
        )
    if name == "last":
        raise InvalidRequest("last is the chat that was saved most recently: give --rename another name")
    if (size := len(name.encode("utf-8", "replace"))) > _LONGEST_NAME:
        raise InvalidRequest(f"a name of {size} bytes is too long: {_LONGEST_NAME} at most")
    return name
