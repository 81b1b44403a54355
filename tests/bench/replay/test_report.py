"""`cortexmlx bench --speculate`: a row for each kind of text and number of rows, and what it refuses."""

from __future__ import annotations

import json

import pytest

from cortexmlx.bench.replay import report
from cortexmlx.bench.replay.runs import ReplayRun, TimedSpan, Workload, WorkloadResult
from cortexmlx.bench.replay.texts import AnswerKind, ReplayText
from cortexmlx.bench.report import section_markdown
from cortexmlx.cli.start import run
from cortexmlx.stats import SpeculationStats
from support.models.bench_model import bench

TEXT = ReplayText((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 9))


def timed(seconds: float, accepted: int = 0) -> ReplayRun:
    span = TimedSpan(60, seconds, seconds)
    return ReplayRun((tuple(range(60)),), span, span, SpeculationStats(2 * accepted, accepted, 5))


def test_the_section_has_the_ratio_of_the_pairs_and_how_much_is_repeated() -> None:
    found = WorkloadResult(
        Workload(AnswerKind.EDIT, ((TEXT,), (TEXT,))), (timed(4), timed(6)), (timed(2, 40), timed(2, 20))
    )
    part = report.speculation_section([found])
    [record] = part.records
    assert (record["text"], record["rows"], record["ratio"], record["ratios"]) == ("edit", 1, 2.5, (2.0, 3.0))
    assert record["repeated"] == pytest.approx(1 / 6) and (record["without"], record["with"]) == (12.5, 30.0)
    assert (record["drafted"], record["accepted"], record["tokens_per_step"]) == (60, 30, (60 / 20 + 60 / 40) / 2)
    text = section_markdown(part)
    assert "2.50x" in text and max(map(len, text.splitlines())) <= 80


def test_the_command_measures_each_kind_for_each_number_of_rows(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.measure_speculation, "__defaults__", (24,))
    said = json.loads(bench(capsys, model, "--speculate", "-b", "2", "-r", "1", "-o", "json"))
    found = [(each["rows"], each["text"]) for each in said["speculation"]]
    assert found == [(2, kind.value) for kind in AnswerKind]
    assert all(each["ratio"] > 0 and each["tokens_per_step"] >= 1 for each in said["speculation"])


def test_an_interrupt_keeps_the_kinds_that_are_complete(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = report.measure_workloads

    def interrupted(*arguments: object) -> object:
        yield next(iter(own(*arguments)))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "measure_workloads", interrupted)
    monkeypatch.setattr(report.measure_speculation, "__defaults__", (24,))
    assert run(["bench", model, "--speculate", "-r", "1", "-o", "json"]) == 130
    said = json.loads(capsys.readouterr().out)
    assert [each["text"] for each in said["speculation"]] == ["edit"] and "interrupted" in said["notes"][-1]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--against", "mlx-lm"], "is measured alone: leave --against out"),
        (["--suite", "serving"], "is measured alone: leave --suite serving out"),
        (["-p", "64"], "says nothing to --speculate: leave it out"),
    ],
)
def test_what_does_not_belong_to_it_is_refused(more: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "smollm2", "--speculate", *more]) == 2
    assert why in " ".join(capsys.readouterr().err.replace("│", " ").split())
