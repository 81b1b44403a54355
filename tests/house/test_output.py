"""All that commands write to a terminal goes through one place, `cli/terminal`, which makes it harmless."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FORBIDDEN = {
    "print": "console.say",
    "sys.stdout.write": "console.say",
    "sys.stderr.write": "console.tell",
    "sys.stdout.buffer.write": "console.say",
    "typer.echo": "console.tell",
    "typer.secho": "console.tell",
    "click.echo": "console.tell",
    "os.write": "console.control",
    "Console": "console.stdout",
    "rich.print": "console.say",
    "unguarded": "console.control",
    "print_formatted_text": "console.say",
    "create_output": "make_prompt_output",
}
"""What writes past the place, and what is used instead."""

PLACE = {
    "cli/terminal/console.py": {"Console", "unguarded", "os.write"},
    "cli/terminal/harmless.py": {"unguarded"},
    "cli/terminal/signals.py": {"os.write"},
}
"""The modules of that place, and what each may do: write sequences of its own."""

STUDIES = "bench/studies"
"""Programs of developers, which print figures of their own."""


def sources() -> Iterator[tuple[str, str]]:
    for folder in ("cli", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith(STUDIES):
                yield name, path.read_text()


def offences(source: str) -> Iterator[tuple[int, str]]:
    """The lines of a module that write past the place. Annotations are no calls."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN:
                yield node.lineno, called
            elif called in ("PromptSession", "Status", "Progress", "Live") or called.endswith((".Progress", ".Live")):
                given = {each.arg for each in node.keywords}
                if "PromptSession" in called and "output" not in given:
                    yield node.lineno, f"{called} without an output"
                if called.startswith("rich.") and "console" not in given:
                    yield node.lineno, f"{called} without a console"
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Console" for base in node.bases):
            yield node.lineno, "Console"


def test_nobody_writes_past_the_place_that_makes_text_harmless() -> None:
    found = [
        f"{name}:{line} uses {what}: {FORBIDDEN.get(what, 'give it one')}"
        for name, source in sources()
        for line, what in offences(source)
        if what not in PLACE.get(name, set())
    ]
    assert found == []


def test_an_offence_is_seen_and_the_place_is_where_it_says() -> None:
    for line in (*(f"{name}('x')" for name in FORBIDDEN), "PromptSession()", "rich.Progress()"):
        assert [*offences(f"def f():\n    {line}\n")], line
    assert all(Path(ROOT / name).is_file() for name in PLACE)
