"""The slash commands of a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, Draft, Question
from cortexmlx.cli.chat.slash import chats, engine, files, models, settings, turns
from cortexmlx.cli.chat.slash.thoughts import FOLD, SHOW, thoughts
from cortexmlx.cli.chat.typed.completion import Vocabulary
from cortexmlx.cli.terminal.console import print_indented, print_rows
from cortexmlx.cli.terminal.limits import limit


class Leave(Exception):
    """The user wants to go."""


@dataclass(frozen=True)
class Command:
    """A command: `run(chat, argument, console)` may return what is to be answered next, or a draft of it.

    `text_after` are the beginnings of arguments that may have several lines; with others it is no command then.
    """

    name: str
    aliases: tuple[str, ...]
    usage: str
    meaning: str
    run: Callable[[ChatSession, str, Console], Question | Draft | None]
    text_after: tuple[str, ...] = ()


def vocabulary(kept: Callable[[], Sequence[str]]) -> Vocabulary:
    """What Tab offers; `kept` are the names of chats that were kept."""
    return Vocabulary(
        tuple((command.name, command.meaning) for command in COMMANDS),
        {
            "/set": settings.names,
            "/show": lambda: models.TOPICS,
            "/model": models.model_names,
            "/load": kept,
            "/thoughts": lambda: (FOLD, SHOW),
            "/help": lambda: [command.name for command in COMMANDS],
        },
        frozenset({"/file", "/load", "/save"}),
        {"/load": "kept chat"},
    )


def _help(chat: ChatSession, argument: str, console: Console) -> None:
    wanted = [c for c in COMMANDS if not argument or f"/{argument.removeprefix('/')}" in (c.name, *c.aliases)]
    names = ("  " + ", ".join((command.usage, *command.aliases)) for command in wanted or COMMANDS)
    print_rows(console, zip(names, (command.meaning for command in wanted or COMMANDS), strict=True), 26, "")
    if not argument:
        print_rows(console, KEYS, 26, "")


KEYS = (
    ('  """', "typed, begins and ends a message of several lines; a paste is one message"),
    ("  Alt-Enter, Ctrl-J", "a new line"),
    ("  @path in a message", "puts the text of that file in front of it; Tab completes"),
    ("  Up, Ctrl-R", "what was typed before; Ctrl-R searches it"),
    ("  Ctrl-X Ctrl-E", "the message in your $EDITOR"),
    ("  Ctrl-T", "shows and hides the KV blocks below an answer while it is written"),
    ("  Ctrl-C", "stops an answer or clears the line, twice it leaves"),
    ("  Ctrl-Z", "stops the program, and fg goes on with it"),
    ("  Ctrl-D", "leaves"),
    ("  a blank in front", "makes a command a message"),
)


def _clear(chat: ChatSession, argument: str, console: Console) -> None:
    kept = chat.keeper.kept.stem if chat.keeper is not None and chat.keeper.kept is not None else None
    chat.conversation.clear()
    chat.attached.clear()
    chat.begin_anew()
    said = "the conversation is empty again" + (f"; what was said is kept as {kept}" if kept else "")
    print_indented(console, said)


def _tokens(chat: ChatSession, argument: str, console: Console) -> None:
    used, fits = chat.conversation.tokens, chat.engine.longest_request
    if (stats := chat.engine.stats()).keep_last:
        kept = f"the model sees the first {stats.keep_first:,} and at least the newest {stats.keep_last:,}"
        print_indented(console, f"{used:,} tokens, of which {kept}")
        return
    print_indented(console, f"{used:,} tokens ({used / fits:.0%}) of {limit(chat.engine)}")
    if chat.conversation.unread:
        left_out = f"the {chat.conversation.unread} oldest messages are not read any more, and not counted"
        print_indented(console, left_out)


def _exit(chat: ChatSession, argument: str, console: Console) -> None:
    raise Leave


COMMANDS = (
    Command("/help", ("/?",), "/help", "this list", _help),
    Command("/clear", ("/reset",), "/clear", "forget the conversation", _clear),
    Command("/undo", (), "/undo", "take the last turn back", turns.undo),
    Command("/regen", (), "/regen", "write the last answer again", turns.regen),
    Command("/edit", (), "/edit [TEXT]", "change the last question: here, or to TEXT", turns.edit, ("",)),
    Command(
        "/n", (), "/n 3 [TEXT]", "several answers side by side, of which one goes on", turns.several, tuple("23456789")
    ),
    Command("/file", (), "/file PATH [TEXT]", "put a text file in front of the next message", files.file),
    Command(
        "/system",
        (),
        "/system [TEXT]",
        "show or change the system prompt (none: no such prompt)",
        settings.system,
        ("",),
    ),
    Command(
        "/set",
        (),
        "/set [NAME VALUE]",
        "show or change settings: /set temp 0.7, /set think off",
        settings.change,
        ("system",),
    ),
    Command("/model", (), "/model [NAME]", "show the models, or go on with another", models.model),
    Command("/show", (), "/show [TOPIC]", f"the model and the chat: {', '.join(models.TOPICS[:4])}", models.show),
    Command("/save", (), "/save FILE", "write the conversation to a file; .md: to read", files.save),
    Command("/load", (), "/load FILE|NAME", "go on with a file of messages, or a chat that was kept", files.load),
    Command("/chats", (), "/chats [WORD]", "the chats that are kept, or those with WORD in their names", chats.chats),
    Command("/tokens", (), "/tokens", "how much of the context is used", _tokens),
    Command("/stats", (), "/stats", "memory, steps and times of the engine", engine.stats),
    Command("/blocks", (), "/blocks [live]", "a picture of the KV blocks, now or below each answer", engine.blocks),
    Command("/thoughts", (), "/thoughts [fold|show]", "the last thoughts; fold or show those to come", thoughts),
    Command("/exit", ("/quit", "/bye"), "/exit", "leave", _exit),
)
BY_NAME = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
