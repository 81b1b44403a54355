"""What runs, and that an option which says nothing to it is refused."""

from __future__ import annotations

import inspect

import pytest
import typer

from cortexmlx.cli.bench import command
from cortexmlx.cli.bench.command import (
    SECTIONS_BY_OPTION,
    Suite,
    bench,
    check_options,
    choose_section,
    parse_block_sizes,
    parse_numbers,
)


def test_every_option_that_some_sections_take_is_one() -> None:
    assert set(SECTIONS_BY_OPTION) <= set(inspect.signature(bench).parameters)


@pytest.mark.parametrize(
    ("names", "suite", "against"),
    [
        (["batch"], Suite.serving, True),
        (["case"], Suite.basic, False),
        (["prompt"], Suite.serving, True),
        (["hosts"], Suite.basic, True),
        (["hosts"], Suite.serving, True),
    ],
)
def test_an_option_that_says_nothing_is_refused(names: list[str], suite: Suite, against: bool) -> None:
    with pytest.raises(typer.BadParameter):
        check_options(names, choose_section(suite, against), suite, against)


def test_lists_are_numbers() -> None:
    assert parse_numbers("-b", ["1,4", "8"], 1) == [1, 4, 8] and parse_block_sizes(["16,32"]) == [16, 32]


@pytest.mark.parametrize("text", ["many", "", "1,,2", "0", "1,1", "-3"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_numbers("-b", [text], 1)


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    with command.progress_display() as show:
        for now[0] in (0.0, 5.0, 10.0, 12.0, 25.0):
            show(f"at {now[0]:.0f}")
    assert capsys.readouterr().err.splitlines() == ["cortexmlx: at 10", "cortexmlx: at 25"]


def test_a_terminal_gets_every_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command.console, "is_terminal", lambda stream: True)
    with command.progress_display() as show:
        assert getattr(show, "__name__", "") == "update"
    assert capsys.readouterr().out == ""
