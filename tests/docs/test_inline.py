"""What the pages say in passing exists: commands and options in a sentence or a table, and the messages of errors."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click
import typer

from cortexmlx.cli.app import app
from cortexmlx.cli.chat.slash.commands import COMMANDS
from cortexmlx.cli.chat.slash.settings import ENGINE, SAMPLING
from support.pages import PAGES, ROOT, prose, read

CLI: Any = typer.main.get_command(app)
OPTIONS = {name for command in CLI.commands.values() for each in command.params for name in each.opts}
OPTIONS |= {name for command in CLI.commands.values() for each in command.params for name in each.secondary_opts}
SLASH = {name for command in COMMANDS for name in (command.name, *command.aliases)}

MENTIONED = {
    code
    for page in PAGES
    if page != "docs/cli.md"  # made from the commands themselves
    for code in re.findall(r"`(cortexmlx [^`]+)`", prose(page).replace("\n", " "))
}

CODE = ("docs/architecture.md", "docs/design-steps.md", "docs/design-memory.md", "docs/design-attention.md")
NAME = re.compile(r"[A-Za-z_]\w{3,}")

NOT_OURS = {"command not found: cortexmlx", "No matching distribution found for mlx-lm==0.32.2"}
"""Messages of other programs."""


def test_commands_in_sentences_are_understood() -> None:
    """Without what they need besides, and with capital letters in the place of what a reader chooses."""
    for code in MENTIONED - {"cortexmlx COMMAND"}:
        name, *rest = [word for word in shlex.split(code)[1:] if word != "..."]
        if name.startswith("--"):
            assert name in {option for each in CLI.params for option in each.opts}
            continue
        words = ["1" if re.fullmatch("[A-Z]+", word) else word for word in rest]
        context = click.Context(CLI.commands[name], info_name=name, resilient_parsing=True)
        CLI.commands[name].parse_args(context, words)


def ours() -> list[str]:
    """The codes in the last column of the page's tables."""
    rows = re.findall(r"^\| .* \| (.*) \|$", read("docs/coming-from.md"), re.MULTILINE)
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row)]


def test_what_stands_beside_other_programs_words_exists_here() -> None:
    found = ours()
    options = {word for code in found for word in code.split() if word.startswith("-")}
    assert len(options) > 10 and options - OPTIONS == set()
    commands = {code.split()[0] for code in found if code.startswith("/")}
    assert len(commands) > 5 and commands - SLASH == set()
    settings = {code.split()[1] for code in found if code.startswith("/set ")}
    assert settings - {*SAMPLING, *ENGINE, "think"} == set()


def test_every_slash_command_has_a_row_on_the_page_of_the_chat() -> None:
    rows = re.findall(r"^\| (`/.*?) \|", read("docs/chat.md"), re.MULTILINE)
    listed = {code.split()[0] for row in rows for code in re.findall(r"`(/[^`]*)`", row)}
    assert {command.name for command in COMMANDS} - listed == set()


def test_every_folder_has_a_row_on_the_page_of_the_architecture() -> None:
    rows = re.findall(r"^\| (`[a-z].*?) \|", read("docs/architecture.md"), re.MULTILINE)
    listed = {name.rstrip("/") for row in rows for name in re.findall(r"`(\w+/)`", row)}
    folders = {path.parent.name for path in (ROOT / "cortexmlx").glob("*/__init__.py")}
    assert len(folders) > 15 and folders - listed == set()


def test_what_the_page_of_the_architecture_says_to_begin_with_exists() -> None:
    rows = re.findall(r"^\| `(\w+/)`.*? \| .*? \| (.*?) \|$", read("docs/architecture.md"), re.MULTILINE)
    named = [(room, path) for room, cell in rows for path in re.findall(r"`([\w/.]+)`", cell)]
    assert len(named) > 20
    places = [(ROOT / room / path, ROOT / "cortexmlx" / room / path) for room, path in named]
    assert [place for place in places if not any(path.exists() for path in place)] == []


def test_names_on_the_pages_about_the_code_are_those_of_the_code() -> None:
    tops = ("cortexmlx", "cli", "metal", "tests/house")
    paths = [path for top in tops for path in (ROOT / top).rglob("*.*") if path.suffix in (".py", ".metal")]
    code = {word for path in paths for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    code |= {word for path in paths for word in (path.stem, path.parent.name)}
    named = {word for page in CODE for text in re.findall(r"`([^`\n]+)`", prose(page)) for word in NAME.findall(text)}
    assert len(named) > 100 and named - code == set()


def test_targets_of_make_are_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"(?:`|^)make ([\w-]+)", read(page), re.MULTILINE)}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert len(named) > 8 and named - targets == set()


def test_messages_that_a_reader_looks_up_are_those_of_the_program() -> None:
    sources = [path for top in ("cortexmlx", "cli", "bench") for path in (ROOT / top).rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in [*sources, ROOT / "Makefile"])
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # a message over several lines
    first = re.findall(r"^\| `([^`]+)`", read("docs/troubleshooting.md"), re.MULTILINE)
    assert len(first) > 8 and [words for words in first if words not in text and words not in NOT_OURS] == []
