"""The log-probabilities that a step computes, as arrays."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from cortexmlx.scheduling.builder import scoring_of
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import Segment
from support.scheduling.requests import job_of


def job_with(number: int, length: int, top: int | None) -> Job:
    job = job_of(number, [10 * number + place for place in range(length)], prompt_logprobs=top)
    job.request = replace(job.request, scored=() if top is None else job.request.prompt)
    return job


PIECES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 8), st.integers(1, 9), st.sampled_from([None, 0, 2, 5])), max_size=5
)


@given(PIECES)
def test_each_scored_token_stands_behind_the_row_that_has_its_logits(
    shape: list[tuple[int, int, int, int | None]],
) -> None:
    scheduled, segments, flat = [], [], []
    for number, (length, first, count, top) in enumerate(shape):
        job = job_with(number, length, top)
        first = min(first, length - 1)
        count = min(count, length - first)
        scheduled.append((job, count))
        segments.append(Segment(job.id, 0, first, count, scored=job.scored_after(first, first + count)))
        flat += [10 * number + first + place for place in range(count)]
    scoring = scoring_of(scheduled, segments)
    wanted = [
        (row, token + 1) for row, token in enumerate(flat) if token + 1 in scheduled[token // 10][0].request.scored
    ]
    if scoring is None:
        assert wanted == []
        return
    assert list(zip(scoring.rows.tolist(), scoring.tokens.tolist(), strict=True)) == wanted
    assert scoring.top == max(
        job.params.prompt_logprobs or 0 for (job, _), s in zip(scheduled, segments, strict=True) if s.scored
    )
