"""The slash commands of a chat."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cortexmlx.cli.chat.kept import find
from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chat.slash import engine
from cortexmlx.cli.chat.variables import checked
from cortexmlx.cli.options import json_or_text
from cortexmlx.errors import ConversationFileError, InvalidRequest
from cortexmlx.messages import THINKING
from cortexmlx.request import SamplingParams
from cortexmlx.sessions.saved import Saved

SETTINGS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
SHORT = {"temp": "temperature"}


class Leave(Exception):
    """The user wants to go."""


@dataclass(frozen=True)
class Command:
    """A command: `run(chat, argument, console)` may return a question to be answered next."""

    name: str
    aliases: tuple[str, ...]
    usage: str
    meaning: str
    run: Callable[[ChatSession, str, Console], Question | None]


def run_command(line: str, chat: ChatSession, console: Console) -> Question | None:
    """Carry out `line`, which begins with a slash. Raises InvalidRequest if there is no such command."""
    name, _, argument = line.partition(" ")
    command = BY_NAME.get(name)
    if command is None:
        near = difflib.get_close_matches(name, BY_NAME, n=1)
        hint = f"did you mean {near[0]}?" if near else "/help lists them"
        raise InvalidRequest(f"no command {name}: {hint} (a message that begins with a slash: write two)")
    return command.run(chat, argument.strip(), console)


def completions() -> list[tuple[str, str]]:
    """Names and meanings for the input line."""
    return [(command.name, command.meaning) for command in COMMANDS]


def _help(chat: ChatSession, argument: str, console: Console) -> None:
    for command in COMMANDS:
        names = ", ".join((command.usage, *command.aliases))
        console.print(f"  {names:<32}{command.meaning}", markup=False)
    console.print('  """ begins and ends a message of several lines; so does Alt-Enter for each line', markup=False)
    console.print("  Ctrl-C stops an answer or clears the line, twice it leaves; so does Ctrl-D")


def _clear(chat: ChatSession, argument: str, console: Console) -> None:
    chat.conversation.clear()
    chat.begin_anew()
    console.print("  the conversation is empty again", style="dim")


def _system(chat: ChatSession, argument: str, console: Console) -> None:
    if argument:
        chat.conversation.system = None if argument == "none" else argument
    console.print(f"  system prompt: {chat.conversation.system or 'none'}", style="dim", markup=False)


def _set(chat: ChatSession, argument: str, console: Console) -> None:
    name, _, value = argument.replace("=", " ").partition(" ")
    variable = THINKING if name == "think" else name
    if variable in (THINKING, *chat.engine.info.template_vars):
        _set_variable(chat, variable, value.strip())
    elif name:
        chat.params = _changed(chat.params, SHORT.get(name, name), value.strip())
    for variable, set_to in chat.conversation.template_vars.items():
        console.print(f"  {variable:<20}{json.dumps(set_to)}", style="dim", markup=False)
    for setting in SETTINGS:
        console.print(f"  {setting:<20}{getattr(chat.params, setting)}", style="dim", markup=False)


def _set_variable(chat: ChatSession, name: str, value: str) -> None:
    """A variable of the chat template: JSON or text, on and off; `none` leaves it to the template."""
    others = {known: set_to for known, set_to in chat.conversation.template_vars.items() if known != name}
    meant = {"on": True, "off": False}.get(value, json_or_text(value))
    variables = others if value in ("", "none") else {**others, name: meant}
    chat.conversation.template_vars = checked(chat.engine, variables)


def _changed(params: SamplingParams, name: str, value: str) -> SamplingParams:
    if name not in SETTINGS:
        raise InvalidRequest(f"no setting {name!r}: {', '.join(SETTINGS)}, think, and what the chat template reads")
    default = next(f.default for f in fields(SamplingParams) if f.name == name)
    whole = isinstance(default, int) or name == "seed"
    try:
        number = None if value == "none" else int(value) if whole else float(value)
    except ValueError:
        raise InvalidRequest(f"{name} is {value!r}, but must be a{' whole' * whole} number") from None
    given: dict[str, Any] = {name: number}
    changed = replace(params, **given)
    changed.validate()
    return changed


