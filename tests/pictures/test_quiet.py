"""On a busy machine no picture with rates is made."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.pictures import __main__ as pictures
from tests.pictures.quiet import SAMPLES, Look, busy


def looked(share: float, spread: float, seed: int = 0) -> Look:
    """A yardstick that gets this share of its CPU; every third piece of work takes so much longer."""
    uneven = random.Random(seed)
    wall = [0.02 * uneven.uniform(0.99, 1.01) * (1 + spread * (n % 3 == 0)) for n in range(SAMPLES)]
    return Look(wall, [seconds * share for seconds in wall])


def test_a_quiet_machine_is_not_busy() -> None:
    assert busy([looked(0.99, 0.0), looked(0.95, 0.05, seed=1)]) is None


def test_one_busy_cpu_is_enough_and_the_figures_are_told() -> None:
    told = busy([looked(0.99, 0.0), looked(0.47, 0.0)])
    assert told is not None
    assert "gets 47% of a CPU, where a quiet machine gives 90%" in told and "slowest" not in told
    assert told.endswith("End what else runs, wait a minute, and try again")


def test_work_that_takes_longer_now_and_then_is_told() -> None:
    slow = Look([0.02] * 14 + [0.03] * 6, [0.0199] * 14 + [0.0299] * 6)
    told = busy([looked(0.99, 0.0), slow])
    assert told is not None and "its slowest quarter takes 50% longer than the median" in told


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the pictures, which are drawn at once, and a page of figures with 20 tokens per second."""
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    monkeypatch.setattr(pictures, "FIGURES", tmp_path / "figures.md")
    pictures.FIGURES.write_text("| decode, 1 row | 20.0 | 19.0 | 1.05x |\n")
    chat = "<text>192&#160;tokens · 19&#160;tok/s · TTFT</text>"
    drawn = {"chat": chat, "batch": "<text/>", "blocks": "<text/>"}
    monkeypatch.setattr(pictures, "PICTURES", {name: lambda _, text=text: text for name, text in drawn.items()})
    return tmp_path


@pytest.mark.parametrize("before", [True, False], ids=["before", "meanwhile"])
def test_a_busy_machine_gets_no_picture_with_rates(
    before: bool, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([[looked(0.2, 0.0)]] if before else [[looked(0.99, 0.0)], [looked(0.2, 0.0)]])
    monkeypatch.setattr(pictures, "look", lambda: next(looks))
    assert pictures.main(["blocks", "chat", "batch"]) == 1
    assert [file.name for file in made.glob("*.svg")] == ["blocks.svg"]
    assert "docs/chat.svg stays as it was: the machine is busy: the yardstick gets 20%" in capsys.readouterr().err


def test_a_quiet_machine_gets_all_of_them(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "look", lambda: [looked(0.99, 0.0)])
    assert pictures.main([]) == 0 and len(list(made.glob("*.svg"))) == 3


def test_rates_that_are_not_the_tables_are_no_picture(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "look", lambda: [looked(0.99, 0.0)])
    pictures.FIGURES.write_text("| decode, 1 row | 60.0 | 57.0 | 1.05x |\n")
    assert pictures.main(["chat"]) == 1 and not list(made.glob("*.svg"))
    assert "shows 19 tokens per second where docs/figures.md has 60" in capsys.readouterr().err
