"""/set and /system: sampling, the system prompt, the figures below answers, and KV memory."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from cortexmlx.cli.chat.quotes import unquoted
from cortexmlx.cli.chat.session import ChatSession, Figures
from cortexmlx.cli.chat.slash.command import Command
from cortexmlx.cli.files.schema_file import form_of_schema
from cortexmlx.cli.prompts import checked, json_or_text
from cortexmlx.cli.terminal.console import print_indented, print_rows
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes, parse_size
from cortexmlx.types.messages import THINKING
from cortexmlx.types.sampling_params import NUMBERS, SamplingParams

_NUMBERS = {name: number.setting for name, number in NUMBERS.items() if number.setting and name != "seed"}
_PENALTIES = list(_NUMBERS)[list(_NUMBERS).index("repetition_penalty") :]

SAMPLING = {
    **{name: meaning for name, meaning in _NUMBERS.items() if name not in _PENALTIES},
    "seed": NUMBERS["seed"].setting,
    **{name: _NUMBERS[name] for name in _PENALTIES},
    "stop": "texts that end an answer, in quotes; none: no such text",
    "schema": "answers in JSON: a schema, its file, or json for any; none: free text",
}
"""Settings in `SamplingParams`, with their meanings."""

ENGINE = {
    "kv_memory": "for keys and values, like 4GB",
    "kv_bits": "8 or 4: keys and values of so many bits; none: the model's",
    "keep_first": "with keep_last: the first so many tokens stay, too",
    "keep_last": "texts outgrow the context: their newest so many tokens stay; none: they do not",
}
"""Settings in `EngineConfig`, with their meanings. A change opens the engine again."""

OTHER_NAMES = {
    "temp": "temperature",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context",
    "format": "schema",
    "num_keep": "keep_first",
}
"""Names of settings in ollama and other programs."""

NOT_HERE = {
    "num_ctx": "the context is the model's own; /set kv_memory says how much of it has memory",
    "history": "lines are remembered unless the chat begins with --no-history",
    "nohistory": "begin the chat with --no-history",
    "wordwrap": "lines are always wrapped at words",
    "nowordwrap": "lines are always wrapped at words",
    "template": "the chat template is that of the model's files",
}

WITH_VALUE = {"nothink": ("think", "off"), "noformat": ("schema", "none")}
"""Names in ollama that say a setting and its value."""

COLUMN = 35
"""The column at which the meanings of settings begin."""


def names() -> list[str]:
    """Return the names that /set takes, for completion."""
    return [*SAMPLING, *ENGINE, "system", "think", *(each.value for each in Figures)]


@partial(
    Command,
    "/set",
    "[NAME VALUE]",
    "show or change settings: /set temp 0.7, /set think off",
    values=names,
    multiline=("system",),
)
def change(chat: ChatSession, argument: str, console: Console) -> None:
    """/set: show all settings, or change one."""
    name, value = _parted(argument)
    if name == "parameter":  # the form that ollama uses
        change(chat, value, console)
        return
    if name == "system":
        system(chat, value, console)
        return
    if name in ("verbose", "quiet", "usual"):
        chat.figures = Figures(name)
        return print_indented(console, f"figures below an answer: {name}")
    name, value = WITH_VALUE.get(name, (OTHER_NAMES.get(name, name), value))
    if not name:
        _show_variables(chat, console)
        return _show(chat, console, [*SAMPLING, *(ENGINE if chat.host is not None else ())])
    if (variable := THINKING if name == "think" else name) in (THINKING, *chat.engine.info.template_vars):
        _set_variable(chat, variable, value or ("on" if name == "think" else ""))
        return _show_variables(chat, console)
    if name not in SAMPLING and name not in ENGINE:
        raise InvalidRequest(_unknown(name))
    if value and name in SAMPLING:
        chat.params = _changed(chat.params, name, value)
    elif value:
        _reopen(chat, name, value, console)
    _show(chat, console, [name])


def _parted(argument: str) -> tuple[str, str]:
    """Return the name and the value of `NAME VALUE` or `NAME=VALUE`. A value may contain an equals sign."""
    first, _, rest = argument.strip().partition(" ")
    name, _, begun = first.partition("=")
    value = f"{begun} {rest}".strip()
    return name, value if begun else value.removeprefix("=").lstrip()


@partial(Command, "/system", "[TEXT]", "show or change the system prompt (none: no such prompt)", multiline=("",))
def system(chat: ChatSession, argument: str, console: Console) -> None:
    """/system: show or change the system prompt."""
    if argument:
        text = unquoted(argument)
        text = text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text
        chat.conversation.system = None if text in ("none", "") else text
        chat.keep()
    print_indented(console, f"system prompt: {chat.conversation.system or 'none'}")


def _set_variable(chat: ChatSession, name: str, value: str) -> None:
    """Set a variable of the chat template to JSON or text; on and off are booleans. `none` leaves it to the
    template.
    """
    others = {known: set_to for known, set_to in chat.conversation.template_vars.items() if known != name}
    meant = {"on": True, "off": False}.get(value, json_or_text(value))
    variables = others if value in ("", "none") else {**others, name: meant}
    chat.conversation.template_vars = checked(chat.engine, variables)
    chat.keep()


def _show_variables(chat: ChatSession, console: Console) -> None:
    for name, value in chat.conversation.template_vars.items():
        _row(console, f"  {name:<20}{json.dumps(value)}", "of the chat template")


def _show(chat: ChatSession, console: Console, wanted: list[str]) -> None:
    for name in wanted:
        if name == "schema":
            value: Any = _shown_form(chat.params)
        elif name in SAMPLING:
            value = getattr(chat.params, name)
            value = " ".join(json.dumps(text, ensure_ascii=False) for text in value) if name == "stop" else value
        else:
            value = _of_engine(chat, name)
        shown = "none" if value is None or value == "" else value
        _row(console, f"  {name:<20}{shown}", (SAMPLING | ENGINE)[name])


def _row(console: Console, label: str, meaning: str) -> None:
    print_rows(console, [(label, meaning)], max(COLUMN, len(label) + 1))


def _of_engine(chat: ChatSession, name: str) -> object:
    if name == "kv_memory":
        return format_bytes(chat.engine.stats().kv_bytes_limit)
    return None if chat.host is None else getattr(chat.host.config, name)


def _unknown(name: str) -> str:
    if name in NOT_HERE:
        return f"/set {name}: {NOT_HERE[name]}"
    near = difflib.get_close_matches(name, [*SAMPLING, *ENGINE, *OTHER_NAMES], n=1)
    hint = (
        f"did you mean {near[0]}?"
        if near
        else f"there are {', '.join([*SAMPLING, *ENGINE])}, think, and what the chat template reads"
    )
    return f"no setting {name!r}: {hint}"


def _shown_form(params: SamplingParams) -> str | None:
    """Return the form of answers in one line; None if they are free."""
    if params.form is None:
        return None
    text = params.form.definition
    return text if len(text) <= 60 else f"{text[:57]}..."


def _changed(params: SamplingParams, name: str, value: str) -> SamplingParams:
    if name == "schema":
        schema = value.removeprefix("--open-schema ")
        form = None if value == "none" else form_of_schema(schema, is_open=schema != value)
        return replace(params, structured=form)
    given: Any
    if name == "stop":
        given = () if value == "none" else _quoted(value)
    elif value == "none":
        given = None
    else:
        given = _number(name, value, whole=NUMBERS[name].whole)
    return replace(params, **{name: given})


def _quoted(value: str) -> tuple[str, ...]:
    try:
        return tuple(text.encode().decode("unicode_escape") if text.isascii() else text for text in shlex.split(value))
    except ValueError as error:
        raise InvalidRequest(f'stop is {value}: write each text in quotes, like "END" ({error})') from None


def _number(name: str, value: str, *, whole: bool) -> float:
    try:
        return int(value) if whole else float(value)
    except ValueError:
        raise InvalidRequest(f"{name} is {value!r}, but must be a{' whole' * whole} number") from None


def _reopen(chat: ChatSession, name: str, value: str, console: Console) -> None:
    """Open the engine again with a changed option."""
    if chat.host is None:
        raise InvalidRequest(f"this chat cannot change {name}")
    given: Callable[[], Any] = lambda: parse_size(value) if name == "kv_memory" else _number(name, value, whole=True)  # noqa: E731
    changes: dict[str, Any] = {name: None if value == "none" else given()}
    if name == "keep_last" and value == "none":
        changes["keep_first"] = None
    if name == "kv_bits" and value == "none":
        changes["kv_group_size"] = None
    config: EngineConfig = replace(chat.host.config, **changes)
    print_indented(console, "the model is loaded again with this setting; the chat continues")
    chat.move(config)
