"""Pairs with drafts and without: the same scripts on both sides, and the ratios of their times."""

from __future__ import annotations

import pytest

from cortexmlx import CortexError, Engine
from cortexmlx.bench.replay import runs
from cortexmlx.bench.replay.runs import ReplayRun, TimedSpan, WorkloadResult, make_workload, measure_workloads
from cortexmlx.bench.replay.texts import AnswerKind
from cortexmlx.stats import SpeculationStats


def run(wall: float, accepted: int = 0) -> ReplayRun:
    together = TimedSpan(60, wall, wall / 2)
    return ReplayRun(
        (tuple(range(60)),), TimedSpan(60, 2 * wall + 1, wall), together, SpeculationStats(2 * accepted, accepted, 5)
    )


def test_ratios_are_those_of_the_pairs() -> None:
    found = WorkloadResult(
        runs.Workload(AnswerKind.EDIT, ()),
        (run(3.0), run(1.0), run(6.0)),
        (run(1.0, accepted=40), run(2.0), run(2.0)),
    )
    assert (found.ratios, found.ratio, found.cpu_ratio) == ((3.0, 0.5, 3.0), 3.0, 3.0)
    assert found.whole_ratio == 7 / 3 and found.speculating_runs[0].tokens_per_step == 60 / 20
    assert found.speculating_runs[0].drafts.tokens_per_step == 9.0


def test_an_answer_that_is_not_its_script_is_an_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(model, max_rows=2, speculate=False) as plain, Engine(model, max_rows=2) as speculating:
        own = runs.use_scripts
        monkeypatch.setattr(runs, "use_scripts", lambda scripts: own({0: scripts[0]}))
        with pytest.raises(CortexError, match="an answer of prose without is not its script"):
            list(
                measure_workloads(
                    plain, speculating, [make_workload(AnswerKind.PROSE, 1, 2, 12, plain)], lambda what: None
                )
            )
