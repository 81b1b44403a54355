"""`cortexmlx bench` on the command line: its model, and wrong usage."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from cortexmlx.cli.start import run
from support.models.bench_model import bench, shrink_yardstick, write_small


@pytest.fixture(autouse=True)
def small_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_yardstick(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_small(tmp_path_factory.mktemp("bench"))


def test_without_any_model_random_weights_are_used_and_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cortexmlx.cli.bench.command.starter_path", lambda: None)
    assert "random weights" in bench(capsys, "-p", "8", "-n", "2", "-r", "1")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-p", "many"], 2, "not a list of numbers"),
        (["-b", "0"], 2, "0 is below 1"),
        (["-p", "0", "-n", "0"], 1, "nothing to measure"),
        (["-d", "40000", "-r", "1"], 1, "the model's context is 32768"),
        (["--against", "mlx-lm", "--case", "nothing like it"], 1, "no case has 'nothing like it'"),
        (["--against", "mlx-lm", "--case", "pp512", "--case", "nothing"], 1, "no case has 'nothing'"),
        (["--against", "mlx-lm", "-p", "0", "-n", "0"], 1, "nothing to measure"),
        (["--against", "mlx-lm", "-p", "0", "-n", "0", "-b", "4"], 1, "nothing to measure"),
        (["--against", "mlx-lm", "-d", "40000"], 1, "the model's context is 32768: lower"),
        (["--against", "mlx-lm", "-p", "8,8"], 2, "names a number twice"),
        (["--against", "mlx-lm", "--suite", "serving", "-b", "2"], 2, "sizes of their own"),
        (["--against", "mlx-lm", "--suite", "serving", "-n", "16"], 2, "sizes of their own"),
        (["--suite", "serving"], 2, "add --against mlx-lm"),
        (["--suite", "trace", "-d", "8"], 2, "says nothing to --suite trace"),
        (["--case", "pp512"], 2, "says nothing to --suite basic"),
        (["--requests", "8"], 2, "says nothing to --suite basic"),
        (["--suite", "trace", "--request-rate", "0"], 2, "must be above 0"),
        (["--suite", "trace", "--block-size", "16,32"], 2, "takes one number here"),
        (["--block-size", "33"], 2, "33 is none of"),
        (["--compare", "there/is/none.json"], 1, "No such file"),
        (["--save", "there/is/none.json"], 1, "there is no folder"),
        (["--save", "/proc/self/a.json"], 1, "/proc/self/a.json cannot be written: "),
        (["-r", "0"], 2, "-r"),
        (["--suite", "trace", "--request-rate", "nan"], 2, "must be above 0"),
        (["--suite", "trace", "--request-rate", "inf"], 2, "must be above 0"),
        (["-p", "1000000000000", "-r", "1"], 1, "the model's context is 32768"),
        (
            ["-n", "30000", "-b", "100000", "-p", "0", "-r", "1"],
            1,
            "tokens of keys and values at once, and this machine",
        ),
        (["-n", "1000000000000", "-b", "1000000", "-r", "1"], 1, "the model's context is 32768"),
    ],
)
def test_wrong_usage_is_explained(
    arguments: list[str], code: int, message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", model, *arguments]) == code
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


SIZES = ("-p", "8", "-n", "4", "-r", "4")


def test_a_run_is_kept_and_compared(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "then.json"
    bench(capsys, model, *SIZES, "--save", str(file))
    assert run(["bench", model, *SIZES, "--save", str(file)]) == 1
    assert "not overwritten" in capsys.readouterr().err

    kept = json.loads(file.read_text())
    for series in kept["compared"]["series"]:
        series["values"] = [1e18 * (1 + i / 1_000) for i in range(4)]  # then it was faster beyond any noise
    file.write_text(json.dumps(kept))
    assert run(["bench", model, *SIZES, "--compare", str(file)]) == 3
    text = capsys.readouterr().out
    assert " SLOWER |" in text and "- slower beyond the noise: pp8" in text
    assert max(len(line) for line in text.splitlines() if model not in line) <= 80  # a path may be long


def test_another_models_run_is_not_compared_and_the_figures_are_shown(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "then.json", tmp_path / "now.json"
    bench(capsys, model, "-p", "8", "-n", "0", "-r", "1", "--save", str(file))
    kept = json.loads(file.read_text())
    kept["compared"]["model"]["files"] = "of another"
    file.write_text(json.dumps(kept))
    assert run(["bench", model, "-p", "8", "-n", "0", "-r", "1", "--compare", str(file), "--save", str(other)]) == 1
    said = capsys.readouterr()
    assert "| pp8" in said.out.replace("  ", " ") and "the models' files differ" in said.err and other.exists()
    kept["machine"]["chip"] = "Another chip"
    file.write_text(json.dumps(kept))
    assert run(["bench", model, "-r", "1", "--compare", str(file)]) == 1  # at once: nothing is measured
    said = capsys.readouterr()
    assert "chip: Another chip then" in said.err and not said.out


def test_what_was_measured_is_kept_if_nobody_reads_it_and_printed_if_it_cannot_be_kept(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    wanted = ["bench", model, "-p", "8", "-n", "0", "-r", "1", "--save", str(file)]

    def gone(report: object, width: int) -> str:
        raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr("cortexmlx.bench.report.text.as_markdown", gone)
        patch.setattr("cortexmlx.cli.terminal.console.silence_stdout", lambda: None)  # it is pytest's
        assert run(wanted) == 141
    assert json.loads(file.read_text())["rows"]
    file.unlink()

    def full(run: object, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("cortexmlx.bench.changes.saved.save_run", full)
    assert run(wanted) == 1
    said = capsys.readouterr()
    assert "| pp8" in said.out and said.err == f"error: No space left on device: {file}\n"


def test_an_interrupt_before_the_first_figure_says_so(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cortexmlx.bench.session.measure_rows", interrupted)
    assert run(["bench", model, "-r", "1"]) == 130
    assert "before anything was measured" in capsys.readouterr().err


def test_an_interrupted_run_is_not_kept(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cortexmlx.bench.measure.yardstick import Yardstick

    sample, calls = Yardstick.add_sample, count()

    def interrupted(self: Yardstick) -> None:
        if next(calls) == 3:  # two rounds have a sample at their end
            raise KeyboardInterrupt
        sample(self)

    monkeypatch.setattr(Yardstick, "add_sample", interrupted)
    file = tmp_path / "a.json"
    assert run(["bench", model, "-p", "8", "-n", "0", "--save", str(file)]) == 130
    said = capsys.readouterr()
    assert "| pp8" in said.out and f"interrupted: {file} was not written" in said.err and not file.exists()


def test_a_trace_comes_from_the_command_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--suite", "trace", "--requests", "4", "--request-rate", "50", "--goodput", "ttft:60000", "-r", "1"]
    [record] = json.loads(bench(capsys, model, *asked, "-o", "json"))["trace"]
    assert record["requests"] == record["good"] == 4 and record["TTFT p50"] > 0
