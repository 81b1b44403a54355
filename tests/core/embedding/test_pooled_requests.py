"""Requests without answers: how many are ahead, and what ends them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cortexmlx.core.embedding import PoolingPrompt, run_pooling
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.open_requests import OpenRequests
from cortexmlx.core.worker import Submission
from cortexmlx.errors import EmbeddingRefused, EngineClosed
from cortexmlx.types.embeddings import PoolingSpec
from cortexmlx.types.request import Completion, FinishReason, RequestId, Timings, TokenEvent, Usage


class Desk:
    """Takes submissions, and ends those that a test wants to end."""

    def __init__(self) -> None:
        self.handles: list[RequestHandle] = []
        self.groups: list[int] = []
        self.cancelled: list[int] = []
        self.submissions: list[Submission] = []
        self.vector = np.array([1.0, 2.0], np.float32)

    def submit(self, submissions: Iterable[Submission], handles: list[RequestHandle]) -> None:
        group = list(submissions)
        self.groups.append(len(group))
        for submission in group:
            number = RequestId(len(self.handles))
            handle = RequestHandle(number, self.cancelled.append, check_thread=lambda: self.end(self.next))
            self.handles.append(handle)
            self.submissions.append(submission)
            handles.append(handle)

    @property
    def next(self) -> int:
        return next(i for i, handle in enumerate(self.handles) if not handle.ended)

    def end(self, number: int, reason: FinishReason = FinishReason.STOP) -> None:
        self.handles[number].pooled = self.vector
        times = Timings(0, 0, 0, 0, 0)
        done = Completion("", (), reason, Usage(5, 0, number), times)
        self.handles[number].push(TokenEvent("", finish_reason=reason, completion=done))


def asked(count: int, tokens: int = 5) -> Iterator[PoolingPrompt]:
    return (PoolingPrompt((1,) * tokens, PoolingSpec(tokens - 1)) for _ in range(count))


def test_vectors_come_in_order_and_some_are_computed_ahead() -> None:
    desk = Desk()
    got = run_pooling(asked(20), desk.submit, None, "a client", tokens_ahead=25)
    assert next(got).cached == 0
    assert desk.groups == [5] and len(desk.handles) == 5
    assert [one.cached for one in got] == list(range(1, 20))
    assert desk.groups[1:] == [1] * 15 and not desk.cancelled
    request = desk.submissions[0].request
    assert request.client == "a client" and request.background and not request.cache
    assert request.pooling == PoolingSpec(4) and request.prompt == (1,) * 5


def test_a_text_longer_than_what_is_computed_ahead_is_computed_alone() -> None:
    desk = Desk()
    assert len(list(run_pooling(asked(3, 100), desk.submit, None, None, 10))) == 3
    assert desk.groups == [1, 1, 1]


def test_endless_texts_are_read_as_they_are_needed() -> None:
    desk = Desk()
    endless = (one for _ in itertools.count() for one in asked(1, 1))
    got = run_pooling(endless, desk.submit, None, None, 10**9)
    assert next(got).vector is desk.vector and len(desk.handles) == 512
    got.close()  # type: ignore[attr-defined]
    assert desk.cancelled == list(range(1, 512))


def test_what_the_texts_raise_cancels_the_rest() -> None:
    desk = Desk()

    def some() -> Iterator[PoolingPrompt]:
        yield from asked(3)
        raise EmbeddingRefused("text 3 is too long")

    with pytest.raises(EmbeddingRefused, match="text 3"):
        list(run_pooling(some(), desk.submit, None, None, 15))
    assert len(desk.handles) == 3 and all(number in desk.cancelled or desk.handles[number].ended for number in range(3))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_states_that_are_no_numbers_are_refused(value: float) -> None:
    desk = Desk()
    desk.vector = np.array([1.0, value], np.float32)
    with pytest.raises(EmbeddingRefused, match="NaN or infinite"):
        list(run_pooling(asked(2), desk.submit, None, None, 100))
    assert desk.cancelled == [1]


def test_a_cancelled_or_failed_request_is_no_vector() -> None:
    desk = Desk()
    with pytest.raises(EmbeddingRefused, match="was cancelled"):
        list(run_pooling(asked(2), _then(desk, lambda: desk.end(0, FinishReason.CANCELLED)), None, None, 100))
    other = Desk()
    with pytest.raises(EngineClosed):
        list(
            run_pooling(asked(2), _then(other, lambda: other.handles[0].fail(EngineClosed("closed"))), None, None, 100)
        )
    assert other.cancelled == [1]


def _then(desk: Desk, act: Callable[[], None]) -> Callable[[Iterable[Submission], list[RequestHandle]], None]:
    submit = desk.submit

    def submitting(submissions: Iterable[Submission], handles: list[RequestHandle]) -> None:
        submit(submissions, handles)
        act()

    return submitting


def test_what_was_computed_before_a_preemption_does_not_count() -> None:
    """The row begins again, and a step that was in flight meanwhile brings the sums of its earlier life."""
    taken: list[Any] = []
    answer = SimpleNamespace(
        job=SimpleNamespace(id=3, generation=1), group=SimpleNamespace(add_pooled_part=taken.append)
    )
    requests: Any = SimpleNamespace(answers={3: answer})
    for generation in (0, 1):
        segment = SimpleNamespace(job=3, generation=generation, pooled=range(1))
        plan: Any = SimpleNamespace(segments=[segment])
        OpenRequests._add_pooled_parts(requests, plan, [generation])  # type: ignore[list-item]
    assert taken == [1]
