"""/set and /system: sampling, the system prompt, the figures below answers, and KV memory."""

from __future__ import annotations

import difflib
import json
import shlex
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from cortexmlx.cli.chat.quotes import strip_quotes
from cortexmlx.cli.chat.session import ChatSession, FigureDisplay
from cortexmlx.cli.chat.slash.command import SlashCommand
from cortexmlx.cli.files.schema_file import parse_schema_option
from cortexmlx.cli.prompts import check_variables, parse_json_or_text
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

UNSUPPORTED_NAMES = {
    "num_ctx": "the context is the model's own; /set kv_memory says how much of it has memory",
    "history": "lines are remembered unless the chat begins with --no-history",
    "nohistory": "begin the chat with --no-history",
    "wordwrap": "lines are always wrapped at words",
    "nowordwrap": "lines are always wrapped at words",
    "template": "the chat template is that of the model's files",
}

NAMES_WITH_VALUE = {"nothink": ("think", "off"), "noformat": ("schema", "none")}
"""Names in ollama that say a setting and its value."""

COLUMN = 35
"""The column at which the meanings of settings begin."""


def setting_names() -> list[str]:
    """Return the names that /set accepts, for completion."""
    return [*SAMPLING, *ENGINE, "system", "think", *(each.value for each in FigureDisplay)]


@partial(
    SlashCommand,
    "/set",
    "[NAME VALUE]",
    "show or change settings: /set temp 0.7, /set think off",
    complete_values=setting_names,
    multiline=("system",),
)
def change_setting(chat: ChatSession, argument: str, console: Console) -> None:
    """/set: print all settings, or change one."""
    name, value = _split_setting(argument)
    if name == "parameter":  # the form that ollama uses
        change_setting(chat, value, console)
        return
    if name == "system":
        set_system_prompt(chat, value, console)
        return
    if name in ("verbose", "quiet", "usual"):
        chat.figures = FigureDisplay(name)
        return print_indented(console, f"figures below an answer: {name}")
    name, value = NAMES_WITH_VALUE.get(name, (OTHER_NAMES.get(name, name), value))
    if not name:
        _print_variables(chat, console)
        return _print_settings(chat, console, [*SAMPLING, *(ENGINE if chat.replaceable is not None else ())])
    if (variable := THINKING if name == "think" else name) in (THINKING, *chat.engine.info.template_vars):
        _set_template_variable(chat, variable, value or ("on" if name == "think" else ""))
        return _print_variables(chat, console)
    if name not in SAMPLING and name not in ENGINE:
        raise InvalidRequest(_unknown_setting_error(name))
    if value and name in SAMPLING:
        chat.params = _with_setting(chat.params, name, value)
    elif value:
        _reopen_engine(chat, name, value, console)
    _print_settings(chat, console, [name])


def _split_setting(argument: str) -> tuple[str, str]:
    """Split `NAME VALUE` or `NAME=VALUE` into the name and the value. A value may contain an equals sign."""
    first, _, rest = argument.strip().partition(" ")
    name, _, value_start = first.partition("=")
    value = f"{value_start} {rest}".strip()
    return name, value if value_start else value.removeprefix("=").lstrip()


@partial(SlashCommand, "/system", "[TEXT]", "show or change the system prompt (none: no such prompt)", multiline=("",))
def set_system_prompt(chat: ChatSession, argument: str, console: Console) -> None:
    """/system: print or change the system prompt."""
    if argument:
        text = strip_quotes(argument)
        text = text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text
        chat.conversation.system = None if text in ("none", "") else text
        chat.save()
    print_indented(console, f"system prompt: {chat.conversation.system or 'none'}")


def _set_template_variable(chat: ChatSession, name: str, value: str) -> None:
    """Set a chat template variable to JSON or text; on and off are booleans. `none` restores the template's default."""
    other_variables = {key: set_to for key, set_to in chat.conversation.template_vars.items() if key != name}
    parsed_value = {"on": True, "off": False}.get(value, parse_json_or_text(value))
    variables = other_variables if value in ("", "none") else {**other_variables, name: parsed_value}
    chat.conversation.template_vars = check_variables(chat.engine, variables)
    chat.save()


