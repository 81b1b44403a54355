"""A job's place in the queue: by arrival, priority and background."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cortexmlx.scheduling.job import BACKGROUND_DELAY, SECONDS_PER_PRIORITY, Lane
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.types.request import RequestState
from support.scheduling.clockwork import Clockwork
from support.scheduling.requests import job_of


def test_a_high_priority_overtakes_but_a_low_one_does_not_wait_for_ever() -> None:
    clock = Clockwork(cost=1e-2, max_rows=1)
    low = clock.add(0, 8, tokens=4, priority=-1)
    clock.step()
    clock.add(1, 8, tokens=4, priority=-1)
    later = 2
    while 1 not in clock.first:
        if later < 5_000:
            clock.add(later, 8, tokens=4)
            later += 1
        clock.step(3)
    assert low.finish_reason is not None
    assert clock.first[2] < clock.first[1], "those of higher priority who came later went first"
    assert clock.first[1] < SECONDS_PER_PRIORITY * 2, "but not all of them"


@given(st.integers(1, 9), st.integers(1, 20), st.lists(st.integers(1, 5), min_size=20, max_size=20))
def test_every_token_behind_the_first_is_scored_once_however_it_is_cut(
    scored: int, length: int, counts: list[int]
) -> None:
    """Of a text whose last token need not be computed: pieces that begin no later than the first that is missing."""
    text = list(range(100, 101 + length))
    job = job_of(0, text[:-1])
    job.request = replace(job.request, scored_tokens=tuple(text))
    job.num_scored_tokens = min(scored, len(text))
    first, seen = job.num_reusable_tokens, []
    assert first == min(job.num_scored_tokens, length) - 1
    for count in counts:
        end = min(first + count, length)
        where = job.positions_to_score(first, end)
        assert all(first <= place - 1 < end for place in where), "its logits are computed in the piece"
        seen += where
        first = end
    assert seen == list(range(job.num_scored_tokens, len(text)))


def test_of_background_requests_the_longest_begin_first_and_watched_ones_before_them() -> None:
    works = Clockwork(cost=0.001, max_rows=1, target=None)
    works.add(0, 10, tokens=2)
    for request, tokens in enumerate((5, 300, 40), start=1):
        works.add(request, 10, tokens=tokens, background=True)
    works.now += BACKGROUND_DELAY / 2 - 1
    works.add(4, 10, tokens=10_000)
    assert sorted(range(5), key=works.until_first) == [0, 4, 2, 3, 1]


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_the_delay_of_background_requests_has_an_end(one: int, other: int) -> None:
    works = Clockwork(cost=0.001)
    early = works.add(0, 1, tokens=one, background=True)
    works.now += BACKGROUND_DELAY
    late = works.add(1, 1, tokens=other)
    assert early.order < late.order
    works.now -= BACKGROUND_DELAY / 2 + 1e-6
    assert works.add(2, 1, tokens=other).order < early.order


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_p": 0.5, "logit_bias": {3: 1.0}}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"logits_processors": [lambda tokens, logits: logits]}, True),
    ],
)
def test_the_tokens_so_far_are_needed_by_what_looks_at_them(params: dict[str, Any], needs: bool) -> None:
    assert job_of(0, [1, 2], **params).needs_history == needs


def test_a_lane_lives_while_its_job_decodes_and_has_not_been_away() -> None:
    job = job_of(0, [1, 2])
    lane = Lane(job, job.generation, 2)
    assert not lane.is_live
    job.state = RequestState.DECODING
    assert lane.is_live
    job.generation += 1
    assert not lane.is_live, "it was preempted, and decodes again in another row"


def test_what_a_job_has_generated_stands_behind_its_prompt() -> None:
    job = job_of(0, [1, 2, 3], max_tokens=4)
    job.state = RequestState.DECODING
    for planned in range(1, 5):
        assert job.can_decode
        job.tokens.append(9)
        job.num_planned_outputs = planned
    assert (job.output, job.num_generated, job.max_total_tokens) == ([9] * 4, 4, 7)
    assert not job.can_decode


def test_an_answer_is_whole_though_its_row_has_lost_a_part_of_it() -> None:
    job = job_of(0, [1, 2, 3], max_tokens=100, keep=KeepPolicy(4, 3))
    for token in range(4, 20):
        job.tokens.append(token)
        if len(job.tokens) > 10:
            job.drop_tokens()
        assert job.output == list(range(4, token + 1)) and job.num_generated == token - 3
    assert job.tokens == [1, 2, 3, 4, *range(14, 20)] and job.dropped_tokens == list(range(5, 14))
    assert (job.drops, job.kept_prompt_length, job.max_total_tokens) == (3, 3, 10)
    long = job_of(1, range(16), max_tokens=100, keep=KeepPolicy(4, 3))
    assert long.tokens == [0, 1, 2, 3, *range(10, 16)] and (
        long.drops,
        long.kept_prompt_length,
        long.num_generated,
    ) == (0, 10, 0)
