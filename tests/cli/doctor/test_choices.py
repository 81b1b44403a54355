"""What doctor says of the ways to compute attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cortexmlx.attention.autotuning import current_identity
from cortexmlx.autotune.table import ChoiceTable, TimedJob
from cortexmlx.autotune.timing import Timing
from cortexmlx.cli.doctor.choices import choice_line, saved_choices
from cortexmlx.cli.doctor.report import CheckStatus
from cortexmlx.cli.start import run
from cortexmlx.stats import ChoiceSource, TimedChoice


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_line_has_the_way_that_serves_the_times_and_who_cannot() -> None:
    refused = {"wide kernel": "its launch was dropped"}
    seconds = {"reference path": 31e-6, "matrix kernel": 12.4e-6}
    choice = TimedChoice("attention float16", "1 row", "matrix kernel", ChoiceSource.DISK, seconds, refused)
    assert choice_line(choice).detail == (
        "attention float16; 1 row: matrix kernel (matrix kernel 12 us, reference path 31 us, wide kernel cannot serve: "
        "its launch was dropped)"
    )
    untimed = TimedChoice("attention float16", "1 row", "matrix kernel", ChoiceSource.RULE)
    assert choice_line(untimed).detail == "attention float16; 1 row: matrix kernel (not timed)"


def test_on_a_cpu_the_rules_choose() -> None:
    [check] = saved_choices()
    assert check.verdict is CheckStatus.OK and check.detail.startswith("by the rules on a CPU")


def test_on_a_gpu_doctor_shows_what_earlier_engines_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortexmlx.attention.backends.auto_backend_name", lambda: "metal")
    [check] = saved_choices()
    assert check.detail.startswith("nothing is timed yet")
    entry = TimedJob("attention float16", "1 row", "vector kernel", Timing({"vector kernel": 2e-5, "other": 1e-5}, {}))
    ChoiceTable(current_identity()).add({"a": entry})
    [check] = saved_choices()
    assert check.detail == "attention float16; 1 row: other (other 10 us, vector kernel 20 us)"


def test_a_model_is_timed_now_and_its_times_are_kept(
    tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--time", str(tiny("llama")), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert len(lines) == 4 and {check["name"] for check in lines} == {"choice"}
    assert sum("MLX over a gather" in check["detail"] for check in lines) == 3
    assert len(ChoiceTable(current_identity()).read()) == 4


def test_a_model_with_nothing_to_choose_says_so(
    tiny: Callable[[str], Path], unpaged: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--time", str(tiny("llama"))]) == 0
    assert "warn  choice" in capsys.readouterr().out


def test_a_model_without_time_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "smollm2"]) == 2
    assert "add --time" in capsys.readouterr().err