def _print_variables(chat: ChatSession, console: Console) -> None:
    """Print the chat template's variables that are set."""
    for name, value in chat.conversation.template_vars.items():
        _print_row(console, f"  {name:<20}{json.dumps(value)}", "of the chat template")


def _print_settings(chat: ChatSession, console: Console, names: list[str]) -> None:
    """Print the values and meanings of these settings."""
    for name in names:
        if name == "schema":
            value: Any = _form_summary(chat.params)
        elif name in SAMPLING:
            value = getattr(chat.params, name)
            value = " ".join(json.dumps(text, ensure_ascii=False) for text in value) if name == "stop" else value
        else:
            value = _engine_option_value(chat, name)
        value_text = "none" if value is None or value == "" else value
        _print_row(console, f"  {name:<20}{value_text}", (SAMPLING | ENGINE)[name])


def _print_row(console: Console, label: str, meaning: str) -> None:
    """Print a setting and its meaning in two columns."""
    print_rows(console, [(label, meaning)], max(COLUMN, len(label) + 1))


def _engine_option_value(chat: ChatSession, name: str) -> object:
    if name == "kv_memory":
        return format_bytes(chat.engine.stats().kv_bytes_limit)
    return None if chat.replaceable is None else getattr(chat.replaceable.config, name)


def _unknown_setting_error(name: str) -> str:
    """Return the error text for an unknown setting, with the most similar one."""
    if name in UNSUPPORTED_NAMES:
        return f"/set {name}: {UNSUPPORTED_NAMES[name]}"
    similar_names = difflib.get_close_matches(name, [*SAMPLING, *ENGINE, *OTHER_NAMES], n=1)
    hint = (
        f"did you mean {similar_names[0]}?"
        if similar_names
        else f"there are {', '.join([*SAMPLING, *ENGINE])}, think, and what the chat template reads"
    )
    return f"no setting {name!r}: {hint}"


def _form_summary(params: SamplingParams) -> str | None:
    """Return the structured output form in one line; None for free text."""
    if params.form is None:
        return None
    text = params.form.definition
    return text if len(text) <= 60 else f"{text[:57]}..."


def _with_setting(params: SamplingParams, name: str, value: str) -> SamplingParams:
    """Return the parameters with one setting parsed from its text."""
    if name == "schema":
        schema = value.removeprefix("--open-schema ")
        form = None if value == "none" else parse_schema_option(schema, is_open=schema != value)
        return replace(params, structured=form)
    parsed_value: Any
    if name == "stop":
        parsed_value = () if value == "none" else _split_quoted(value)
    elif value == "none":
        parsed_value = None
    else:
        parsed_value = _parse_number(name, value, is_whole=NUMBERS[name].whole)
    return replace(params, **{name: parsed_value})


def _split_quoted(value: str) -> tuple[str, ...]:
    """Split a value into its quoted texts."""
    try:
        return tuple(text.encode().decode("unicode_escape") if text.isascii() else text for text in shlex.split(value))
    except ValueError as error:
        raise InvalidRequest(f'stop is {value}: write each text in quotes, like "END" ({error})') from None


def _parse_number(name: str, value: str, *, is_whole: bool) -> float:
    """Parse a number. Raises InvalidRequest if the value is not one."""
    try:
        return int(value) if is_whole else float(value)
    except ValueError:
        raise InvalidRequest(f"{name} is {value!r}, but must be a{' whole' * is_whole} number") from None


def _reopen_engine(chat: ChatSession, name: str, value: str, console: Console) -> None:
    """Open the engine again with a changed option."""
    if chat.replaceable is None:
        raise InvalidRequest(f"this chat cannot change {name}")
    changes: dict[str, Any] = {name: None}
    if value != "none":
        changes[name] = parse_size(value) if name == "kv_memory" else _parse_number(name, value, is_whole=True)
    if name == "keep_last" and value == "none":
        changes["keep_first"] = None
    if name == "kv_bits" and value == "none":
        changes["kv_group_size"] = None
    config: EngineConfig = replace(chat.replaceable.config, **changes)
    print_indented(console, "the model is loaded again with this setting; the chat continues")
    chat.switch_engine(config)
