"""Generate the page docs/cli.md from the commands themselves: `python -m cortexmlx.cli.reference > docs/cli.md`.

It reads the functions and their annotations. It does not read what typer makes of them, which differs between versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, get_args

import typer
from typer.models import ArgumentInfo, OptionInfo

from cortexmlx.cli.app import COMMANDS, EXAMPLES, SUBCOMMANDS, global_options
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import BROKEN_PIPE, FAILED, INTERRUPTED

HEAD = """\
# The command line

Results go to stdout, everything else to stderr. `-h` or `--help` after a command says what stands here. Made by
`python -m cortexmlx.cli.reference > docs/cli.md`.

`cortexmlx [options] command`
"""

COMPLETION = """\
`--install-completion` and `--show-completion` are for the completion of commands and options in a shell."""

SHARED_HEAD = """\
## Options of several commands

The table of a command says which of these it has, and its default where commands differ."""

_ENOUGH = 3
"""An option that means the same in so many commands is explained once."""

EXIT_CODES = f"""\
## Exit codes

| code | |
|---:|---|
| 0 | all is well |
| {FAILED} | it failed: one line on stderr says why and what to do; `--debug` shows where |
| 2 | wrong usage |
| {INTERRUPTED} | Ctrl-C |
| {BROKEN_PIPE} | nobody reads the output any more |"""


def reference_page() -> str:
    """Return the whole page, in Markdown."""
    parts = [HEAD, *_option_rows(global_options, {}), "", COMPLETION, "", *_paragraphs(EXAMPLES)]
    shared = _shared_options()
    for name, command, _ in COMMANDS:
        parts += ["", f"## cortexmlx {name}", "", *_command_section(name, command, shared)]
        for parent, child_name, child, _ in SUBCOMMANDS:
            if parent == name:
                title = f"{name} {child_name}"
                parts += ["", f"### cortexmlx {title}", "", *_command_section(title, child, shared)]
    rows = [f"| {names} | {default or ''} | {meaning} |" for names, (default, meaning) in shared.items()]
    return (
        "\n".join([*parts, "", SHARED_HEAD, "", "| option | default | |", "|---|---|---|", *rows, "", EXIT_CODES])
        + "\n"
    )


_Shared = dict[str, tuple[str | None, str]]
"""The options of several commands, by their names: the default, None where commands differ, and the meaning."""


def _shared_options() -> _Shared:
    """Return the options that mean the same in several commands."""
    options = [option for _, command, _ in COMMANDS for option in _annotated_parameters(command)]
    defaults: dict[tuple[str, str], list[str]] = {}
    for names, default, meaning in (_option_texts(*each) for each in options if isinstance(each[1], OptionInfo)):
        defaults.setdefault((names, meaning), []).append(default)
    return {
        names: (default_texts[0] if len(set(default_texts)) == 1 else None, meaning)
        for (names, meaning), default_texts in defaults.items()
        if len(default_texts) >= _ENOUGH
    }


def _command_section(name: str, command: Callable[..., None], shared: _Shared) -> Iterator[str]:
    arguments = [(p, info) for p, info in _annotated_parameters(command) if isinstance(info, ArgumentInfo)]
    shapes = [str(info.metavar) if p.default is p.empty else f"[{info.metavar}]" for p, info in arguments]
    words = sorted([*shapes, "[options]"], key=lambda word: word.startswith("[--"))  # the options come before --
    yield f"`{' '.join(['cortexmlx', name, *words])}`"
    yield ""
    yield from _paragraphs(command.__doc__ or "")
    yield ""
    for shape, (_, info) in zip(shapes, arguments, strict=True):
        yield f"`{shape}`: {info.help}"
        yield ""
    yield from _option_rows(command, shared)


def _option_rows(command: Callable[..., None], shared: _Shared) -> Iterator[str]:
    """Yield a command's table rows. Shared options share one row, unless their default is the command's own."""
    yield "| option | default | |"
    yield "|---|---|---|"
    shared_names = []
    for parameter, info in _annotated_parameters(command):
        if isinstance(info, OptionInfo):
            names, default, meaning = _option_texts(parameter, info)
            shared_default, shared_meaning = shared.get(names, (None, None))
            if shared_meaning != meaning:
                yield f"| {names} | {default} | {meaning} |"
            elif shared_default != default:
                yield f"| {names} | {default} | |"
            else:
                shared_names.append(names)
    if shared_names:
        yield f"| {', '.join(shared_names)} | | [meaning](#options-of-several-commands) |"


def _annotated_parameters(command: Callable[..., None]) -> Iterator[tuple[inspect.Parameter, Any]]:
    """Yield the parameters of a command, each with its typer option or argument."""
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.annotation is not typer.Context:
            yield parameter, get_args(parameter.annotation)[1]


def _paragraphs(text: str) -> list[str]:
    """Return a help text's lines as Markdown. A paragraph that begins with click's backspace becomes a code block."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        body = paragraph.removeprefix("\b\n").strip("\n").splitlines()
        lines += ["", *(["```", *body, "```"] if paragraph.startswith("\b") else body)]
    return lines[1:]


def _option_texts(parameter: inspect.Parameter, info: Any) -> tuple[str, str, str]:
    """Return an option's names, default and meaning."""
    return _option_names(parameter, info), _default_text(parameter, info), _help_text(parameter, info)


def _option_names(parameter: inspect.Parameter, info: Any) -> str:
    """Return the names of an option, with its metavar."""
    first = [info.default] if isinstance(info.default, str) else []  # the first name in an annotation's `typer.Option`
    names = sorted([*first, *(info.param_decls or ())], key=len) or [f"--{parameter.name.replace('_', '-')}"]
    if info.metavar:
        names[-1] += f" {info.metavar}"
    return ", ".join(f"`{name}`" for name in names)


def _default_text(parameter: inspect.Parameter, info: Any) -> str:
    """Return the default of an option; empty if there is none to show."""
    value = parameter.default
    if isinstance(info.show_default, str):
        return f"({info.show_default})"
    if isinstance(value, bool):
        yes, _, no = _option_names(parameter, info).strip("`").partition("/")
        return f"`{yes if value else no}`" if no else ""
    value = ",".join(value) if isinstance(value, list) else value.value if isinstance(value, Enum) else value
    return "" if value is None else f"`{value}`"


def _help_text(parameter: inspect.Parameter, info: Any) -> str:
    """Return an option's help, with its choices and its least value."""
    parts = [info.help]
    annotation = get_args(parameter.annotation)[0]
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Enum):
            parts.append(f"One of {', '.join(f'`{choice.value}`' for choice in kind)}.")
    if info.min is not None:
        parts.append(f"At least {info.min}.")
    return " ".join(parts).replace("|", "\\|")


if __name__ == "__main__":
    console.print_result(reference_page(), end="")
