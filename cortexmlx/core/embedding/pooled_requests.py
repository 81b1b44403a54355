"""Submits requests without answers, some ahead of the one that is waited for, and collects their vectors in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cortexmlx.core.answers import NAN_ADVICE
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.text.stops import Stops
from cortexmlx.core.worker import Submission
from cortexmlx.errors import EmbeddingRefused
from cortexmlx.execution.boundary import Vector
from cortexmlx.types.embeddings import Pooled
from cortexmlx.types.request import FinishReason, QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams

_PARAMS = SamplingParams(max_tokens=1)
_STOPS = Stops.of(_PARAMS, (), None)

_MOST_AHEAD = 512
"""Requests that are submitted and not yet returned at most."""


@dataclass(frozen=True)
class Asked:
    """A prompt, and what is asked of its states."""

    tokens: tuple[int, ...]
    pooled: Pooled


@dataclass(frozen=True)
class Got:
    """What came of it: the sum of its states, or its logits, and how many of its tokens were found cached."""

    vector: Vector
    cached: int


def vectors_of(
    asked: Iterable[Asked],
    submit: Callable[[Iterable[Submission], list[RequestHandle]], None],
    owner: object,
    client: str | None,
    tokens_ahead: int,
) -> Iterator[Got]:
    """Yield what comes of each prompt, in order. `submit` is that of `Worker`; the requests keep `owner` alive.

    Requests of about `tokens_ahead` tokens are computed ahead of the one that is returned next. Whatever ends the
    iteration early cancels the rest. Raises what `asked` raises, and what ends a request.
    """
    waiting: deque[tuple[RequestHandle, int]] = deque()
    rest, more, ahead = iter(asked), True, 0
    try:
        while True:
            group: list[Submission] = []
            sizes: list[int] = []
            while more and ahead < tokens_ahead and len(waiting) + len(group) < _MOST_AHEAD:
                one = next(rest, None)
                if one is None:
                    more = False
                    break
                group.append(_submission(one, owner, client))
                sizes.append(len(one.tokens))
                ahead += sizes[-1]
            _start(group, sizes, submit, waiting)
            if not waiting:
                return
            handle, size = waiting[0]
            done = handle.result()
            waiting.popleft()
            ahead -= size
            vector = handle.pooled
            if done.finish_reason is FinishReason.CANCELLED or vector is None:
                raise EmbeddingRefused("the request was cancelled before its text was computed: ask again")
            if not np.isfinite(vector).all():
                raise EmbeddingRefused(f"the model's states are NaN or infinite. {NAN_ADVICE}")
            yield Got(vector, done.usage.cached_tokens)
    finally:
        for handle, _ in waiting:
            handle.cancel()


def _start(
    group: list[Submission],
    sizes: list[int],
    submit: Callable[[Iterable[Submission], list[RequestHandle]], None],
    waiting: deque[tuple[RequestHandle, int]],
) -> None:
    handles: list[RequestHandle] = []
    try:
        if group:
            submit(group, handles)
    finally:  # what an interrupt finds submitted can be cancelled
        waiting.extend(zip(handles, sizes, strict=False))


def _submission(one: Asked, owner: object, client: str | None) -> Submission:
    request = QueuedRequest(
        one.tokens,
        _PARAMS,
        submitted=time.perf_counter(),
        client=client,
        background=True,
        cache=one.pooled.shared > 0,
        pooled=one.pooled,
    )
    return Submission(request, _STOPS, owner=owner)