def _save(chat: ChatSession, argument: str, console: Console) -> None:
    if not argument:
        kept = chat.keeper.path if chat.keeper is not None else None
        raise InvalidRequest("/save needs a file name" + (f"; the chat is kept in {kept} anyway" if kept else ""))
    path = Path(os.path.expanduser(argument))
    if os.path.exists(path):
        _check_saved(path)
    chat.conversation.save(path)
    console.print(f"  saved {len(chat.conversation.messages)} messages to {path}", style="dim", markup=False)


def _check_saved(path: Path) -> None:
    """Raise InvalidRequest if a file holds something else than a conversation, which would be lost."""
    try:
        Saved.read(path)
    except ConversationFileError as error:
        raise InvalidRequest(f"{error}; /save writes over nothing but saved conversations: name another file") from None


def _load(chat: ChatSession, argument: str, console: Console) -> None:
    if not argument:
        raise InvalidRequest("/load needs a file, or the name of a chat that was kept")
    path = find(argument)
    chat.conversation.load(path)
    chat.begin_anew()
    console.print(f"  loaded {len(chat.conversation.messages)} messages from {path}", style="dim", markup=False)


def _undo(chat: ChatSession, argument: str, console: Console) -> None:
    taken = "\n".join(str(message.get("content", "")) for message in chat.conversation.undo())
    chat.keep()
    said = f"took back: {(taken.splitlines() or [''])[0]}" if taken else "there is nothing to take back"
    console.print(f"  {said}", style="dim", markup=False)


def _regen(chat: ChatSession, argument: str, console: Console) -> Question:
    question = _last_question(chat, "there is no answer to write again")
    if chat.params.temperature == 0:
        console.print("  the same again, at temperature 0: /set temp 0.7 for another answer", style="dim")
    return Question(question, again=True)


def _edit(chat: ChatSession, argument: str, console: Console) -> Question:
    question = _last_question(chat, "there is no question to change")
    if not argument:
        raise InvalidRequest(f"/edit needs the new text of the last question, which was: {question}")
    return Question(argument, again=True)


def _last_question(chat: ChatSession, without: str) -> str:
    asked = [message.get("content", "") for message in chat.conversation.messages if message["role"] == "user"]
    if not asked:
        raise InvalidRequest(without)
    return str(asked[-1])


def _tokens(chat: ChatSession, argument: str, console: Console) -> None:
    used, context = chat.conversation.tokens, chat.engine.info.context_length
    if (stats := chat.engine.stats()).keep_last:
        kept = f"the model sees the first {stats.keep_first:,} and at least the newest {stats.keep_last:,}"
        console.print(f"  {used:,} tokens, of which {kept}", style="dim")
        return
    console.print(f"  {used:,} of {context:,} tokens of context ({used / context:.0%})", style="dim")


def _exit(chat: ChatSession, argument: str, console: Console) -> None:
    raise Leave


COMMANDS = (
    Command("/help", ("/?",), "/help", "this list", _help),
    Command("/clear", ("/reset",), "/clear", "forget the conversation", _clear),
    Command("/system", (), "/system [TEXT]", "show or change the system prompt (none: no such prompt)", _system),
    Command("/set", (), "/set [NAME VALUE]", "show or change settings: /set temp 0.7, /set think off", _set),
    Command("/regen", (), "/regen", "write the last answer again", _regen),
    Command("/undo", (), "/undo", "take the last turn back", _undo),
    Command("/edit", (), "/edit TEXT", "ask the last question in other words", _edit),
    Command("/save", (), "/save FILE", "write the conversation to a file", _save),
    Command("/load", (), "/load FILE|NAME", "go on with a saved conversation, or one that was kept", _load),
    Command("/tokens", (), "/tokens", "how much of the context is used", _tokens),
    Command("/stats", (), "/stats", "memory, steps and times of the engine", engine.stats),
    Command("/blocks", (), "/blocks [live]", "a picture of the KV blocks, now or below each answer", engine.blocks),
    Command("/exit", ("/quit", "/bye"), "/exit", "leave", _exit),
)
BY_NAME = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
