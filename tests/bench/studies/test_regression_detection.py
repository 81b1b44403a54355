"""Whether slower engines are noticed: the slowed engine computes the same, and verdicts are counted."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from cortexmlx.bench.studies import regression_detection
from cortexmlx.bench.studies.regression_detection import Outcome, table


def test_a_slowed_model_computes_the_same_with_more_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.MLP, "__call__", llama.MLP.__call__)
    args = llama.ModelArgs("llama", 16, 1, 32, 2, 1e-5, 64)
    mlp, x = llama.MLP(args), mx.random.normal((3, 16))
    expected, calls, once = mlp(x), [0], llama.MLP.__call__

    def counted(self: llama.MLP, x: mx.array) -> mx.array:
        calls[0] += 1
        out: mx.array = once(self, x)
        return out

    monkeypatch.setattr(llama.MLP, "__call__", counted)
    regression_detection.slow_down(3)
    assert all(mx.array_equal(mlp(x), expected) for _ in range(6))
    assert calls == [6 + 2]


def test_the_table_counts_who_was_called_slower() -> None:
    slowed = [Outcome(6, 3, {"pp": -0.1}, {}), Outcome(2, 3, {"pp": -0.25}, {})]
    runs = [Outcome(0, 0, {"pp": 0.01}, {}), Outcome(0, 0, {"pp": -0.01}, {}), *slowed]
    lines = ["| of none | 2 | 0 | +0.0 |", "| every 6th | 1 | 1 | -10.0 |", "| every 2nd | 1 | 1 | -25.0 |"]
    assert table(runs).splitlines()[2:] == lines


def test_every_kind_of_engine_takes_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, and with the MLP of every 12th, 6th and 2nd layer twice; what the log has is not run again."""
    ran, saved = list[int](), list[int]()
    monkeypatch.setattr(regression_detection, "run", lambda model, every, arguments: saved.append(every))
    monkeypatch.setattr(
        regression_detection, "compare", lambda model, file, every: ran.append(every) or Outcome(every, 0, {}, {})
    )
    log = tmp_path / "log.jsonl"
    for runs in ("1", "2"):
        monkeypatch.setattr("sys.argv", ["noticed", "a model", "--runs", runs, "--log", str(log)])
        regression_detection.main()
    assert saved == [0, 0] and ran == [0, 12, 6, 2] * 2


@pytest.mark.slow
@pytest.mark.model
def test_a_slowed_engine_is_reported(tmp_path: Path) -> None:
    """Every third MLP twice: a fifth of a step, which shows on a busy machine, too."""
    saved = tmp_path / "a.json"
    arguments = ["-p", "64", "-n", "12", "-r", "10"]
    regression_detection.run("smollm2", 0, [*arguments, "--save", str(saved)])
    assert regression_detection.compare("smollm2", saved, 3).code == regression_detection.SLOWER
