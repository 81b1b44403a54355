"""AsCompleted against every order in which requests may end: its bounds hold, and each prompt is answered once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.core.as_completed import AsCompleted
from cortexmlx.core.handle import RequestHandle
from cortexmlx.errors import EngineClosed, InvalidRequest, OutOfMemory, PromptTooLong
from cortexmlx.types.request import Completion, FinishReason, Timings, TokenEvent, Usage


def completion(text: str) -> Completion:
    return Completion(text, (), FinishReason.STOP, Usage(1, 0), Timings(0, 0, 0, 0, 0))


class Requests:
    """In the place of an engine: requests end when the test says so. Prompts under 0 are refused, and there is memory
    for the images of `room` others.
    """

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.running: dict[int, RequestHandle] = {}
        self.cancelled: list[int] = []
        self.groups: list[int] = []

    def check(self, prompt: Any, params: Any, listener: Any) -> Any:
        if prompt < 0:
            raise InvalidRequest(str(prompt))
        if not self.room:
            raise OutOfMemory("images")
        self.room -= 1
        return prompt, listener

    def submit(self, submissions: Iterable[Any], handles: list[RequestHandle]) -> None:
        before = len(handles)
        for prompt, listener in submissions:
            self.running[prompt] = RequestHandle(prompt, self.cancelled.append, listener)
            handles.append(self.running[prompt])
        self.groups.append(len(handles) - before)


@given(
    st.data(), st.integers(0, 30), st.integers(1, 6), st.none() | st.integers(1, 9), st.booleans(), st.integers(1, 9)
)
def test_whatever_the_order_each_prompt_is_answered_once_within_the_bounds(
    data: st.DataObject, count: int, ahead: int, window: int | None, together: bool, room: int
) -> None:
    requests = Requests(room)
    refused = data.draw(st.sets(st.integers(0, count)))
    prompts = [-1 - i if i in refused else i for i in range(count)]
    read: list[int] = []
    left = set(range(count))

    def reading() -> Iterable[Any]:
        for index, prompt in enumerate(prompts):
            read.append(index)
            assert len(read) - (count - len(left)) <= ahead
            assert window is None or index < min(left) + window
            yield prompt, None

    completed = AsCompleted(reading(), requests.check, requests.submit, ahead=ahead, window=window, together=together)
    while left:
        completed._submit_ahead()
        for index in data.draw(st.permutations(sorted(requests.running)))[: data.draw(st.integers(1, 4))]:
            handle = requests.running.pop(index)
            requests.room += 1
            if data.draw(st.booleans()):
                handle.push(TokenEvent("", completion=completion(str(index))))
            else:
                handle.fail(PromptTooLong(str(index)))
        index, result = next(completed)
        left.remove(index)
        if index in refused:
            assert isinstance(result, InvalidRequest)
        else:
            assert (result.text if isinstance(result, Completion) else str(result)) == str(index)
    assert list(completed) == [] and read == list(range(count))
    assert together or set(requests.groups) <= {1}


def test_what_has_ended_can_be_taken_after_closing_and_the_rest_is_cancelled() -> None:
    requests = Requests()
    completed = AsCompleted(((i, None) for i in range(4)), requests.check, requests.submit, ahead=4)  # type: ignore[misc]
    completed._submit_ahead()
    for index in (2, 0):
        requests.running[index].push(TokenEvent("", completion=completion(str(index))))
    completed.close()
    assert [(index, result.text) for index, result in completed.finished()] == [(2, "2"), (0, "0")]  # type: ignore[union-attr]
    assert {1, 3} <= set(requests.cancelled)
    assert list(completed) == [] and list(completed.finished()) == []


def test_what_has_ended_can_be_taken_after_the_engine_was_closed() -> None:
    """In whatever order they ended, and without what the closing engine ended."""
    requests = Requests()
    completed = AsCompleted(((i, None) for i in range(4)), requests.check, requests.submit, ahead=4)  # type: ignore[misc]
    completed._submit_ahead()
    requests.running[3].fail(EngineClosed("closed"))
    with pytest.raises(EngineClosed):
        next(completed)
    requests.running[1].fail(EngineClosed("closed"))
    for index in (2, 0):
        requests.running[index].push(TokenEvent("", completion=completion(str(index))))
    assert [(index, result.text) for index, result in completed.finished()] == [(2, "2"), (0, "0")]  # type: ignore[union-attr]


def test_a_request_that_says_twice_that_it_has_ended_is_handed_out_once() -> None:
    requests = Requests()
    completed = AsCompleted(((i, None) for i in range(2)), requests.check, requests.submit, ahead=2)  # type: ignore[misc]
    completed._submit_ahead()
    for index in (0, 0, 1):
        requests.running[index].push(TokenEvent("", completion=completion(str(index))))
    assert [index for index, _ in completed] == [0, 1]
