"""/save, /load, /chats and /file: a chat in a file, and a file in a chat."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from rich.console import Console

from cortexmlx.cli.chat.attachments import attach, with_files
from cortexmlx.cli.chat.session import Attached, ChatSession, Question
from cortexmlx.cli.chat.slash.command import Command
from cortexmlx.cli.chats.saved_chats import find, kept_names, newest_names
from cortexmlx.cli.limits import advice, limit
from cortexmlx.cli.program import fit_commands
from cortexmlx.cli.terminal.console import print_indented, print_rows
from cortexmlx.cli.terminal.harmless import in_a_line
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.sessions.saved import write_private

FORCE = "--force"
MARKDOWN = (".md", ".markdown")


@partial(Command, "/save", "FILE", "write the conversation to a file; .md: to read", takes_path=True)
def save(chat: ChatSession, argument: str, console: Console) -> None:
    """/save FILE: write JSON, or readable Markdown for a name with that ending. Only --force replaces an existing
    file.
    """
    words = argument.split()
    force = FORCE in words
    name = " ".join(word for word in words if word != FORCE) if force else argument
    if not name:
        kept = chat.keeper.kept if chat.keeper is not None else None
        raise InvalidRequest("/save needs a file name" + (f"; the chat is kept in {kept} anyway" if kept else ""))
    path = Path(os.path.expanduser(name.strip("\"'")))
    if os.path.isdir(path):
        raise InvalidRequest(f"{path} is a folder: name a file in it")
    if not force and os.path.lexists(path):
        raise InvalidRequest(f"{path} exists already: name another file, or write over it with /save {name} {FORCE}")
    if path.suffix.lower() in MARKDOWN:
        write_private(path, chat.conversation.markdown().encode("utf-8", "replace"))
    else:
        chat.conversation.save(path)
    print_indented(console, f"saved {len(chat.conversation.messages)} messages to {path}")


@partial(
    Command,
    "/load",
    "FILE|NAME",
    "continue a file of messages, or a kept chat",
    values=lambda: kept_names(),
    values_are="kept chat",
    takes_path=True,
)
def load(chat: ChatSession, argument: str, console: Console) -> None:
    """/load FILE or NAME: continue the conversation in that file."""
    if not argument:
        raise InvalidRequest(f"/load needs a file, or the name of a kept chat: {newest_names()} (/chats lists all)")
    try:
        path = find(argument)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error} (a model: /model {argument})") from None
    chat.conversation.load(path)
    chat.tell_notes()
    chat.begin_anew()
    read = f", of which the first {unread} are not sent any more" if (unread := chat.conversation.unread) else ""
    said = f"loaded {len(chat.conversation.messages)} messages from {path}{read}; /show messages shows them"
    print_indented(console, said)


@partial(Command, "/file", "PATH [TEXT]", "put a text file in front of the next message", takes_path=True)
def file(chat: ChatSession, argument: str, console: Console) -> Question | None:
    """/file PATH: send the file's text with the next message, or at once if a question follows the path."""
    path, question = _path_and_question(argument)
    if not path:
        waiting = ", ".join(str(each.path) for each in chat.attached) or "none"
        raise InvalidRequest(f"/file needs a path; files that wait for the next message: {waiting}")
    attached = attach(path)
    tell(chat, attached, console)
    if not question:
        chat.attached.append(attached)
        print_indented(console, "its text goes with the next message")
        return None
    waited, chat.attached = tuple(chat.attached), []
    text = with_files([*waited, attached], question)
    return Question(text, typed=f"{as_mention(attached)} {question}", waited=waited)


def _path_and_question(argument: str) -> tuple[str, str]:
    """Return the path and the question. The path is in quotes, or is the whole argument if that exists, or is the first
    word.
    """
    whole = argument.strip()
    if whole[:1] in ('"', "'") and whole.find(whole[0], 1) > 0:
        path, _, question = whole[1:].partition(whole[0])
        return path, question.strip()
    if whole and os.path.exists(os.path.expanduser(whole)):
        return whole, ""
    path, _, question = whole.partition(" ")
    return path, question.strip()


def tell(chat: ChatSession, file: Attached, console: Console) -> None:
    """Print how much a file is: `notes.txt: 120 lines, 4.1 KiB, 1,034 tokens`. Raises InvalidRequest if it can never
    fit.
    """
    lines, size = len(file.text.splitlines()), format_bytes(len(file.text.encode()))
    tokens = len(chat.engine.encode(file.text))
    if tokens >= chat.engine.longest_request:
        raise InvalidRequest(
            f"{file.path} has {tokens:,} tokens, more than {limit(chat.engine)}. {advice(chat.engine)}"
        )
    said = f"{file.path}: {lines:,} line{'s' * (lines != 1)}, {size}, {tokens:,} tokens"
    print_indented(console, f"+ {said}")


def as_mention(file: Attached) -> str:
    """Return `@path`, in quotes if the path has blanks."""
    return f'@"{file.path}"' if " " in str(file.path) else f"@{file.path}"


_SHOWN = 20


@partial(Command, "/chats", "[WORD]", "the chats that are kept, or those with WORD in their names")
def chats(chat: ChatSession, argument: str, console: Console) -> None:
    """/chats [WORD]: list the newest kept chats, or those with the word in their names."""
    names = [name for name in kept_names() if argument.lower() in name.lower()]
    here = chat.keeper.path.stem if chat.keeper is not None and chat.keeper.path is not None else None
    for name in names[:_SHOWN]:
        print_rows(console, [(f" {'*' if name == here else ' '}", in_a_line(name))], 3)
    if not names:
        none = f"no kept chat has {argument!r} in its name" if argument else "no chats are kept yet"
        return print_indented(console, none)
    if len(names) > _SHOWN:
        print_indented(console, f"and {len(names) - _SHOWN:,} older: /chats WORD finds them")
    print_indented(console, fit_commands("/load NAME continues one; `cortexmlx chats` renames and deletes them"))
