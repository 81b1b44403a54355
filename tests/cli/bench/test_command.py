"""`cortexmlx bench` on the command line: its model, and wrong usage."""

from __future__ import annotations

import pytest

from cortexmlx.cli.start import run
from support.bench_model import bench, write_small


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
    ],
)
def test_wrong_usage_is_explained(
    arguments: list[str], code: int, message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", model, *arguments]) == code
    assert message in capsys.readouterr().err
