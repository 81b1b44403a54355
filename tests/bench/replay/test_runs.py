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
        runs.Workload(AnswerKind.EDIT, (), False),
        (run(3.0), run(1.0), run(6.0)),
        (run(1.0, accepted=40), run(2.0), run(2.0)),
    )
    assert (found.ratios, found.ratio, found.cpu_ratio) == ((3.0, 0.5, 3.0), 3.0, 3.0)
    assert (
        found.whole_ratio == 7 / 3 and found.same_answers == 3 and found.speculating_runs[0].tokens_per_step == 60 / 20
    )
    assert found.speculating_runs[0].drafts.tokens_per_step == 9.0


def test_live_answers_are_the_models_own_with_the_same_tokens_on_both_sides(model: str) -> None:
    with Engine(model, max_rows=2, speculate=False) as plain, Engine(model, max_rows=2) as speculating:
        works = [make_workload(AnswerKind.JSON, 2, 2, 24, plain, is_live=True)]
        [found] = measure_workloads(plain, speculating, works, lambda what: None)
    assert found.same_answers == 4
    scripts = [row.answer for rows in works[0].texts for row in rows]
    assert not set(scripts) & {answer for each in found.plain_runs for answer in each.tokens}


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
