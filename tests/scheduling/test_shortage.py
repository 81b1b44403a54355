"""Answers that end where a smaller cache is full: as late as they can, and never before what they have."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from cortexmlx.scheduling.shortage import fit, fit_all
from support.requests import job_of

JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 30)), max_size=6)
"""Tokens of the prompt, of the answer at most, and of the answer so far."""


@given(JOBS, st.integers(1, 60))
def test_answers_are_as_long_as_the_cache_allows(sizes: list[tuple[int, int, int]], capacity: int) -> None:
    """The last token of an answer is never computed, so it needs no place."""
    jobs = [job_of(i, [1] * prompt, most) for i, (prompt, most, _) in enumerate(sizes)]
    for job, (_, most, so_far) in zip(jobs, sizes, strict=True):
        job.tokens += [2] * min(so_far, most)
    ended = fit_all(jobs, capacity)
    for job, (prompt, most, _) in zip(jobs, sizes, strict=True):
        places = [n for n in range(job.generated, most + 1) if prompt + n - 1 <= capacity]
        assert job.max_new_tokens == max(places, default=job.generated)
        assert (job in ended) == (job.max_new_tokens == job.generated)
    assert ended == [job for job in jobs if job in ended], "in their order"


def test_a_cache_that_is_large_enough_changes_nothing() -> None:
    job = job_of(0, [1] * 10, 7)
    fit(job, 16)
    assert job.max_new_tokens == 7
    fit(job, 15)
    assert job.max_new_tokens == 6
