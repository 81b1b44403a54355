"""Answers that end where a smaller cache is full: as late as they can, and never before what they have."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cortexmlx.errors import PromptTooLong
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.scheduling.plan import Segment, StepPlan
from cortexmlx.scheduling.shortage import (
    LengthLimits,
    cache_full_error,
    largest_job,
    limit_answer,
    limit_stuck_jobs,
    out_of_memory_error,
)
from cortexmlx.types.request import RequestState
from cortexmlx.types.sampling_params import SamplingParams
from support.scheduling.requests import job_of

JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 30)), max_size=6)
"""Tokens of the prompt, of the answer at most, and of the answer so far."""


@given(JOBS, st.integers(1, 60))
def test_answers_are_as_long_as_the_cache_allows(sizes: list[tuple[int, int, int]], capacity: int) -> None:
    """The last token of an answer is never computed, so it needs no place."""
    jobs = [job_of(i, [1] * prompt, most) for i, (prompt, most, _) in enumerate(sizes)]
    for job, (_, most, so_far) in zip(jobs, sizes, strict=True):
        job.tokens += [2] * min(so_far, most)
    ended = limit_stuck_jobs(jobs, capacity)
    for job, (prompt, most, _) in zip(jobs, sizes, strict=True):
        places = [n for n in range(job.num_generated, most + 1) if prompt + n - 1 <= capacity]
        longest = max(places, default=job.num_generated)
        assert (job in ended) == (longest == job.num_generated)
        assert job.max_new_tokens == (longest if job in ended else most), "the cache may grow before others fill it"
        limit_answer(job, capacity)
        assert job.max_new_tokens == longest
    assert ended == [job for job in jobs if job in ended], "in their order"


def test_a_cache_that_is_large_enough_changes_nothing() -> None:
    job = job_of(0, [1] * 10, 7)
    limit_answer(job, 16)
    assert job.max_new_tokens == 7
    limit_answer(job, 15)
    assert job.max_new_tokens == 6


def plan_of(*segments: tuple[int, int]) -> StepPlan:
    """A plan, of which only the jobs and their counts matter here."""
    plan = StepPlan.__new__(StepPlan)
    object.__setattr__(plan, "segments", tuple(Segment(job, 0, 0, count) for job, count in segments))
    return plan


def test_the_largest_piece_takes_most_of_a_step_and_of_single_tokens_the_longest_row() -> None:
    jobs = [job_of(i, [1] * length, 9) for i, length in enumerate((5, 30, 20))]
    assert largest_job(plan_of((0, 1), (1, 4), (2, 16)), jobs) is jobs[2]
    assert largest_job(plan_of((0, 1), (2, 1)), jobs) is jobs[2]
    assert largest_job(plan_of((7, 40), (0, 1)), jobs) is jobs[0], "a job that has ended is not concerned"


def test_without_a_step_the_longest_of_the_rows_is_concerned_or_nobody() -> None:
    jobs = [job_of(i, [1] * length, 9) for i, length in enumerate((5, 30, 20))]
    for plan in (None, plan_of()):
        assert largest_job(plan, jobs) is None
    jobs[0].state = jobs[2].state = RequestState.DECODING
    assert largest_job(None, jobs) is jobs[2]


def test_the_errors_have_the_numbers_and_the_next_step() -> None:
    job = job_of(0, [1] * 12, 9)
    assert "12 tokens and the KV cache holds 8" in str(cache_full_error(job, 8))
    error = str(out_of_memory_error(job, "[malloc] Unable to allocate 4096 bytes."))
    assert "12 tokens" in error and "4096 bytes" in error and "prefill_budget" in error


def test_an_answer_that_drops_tokens_ends_where_it_cannot_drop_more() -> None:
    """Its cache holds less by now than a row has when it drops some."""
    keep = KeepPolicy(2, 5)
    job = job_of(0, list(range(20)), 1000, keep=keep)
    assert len(job.tokens) == 10
    limit_answer(job, 12)
    assert job.max_new_tokens == 1000
    limit_answer(job, 11)
    assert job.max_new_tokens == 2, "ten tokens and one that is computed, and the last needs no place"


def test_the_context_bounds_those_who_keep_all() -> None:
    whole, selective = LengthLimits(100), LengthLimits(100, keep=KeepPolicy(4, 20))
    plain, scored = SamplingParams(), SamplingParams(prompt_logprobs=0, max_tokens=0)
    assert whole.max_answer_tokens(40, 1000) == 60 and whole.max_answer_tokens(40, 50) == 11
    assert selective.max_answer_tokens(40, 44) == 2**31 - 41 and selective.max_answer_tokens(40, 43) == 4
    assert LengthLimits(100, 70, KeepPolicy(4, 20)).max_answer_tokens(40, 44) == 30
    with pytest.raises(PromptTooLong, match="has at least 100 tokens and the model's context is 100") as refusal:
        whole.check_prompt(100, 1000, plain, at_least=True)
    with pytest.raises(PromptTooLong, match="500 tokens and the KV cache holds 43") as cache_refusal:
        selective.check_prompt(500, 43, plain)
    with pytest.raises(PromptTooLong, match="a request may have 70 with its answer") as request_refusal:
        LengthLimits(100, 70, KeepPolicy(4, 20)).check_prompt(70, 1000, plain)
    numbers = [(each.value.tokens, each.value.limit) for each in (refusal, cache_refusal, request_refusal)]
    assert numbers == [(100, 99), (500, 43), (70, 69)]
    with pytest.raises(PromptTooLong, match="context is 100 and the KV cache holds 43: shorten") as both:
        whole.check_prompt(200, 43, plain)
    assert both.value.limit == 43
    whole.check_prompt(43, 43, plain)
    selective.check_prompt(10_000, 44, plain)
    selective.check_prompt(45, 44, scored)
    with pytest.raises(PromptTooLong, match=r"46 tokens and a row keeps 44 at most .* leave keep_last out"):
        selective.check_prompt(46, 44, scored)
    whole.check_prompt(100, 1000, scored)
