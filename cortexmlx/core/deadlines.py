"""Deadlines: when requests time out."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

from cortexmlx.errors import InvalidRequest, RequestTimeout
from cortexmlx.types.request import QueuedRequest, RequestId, RequestState
from cortexmlx.types.sampling_params import python_number

_MAX_SECONDS = 1e9

_FEW = 16


class Deadlines:
    """The deadlines of requests, on the performance counter, in the heap `pending`. Requests that have ended stay in
    it until they come to the top, or make up more than half of it.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[float, RequestId]] = []

    def add(self, request: RequestId, deadline: float) -> None:
        """Set the time by which a request must have ended."""
        heapq.heappush(self.pending, (deadline, request))

    def pop_passed(self, now: float, running_ids: Collection[RequestId]) -> Iterator[RequestId]:
        """Remove the deadlines up to `now`, and yield their requests that are in `running_ids`."""
        if len(self.pending) > 2 * len(running_ids) + _FEW:
            self.pending = [each for each in self.pending if each[1] in running_ids]
            heapq.heapify(self.pending)
        while self.pending and (self.pending[0][0] <= now or self.pending[0][1] not in running_ids):
            _, request = heapq.heappop(self.pending)
            if request in running_ids:
                yield request


def checked_timeout(timeout: float | None, name: str = "timeout") -> float | None:
    """Return `timeout` as an int or float, or None. Raises InvalidRequest for any other value."""
    seconds: float | None = python_number(timeout)
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (number and 0 < seconds <= _MAX_SECONDS):
        raise InvalidRequest(f"{name} is {seconds!r}, but must be a number of seconds in (0, 1e9] or None")
    return seconds


def timeout_error(request: QueuedRequest, state: RequestState, generated_count: int) -> RequestTimeout:
    """Return the error for a request that has timed out with `generated_count` tokens."""
    return RequestTimeout(
        f"the request was not finished after {request.timeout:g} s: it was {state.value}, with {generated_count} "
        f"tokens for a prompt of {len(request.prompt)}. Give it more time, ask for fewer tokens, or stream to keep "
        "what comes"
    )
