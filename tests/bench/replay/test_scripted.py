"""Scripted answers: the tokens of the script, whatever the model would choose, in every kind of step."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.bench.replay.scripted import use_scripts
from cortexmlx.execution import runner
from cortexmlx.execution.sampling import BatchSampler
from cortexmlx.scheduling.plan import StepKind
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of

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
