"""Requests are counted once, under names that the server knows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.server.metrics import MOST_MODELS, OTHER, AnswerCounts, Histogram, Tally
from cortexmlx.server.settings import LoggedRequest
from cortexmlx.types.request import Completion, FinishReason, Timings, Usage


def answer(tokens: int, ttft: float, total: float, reason: FinishReason = FinishReason.STOP) -> Completion:
    timings = Timings(queued=ttft / 2, ttft=ttft, total=total, prefill_tokens_per_second=1, decode_tokens_per_second=1)
    return Completion("x", tuple(range(tokens)), reason, Usage(3, tokens), timings)


@given(st.lists(st.floats(0, 10)))
def test_a_histogram_has_every_duration_at_most_its_bound(durations: list[float]) -> None:
    histogram = Histogram((0.1, 1.0, 5.0))
    for seconds in durations:
        histogram.add(seconds)
    below = [0, *(sum(seconds <= bound for seconds in durations) for bound in histogram.bounds), len(durations)]
    assert histogram.counts == [after - before for before, after in pairwise(below)]
    assert histogram.sum == pytest.approx(sum(durations))


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/v1/completions", "/v1/completions"),
        ("/v1/models", "/v1/models"),
        ("/v1/models/anything", "/v1/models"),
        ("/", "/"),
        ("/v1/completions/", "/v1/completions"),
        ("/nothing", OTHER),
        ("/nothing/v1/models", OTHER),
        ("", OTHER),
        ('/"}\n', OTHER),
    ],
)
def test_paths_of_clients_are_no_labels(path: str, known: str) -> None:
    tally = Tally(("/v1/completions", "/v1/models", "/"))
    tally.count_reply(LoggedRequest("GET", path, 404, 0.1, None), path)
    assert tally.snapshot()[0] == {(known, 404): 1}


def test_answers_are_counted_by_model_and_reason() -> None:
    tally = Tally(())
    two = answer(5, 0.2, 1.0)
    object.__setattr__(two, "others", (answer(1, 0.3, 0.3, FinishReason.LENGTH),))
    tally.count_answers("a", [two, answer(3, 0.1, 0.5)], 0, 0)
    tally.count_answers("a", (), 1, 2)
    tally.count_answers("b", [answer(0, 0.0, 0.0, FinishReason.CANCELLED)], 0, 0)
    models = tally.snapshot()[1]
    assert +models["a"].reasons == {"stop": 2, "length": 1, "error": 1, "cancelled": 2}
    assert (sum(models["a"].first_token.counts), sum(models["a"].each_token.counts)) == (3, 2)
    assert models["a"].each_token.sum == pytest.approx(0.8 / 4 + 0.4 / 2) and models["a"].whole.sum == 1.8
    assert +models["b"].reasons == {"cancelled": 1} and sum(models["b"].whole.counts) == 0, "no token, no time"


def test_what_was_taken_stays_as_it_was() -> None:
    tally = Tally(())
    tally.count_answers("a", [answer(2, 0.1, 0.2)], 0, 0)
    before: dict[str, AnswerCounts] = tally.snapshot()[1]
    tally.count_answers("a", [answer(2, 0.1, 0.2)], 0, 0)
    assert sum(before["a"].whole.counts) == 1 and before["a"].reasons["stop"] == 1
    assert sum(tally.snapshot()[1]["a"].whole.counts) == 2


def test_there_are_not_more_models_than_a_scraper_can_hold() -> None:
    tally = Tally(())
    for number in range(MOST_MODELS + 50):
        tally.count_answers(f"model {number}", [answer(1, 0.1, 0.1)], 0, 0)
    models = tally.snapshot()[1]
    assert len(models) == MOST_MODELS + 1 and models[OTHER].reasons["stop"] == 50
