"""Cases of the scheduler that once went wrong, told as short stories on the shadow arena."""

from __future__ import annotations

import pytest

from cortexmlx.errors import PromptTooLong
from cortexmlx.types.request import FinishReason, RequestState
from support.scheduling.stage import Stage

VOCAB = 11


def test_the_token_just_sampled_is_not_counted_as_stored() -> None:
    """After the prefill of T tokens, T keys and values exist, not T + 1: the newest token's come with the next step."""
    stage = Stage(blocks=10)
    job = stage.ask([1, 2, 3, 4], 5)
    stage.steps(2)
    assert job.generated == 1 and stage.cache.tables.length(job.id) == job.num_computed_tokens
    first, second = stage.shadow.in_flight[0][0].segments[0], job.prompt_length
    assert first.first == second, "the first generated token stands right behind the prompt"
    stage.finish()


def test_many_short_prompts_share_one_step() -> None:
    stage = Stage(blocks=200, max_rows=16, prefill_budget=512)
    for i in range(16):
        stage.ask([i] * 20, 2)
    plan = stage.shadow.plan()
    assert plan is not None and len(plan.segments) == 16
    stage.finish()


def test_a_prompt_that_fills_the_cache_waits_for_no_copy_of_a_partial_match() -> None:
    """The cached block that matches in part cannot be kept beside the copy of it when every block is needed."""
    stage = Stage(blocks=2, block_size=2, max_rows=1, prefill_budget=1)
    first = stage.ask([1, 2, 3, 4], None)
    stage.ask([1, 2, 3, 4], None, fork_of=first)
    stage.finish()


def test_preempted_requests_resume_with_the_same_tokens() -> None:
    stage = Stage(blocks=12, share_prefixes=False)
    jobs = [stage.ask([i] * 5, 30) for i in range(3)]
    stage.finish()
    assert sum(j.preemptions for j in jobs) > 0
    assert jobs[0].preemptions == 0, "the oldest goes on"


def test_results_of_a_row_that_changed_its_tenant_are_dropped() -> None:
    stage = Stage(blocks=20)
    job = stage.ask([1, 2, 3], 30)
    stage.steps(4)
    assert stage.shadow.in_flight
    before = len(job.tokens)
    stage.scheduler.finish(job.id, FinishReason.CANCELLED, RequestState.CANCELLED)
    other = stage.ask([4, 5, 6, 7], 12)
    stage.finish()
    assert len(job.tokens) == before and other.generated == 12


@pytest.mark.parametrize(("tokens", "room"), [(41, "40"), (1000, "1000")])
def test_what_can_never_fit_is_refused_with_the_numbers(tokens: int, room: str) -> None:
    stage = Stage(blocks=10 if tokens == 41 else 400)
    with pytest.raises(PromptTooLong, match=rf"{tokens} tokens .*{room}"):
        stage.ask([1] * tokens)
    assert stage.scheduler.idle
