"""/save, /copy, /load, /chats, /file and /image: a chat in a file, and a file in a chat."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console

from cortexmlx.cli.chat.attachments import add_files, read_attachment, read_image
from cortexmlx.cli.chat.session import AttachedFile, AttachedImage, Attachment, ChatSession, Question
from cortexmlx.cli.chat.slash.command import SlashCommand
from cortexmlx.cli.chats.saved_chats import find_chat, matching_chats, newest_names_phrase, saved_names
from cortexmlx.cli.files.outputs import check_output
from cortexmlx.cli.limits import describe_limit, room_advice
from cortexmlx.cli.program import adapt_commands
from cortexmlx.cli.terminal.console import is_terminal, print_indented, print_rows, write_control
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.sessions.saved import write_private
from cortexmlx.vision.images import read_size

FORCE = "--force"
MARKDOWN = (".md", ".markdown")


@partial(SlashCommand, "/save", "FILE", "write the conversation to a file; .md: to read", takes_path=True)
def save(chat: ChatSession, argument: str, console: Console) -> None:
    """/save FILE: save as JSON, or as Markdown for .md and .markdown. Only --force replaces an existing file."""
    words = argument.split()
    force = FORCE in words
    name = " ".join(word for word in words if word != FORCE) if force else argument
    if not name:
        saved_path = chat.saver.saved_path if chat.saver is not None else None
        raise InvalidRequest(
            "/save needs a file name" + (f"; the chat is saved in {saved_path} anyway" if saved_path else "")
        )
    path = Path(os.path.expanduser(name.strip("\"'")))
    check_output(path, "/save")
    if not force and os.path.lexists(path):
        raise InvalidRequest(f"{path} exists already: name another file, or write over it with /save {name} {FORCE}")
    if path.suffix.lower() in MARKDOWN:
        write_private(path, chat.conversation.markdown().encode("utf-8", "replace"))
    else:
        chat.conversation.save(path)
    print_indented(console, f"saved {len(chat.conversation.messages)} messages to {path}")


@partial(SlashCommand, "/copy", "", "put the last answer on the clipboard")
def copy_answer(chat: ChatSession, argument: str, console: Console) -> None:
    """/copy: put the last answer on the clipboard, by the terminal (OSC 52, through ssh, too) and by pbcopy."""
    answers = [message.get("content") for message in chat.conversation.messages if message["role"] == "assistant"]
    if not answers or not (text := str(answers[-1] or "")):
        raise InvalidRequest("there is no answer to copy")
    if not is_terminal(console.file):
        raise InvalidRequest("/copy needs a terminal; /save FILE.md writes the chat to a file")
    data = text.encode("utf-8", "replace")
    if pbcopy := shutil.which("pbcopy"):
        subprocess.run([pbcopy], input=data, env=os.environ | {"LC_CTYPE": "UTF-8"}, check=False)
    write_control(cast(TextIO, console.file), f"\x1b]52;c;{base64.b64encode(data).decode()}\x07")
    how = "" if pbcopy else ", if this terminal lets programs do that (OSC 52)"
    print_indented(console, f"copied {len(text):,} characters{how}")


@partial(
    SlashCommand,
    "/load",
    "FILE|NAME",
    "continue a file of messages, or a saved chat",
    complete_values=lambda: saved_names(),
    values_meaning="saved chat",
    takes_path=True,
)
def load(chat: ChatSession, argument: str, console: Console) -> None:
    """/load FILE or NAME: continue the conversation in that file."""
    if not argument:
        raise InvalidRequest(
            f"/load needs a file, or the name of a saved chat: {newest_names_phrase()} (/chats lists all)"
        )
    try:
        path = find_chat(argument)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error} (a model: /model {argument})") from None
    chat.conversation.load(path)
    chat.print_notes()
    chat.save_in_new_file()
    read = f", of which the first {unsent} are not sent any more" if (unsent := chat.conversation.unsent) else ""
    message = f"loaded {len(chat.conversation.messages)} messages from {path}{read}; /show messages shows them"
    print_indented(console, message)


@partial(
    SlashCommand, "/file", "PATH [TEXT]", "put a text file or an image in front of the next message", takes_path=True
)
def attach_file(chat: ChatSession, argument: str, console: Console) -> Question | None:
    """/file PATH: send the file with the next message, or immediately if a question follows the path."""
    path, question = _split_path(argument)
    if not path:
        raise InvalidRequest(f"/file needs a path; files that wait for the next message: {_attached_names(chat)}")
    return _attach_or_ask(chat, read_attachment(path, chat.why_no_images), question, console)


@partial(SlashCommand, "/image", "PATH [TEXT]", "show an image with the next message", takes_path=True)
def attach_image(chat: ChatSession, argument: str, console: Console) -> Question | None:
    """/image PATH: show the image with the next message, or immediately if a question follows the path."""
    path, question = _split_path(argument)
    if chat.why_no_images:
        raise InvalidRequest(f"no image can be shown: {chat.why_no_images}")
    if not path:
        raise InvalidRequest(f"/image needs a path; files that wait for the next message: {_attached_names(chat)}")
    return _attach_or_ask(chat, read_image(path), question, console)


def attach(chat: ChatSession, file: Attachment, console: Console, *, is_asked: bool = False) -> None:
    """Attach a file to the next message. Say so, unless that message is asked right now (`is_asked`)."""
    print_file_size(chat, file, console)
    chat.attached_files.append(file)
    if not is_asked:
        print_indented(console, f"{'its text' if isinstance(file, AttachedFile) else 'it'} goes with the next message")


def _attach_or_ask(chat: ChatSession, file: Attachment, question: str, console: Console) -> Question | None:
    """Return a question about a file. If nothing is asked, attach the file to the next message and return None."""
    if not question:
        attach(chat, file, console)
        return None
    print_file_size(chat, file, console)
    waiting_files, chat.attached_files = tuple(chat.attached_files), []
    typed_text = f"{format_mention(file)} {question}"
    return add_files(Question(question, typed_text=typed_text, attached_files=waiting_files), [*waiting_files, file])


def _attached_names(chat: ChatSession) -> str:
    return ", ".join(str(each.path) for each in chat.attached_files) or "none"


def _split_path(argument: str) -> tuple[str, str]:
    """Split an argument into a path and a question. The path is in quotes, or the whole argument if it names a file, or
    the first word. Blanks in a path may have a backslash before them, as terminals write the path of a dropped file.
    """
    text = argument.strip()
    if text[:1] in ('"', "'") and text.find(text[0], 1) > 0:
        path, _, question = text[1:].partition(text[0])
        return path, question.strip()
    if text and os.path.exists(os.path.expanduser(text)):
        return text, ""
    word = re.match(r"(?:\\.|\S)*", text)[0]  # type: ignore[index]  # it always matches
    return re.sub(r"\\(.)", r"\1", word), text[len(word) :].strip()


def print_file_size(chat: ChatSession, file: Attachment, console: Console) -> None:
    """Print a file's size: `notes.txt: 120 lines, 4.1 KiB, 1,034 tokens`, or `photo.jpg: 1,024 x 768, 768 tokens`.
    Raises InvalidRequest if it can never fit, or if it is an image that cannot be shown.
    """
    if isinstance(file, AttachedImage):
        try:
            width, height = read_size(file.data)
            tokens, size = chat.engine.check_image(file.data), f"{width:,} x {height:,}"
        except InvalidRequest as error:
            raise InvalidRequest(f"{file.path}: {error}") from None
    else:
        lines = len(file.text.splitlines())
        size = f"{lines:,} line{'s' * (lines != 1)}, {format_bytes(len(file.text.encode()))}"
        tokens = len(chat.engine.encode(file.text))
    if tokens >= chat.engine.longest_request:
        raise InvalidRequest(
            f"{file.path} has {tokens:,} tokens, more than {describe_limit(chat.engine)}. "
            f"{room_advice(chat.engine, tokens)}"
        )
    print_indented(console, f"+ {file.path}: {size}, {tokens:,} tokens")


def format_mention(file: Attachment) -> str:
    """Return `@path`, in quotes if the path has spaces."""
    return f'@"{file.path}"' if " " in str(file.path) else f"@{file.path}"


_SHOWN = 20


@partial(SlashCommand, "/chats", "[WORD]", "the saved chats, or those with WORD")
def list_chats(chat: ChatSession, argument: str, console: Console) -> None:
    """/chats [WORD]: list the newest saved chats, or those with the word in their names or texts."""
    names = [path.stem for path in matching_chats(argument)] if argument else saved_names()
    current_name = chat.saver.path.stem if chat.saver is not None and chat.saver.path is not None else None
    for name in names[:_SHOWN]:
        print_rows(console, [(f" {'*' if name == current_name else ' '}", to_single_line(name))], 3)
    if not names:
        return print_indented(console, "no chats are saved yet")
    if len(names) > _SHOWN:
        print_indented(console, f"and {len(names) - _SHOWN:,} older: /chats WORD finds them")
    print_indented(console, adapt_commands("/load NAME continues one; `cortexmlx chats` renames and deletes them"))
