"""`cortexmlx bench` on the command line: its model, and wrong usage."""

from __future__ import annotations

import pytest

from cortexmlx.cli.start import run
from support.models.bench_model import bench, write_small


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
        (["--against", "mlx-lm", "-p", "8", "-p", "8"], 2, "names a number twice"),
        (["--against", "mlx-lm", "--suite", "serving", "-b", "2"], 2, "sizes of their own"),
        (["--against", "mlx-lm", "--suite", "serving", "-n", "16"], 2, "sizes of their own"),
        (["--suite", "serving"], 2, "add --against mlx-lm"),
        (["--case", "pp512"], 2, "says nothing to --suite basic"),
        (["--against", "mlx-lm", "--block-size", "16,32"], 2, "takes one number here"),
        (["--block-size", "16,33"], 2, "33 is none of 8, 16, 32"),
        (["-r", "0"], 2, "-r"),
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


def test_an_interrupt_before_the_first_figure_says_so(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cortexmlx.bench.session.measure_rows", interrupted)
    assert run(["bench", model, "-r", "1"]) == 130
    assert "before anything was measured" in capsys.readouterr().err
