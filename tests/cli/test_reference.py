"""docs/cli.md is what the commands say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from cortexmlx.cli import reference
from cortexmlx.cli.app import COMMANDS, SUBCOMMANDS
from cortexmlx.cli.start import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
SHARED = PAGE.read_text(encoding="utf-8").partition("## Options of several commands")[2].partition("|---|---|---|\n")[2]
SHARED = SHARED.partition("\n\n")[0]
"""The rows of what several commands have."""


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference.reference_page(), (
        "docs/cli.md is out of date: run `python -m cortexmlx.cli.reference > docs/cli.md`"
    )


@pytest.mark.parametrize(
    "name", [*(name for name, _, _ in COMMANDS), *(f"{of} {name}" for of, name, _, _ in SUBCOMMANDS)]
)
def test_the_page_has_the_options_and_defaults_that_help_shows(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typer's own help is the judge: it reads the annotations in its own way."""
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    assert run([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out.partition("Options:\n")[2]
    section = PAGE.read_text(encoding="utf-8").partition(f"# cortexmlx {name}\n")[2]
    section = re.split(r"\n##+ ", section)[0]
    table = section.partition("|---|---|---|\n")[2]
    flag = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
    helped = {f for line in shown.splitlines() if line.startswith("  -") for f in flag.findall(line.split("   ")[0])}
    written = {f for line in table.splitlines() if line for f in flag.findall(line.split("|")[1])}
    assert written == helped - {"-h", "--help"}
    defaults = re.findall(r"\[default: ([^\];]+)", re.sub(r"\s+", " ", shown))
    shared = {line.split("|")[1].strip(): line.split("|")[2] for line in SHARED.splitlines()}
    named = [names for names in shared if table and f"{names}, " in f"{table.splitlines()[-1].split('|')[1].strip()}, "]
    cells = [line.split("|")[2] for line in table.splitlines() if line] + [shared[names] for names in named]
    assert sorted(c.strip(" `").removeprefix("--") for c in cells if c.strip()) == sorted(defaults)


@pytest.mark.parametrize(("name", "says"), [("serve", "(the model's, else 0.0)"), ("generate", "0.0")])
def test_help_says_where_the_model_has_the_default(name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    assert f"likeliest token. [default: {says}]" in " ".join(capsys.readouterr().out.split())


OTHERS = {"hostfile", "backend", "starting-port", "map-by", "bind-to", "env", "hf-path", "mlx-path"}
OTHERS |= {"upgrade", "no-deps", "no-cache", "force-reinstall", "out", "settings"}
"""Options of pip, mlx.launch, mlx-lm, sips and Claude Code that our messages name."""


def test_every_option_that_a_message_names_exists() -> None:
    root, page = PAGE.parents[1], PAGE.read_text(encoding="utf-8")
    for path in (each for folder in ("cortexmlx", "cli") for each in (root / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not re.search(r"(?<![\w-])--[a-z]", source):
            continue
        tree = ast.parse(source)
        docs = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        for each in ast.walk(tree):
            if isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in docs:
                named = set(re.findall(r"(?<![\w-])--([a-z][a-z-]*[a-z])", each.value)) - OTHERS
                assert all(re.search(rf"--(no-)?{name}(?![\w-])", page) for name in named), (path, named)
