"""Pairs with drafts and without: the same scripts on both sides, and the ratios of their times."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from cortexmlx import CortexError, Engine
from cortexmlx.bench.replay import runs
from cortexmlx.bench.replay.runs import (
    RECORD,
    ReplayRun,
    TimedSpan,
    WorkloadResult,
    apply_forced_tokens,
    make_workload,
    measure_workloads,
    use_scripts,
)
from cortexmlx.bench.replay.texts import AnswerKind, ReplayText, make_text
from cortexmlx.execution import runner
from cortexmlx.execution.sampling import BatchSampler
from cortexmlx.scheduling.plan import StepKind
from cortexmlx.stats import SpeculationStats
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of


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


def test_an_answer_says_the_same_with_the_tokens_of_its_schema(model: str) -> None:
    with Engine(model) as engine:
        text = make_text(AnswerKind.SCHEMA, 3, 600, engine.encode)
        forced = apply_forced_tokens(text, engine)
        said = engine.decode(forced.answer)
        assert said and engine.decode(text.answer).startswith(said)
        assert apply_forced_tokens(forced, engine).answer[:100] == forced.answer[:100] and forced.prompt == text.prompt
        first, _ = json.JSONDecoder().raw_decode(said[1:])
    jsonschema.validate(first, RECORD)


def test_both_engines_write_it_and_the_one_with_drafts_finds_its_keys(model: str) -> None:
    with (
        Engine(model, max_rows=2, speculate=False, forced_tokens=False) as plain,
        Engine(model, max_rows=2) as speculating,
    ):
        [found] = measure_workloads(
            plain, speculating, [make_workload(AnswerKind.SCHEMA, 1, 2, 60, plain)], lambda what: None
        )
    assert not found.plain_runs[0].drafts.drafted
    forced = found.speculating_runs[0].drafts.sources["forced"]
    assert forced.drafted == forced.accepted


def test_a_text_that_does_not_follow_the_schema_is_refused(model: str) -> None:
    with Engine(model) as engine, pytest.raises(CortexError, match=r"does not follow its schema at .name"):
        apply_forced_tokens(ReplayText((1,), tuple(engine.encode('[{"name":1}]'))), engine)


SCRIPTS = {3: tokens_of(24, seed=3), 4: tokens_of(17, seed=4)}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_their_scripts_and_other_requests_are_free(tiny: Any, temperature: float) -> None:
    free = Driver(tiny("llama")).result_of(tokens_of(9), 20, seed=9, temperature=temperature).token_ids
    driver = Driver(tiny("llama"))
    with use_scripts(SCRIPTS):
        handles = [driver.add(tokens_of(9), 20, seed=seed, temperature=temperature) for seed in (3, 4, 9)]
        driver.finish()
    whole, ended, other = (driver.result(handle).token_ids for handle in handles)
    assert list(whole) == SCRIPTS[3][:20] and list(ended[:17]) == SCRIPTS[4]
    assert other == free and list(free) != SCRIPTS[3][:20], "the model would not say it"
    assert driver.core.stats().steps_by_reason["ahead"] > 10, "tokens stay lazy"


def test_drafts_are_verified_with_the_script(tiny: Any) -> None:
    driver = Driver(tiny("llama"), speculate=False)
    script, kinds = SCRIPTS[3], []
    with use_scripts(SCRIPTS):
        handle = driver.add(tokens_of(9), 24, seed=3)
        while not driver.core.idle:
            for job in driver.core.scheduler.jobs:
                right = script[job.num_generated : job.num_generated + 5]
                driver.core.scheduler.set_drafts(job.id, [*right[:3], *(token ^ 1 for token in right[3:])])
            driver.core.step()
            kinds += [plan.kind for plan in driver.core._in_flight]
    done, drafts = driver.result(handle), driver.core.stats().speculation
    assert list(done.token_ids) == script and StepKind.MIXED in kinds
    assert drafts.drafted > drafts.accepted > 8 and done.usage.accepted_tokens == drafts.accepted


def test_the_engines_choose_for_themselves_again_afterwards() -> None:
    assert runner.BatchSampler is BatchSampler
    with pytest.raises(ZeroDivisionError), use_scripts(SCRIPTS):
        assert runner.BatchSampler is not BatchSampler
        raise ZeroDivisionError
    assert runner.BatchSampler is BatchSampler
