"""cortexmlx as a contestant: runs requests through an Engine as its callers do, and records when each token comes
out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cortexmlx.bench.measure.trace import BenchRequest, RunTrace, Timestamp, TraceRecorder
from cortexmlx.core.handle import RequestHandle
from cortexmlx.engine import Engine
from cortexmlx.types.request import TokenEvent
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.core.core import EngineCore


def submit_together(
    engine: Engine, requests: Sequence[tuple[BenchRequest, Callable[[TokenEvent], None]]], background: bool
) -> list[RequestHandle]:
    """Queue all requests at once, as `Engine.generate_batch` does. Each has a listener on the engine's thread."""

    def submit(core: EngineCore) -> list[RequestHandle]:
        return [
            engine.submit(
                work.prompt,
                SamplingParams(max_tokens=work.max_tokens, ignore_eos=True),
                listener=listener,
                background=background,
            )
            for work, listener in requests
        ]

    return engine.inspect(submit)


class CortexContestant:
    """cortexmlx as a contestant: runs requests on an engine.

    With `watch_kv`, the trace also has the KV memory in use. With `background`, requests are those of a batch: only the
    end of the batch counts.
    """

    name = "cortexmlx"

    def __init__(self, engine: Engine, *, watch_kv: bool = False, background: bool = False) -> None:
        self.engine = engine
        self._watch_kv = watch_kv
        self._background = background

    def run(self, work: Sequence[BenchRequest]) -> RunTrace:
        """Run the requests to their end, and return their trace."""
        return self.start(work).finish()

    def start(self, work: Sequence[BenchRequest]) -> RequestsInFlight:
        """Submit the requests that arrive at once. `finish` and `wait_for_first_tokens` submit the others."""
        return RequestsInFlight(self.engine, work, self._watch_kv, self._background)

    def chat(self, turns: Sequence[BenchRequest]) -> RunTrace:
        """Run the turns of one conversation in order, and return the trace of the last.

        A turn's prompt is what the user adds. The engine gets the whole conversation each time, as a chat client sends
        it.
        """
        so_far: tuple[int, ...] = ()
        for turn in turns:
            trace = self.run([BenchRequest(so_far + turn.prompt, turn.max_tokens)])
            so_far += turn.prompt + trace.tokens[0]
        return trace


class RequestsInFlight:
    """Requests in progress. Each token is recorded on the engine's thread, with the time when it came out."""

    def __init__(
        self, engine: Engine, work: Sequence[BenchRequest], watch_kv: bool = False, background: bool = False
    ) -> None:
        self._engine = engine
        self._background = background
        self._work = work
        self._core = engine.inspect(lambda core: core)
        self._watch_kv = watch_kv
        self._handles: list[RequestHandle] = []
        self._waiting_for_first = len(work)
        self._running_count = len(work)
        self._all_have_tokens, self._all_done = threading.Event(), threading.Event()
        self._arrivals = {after_tokens: threading.Event() for after_tokens in {w.after_tokens for w in work}}
        self._recorder = TraceRecorder(work)
        self._submit_after(0)

    def wait_for_first_tokens(self) -> None:
        """Wait until every request has its first token."""
        self._submit_late()
        self._all_have_tokens.wait()

    def finish(self) -> RunTrace:
        """Wait for the end of all requests, and return their trace. Raises the error of the first one that failed."""
        self._submit_late()
        self._all_done.wait()
        for handle in self._handles:
            handle.result(0)
        return self._recorder.make_trace()

    def _submit_late(self) -> None:
        """Submit the requests that arrive later, each when the first request has enough tokens."""
        while self._arrivals:
            after_tokens = min(self._arrivals)
            while not self._arrivals[after_tokens].wait(0.05):
                if self._all_done.is_set():
                    return
            self._submit_after(after_tokens)

    def _submit_after(self, after_tokens: int) -> None:
        """Submit the requests that wait until the first one has `after_tokens` tokens."""
        requests = [i for i, work in enumerate(self._work) if work.after_tokens == after_tokens]
        for request in requests:
            self._recorder.record_submission(request)
        submissions = [(self._work[i], self._make_listener(i)) for i in requests]
        self._handles += submit_together(self._engine, submissions, self._background)
        self._arrivals.pop(after_tokens, None)

    def _make_listener(self, request: int) -> Callable[[TokenEvent], None]:
        def listen(event: TokenEvent) -> None:
            if event.token_id is not None:
                self._record_token(request, event.token_id)
            if event.error is not None or event.completion is not None:
                self._running_count -= 1
                if event.error is not None or not self._running_count:
                    self._all_have_tokens.set()
                    self._all_done.set()

        return listen

    def _record_token(self, request: int, token: int) -> None:
        """Record a token of a request, and wake the threads that wait for it."""
        count = self._recorder.record_token(request, token, Timestamp.now())
        if count == 1:
            self._waiting_for_first -= 1
            if not self._waiting_for_first:
                self._all_have_tokens.set()
        if request == 0 and (arrival := self._arrivals.get(count)) is not None:
            arrival.set()
        if self._watch_kv:
            self._recorder.kv_bytes = max(self._recorder.kv_bytes, self._core.kv_bytes_in_use)
