"""Running a batch: a bounded number of requests in flight, records in input order or as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cortexmlx.cli.batch_input import BadLine, BatchRequest
from cortexmlx.cli.batch_output import Record, answer_record, error_record
from cortexmlx.errors import CortexError, EngineClosed
from cortexmlx.request import FinishReason, Message, RequestState

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.serving.handle import RequestHandle

FINAL = (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)
POLL_SECONDS = 0.005
IN_FLIGHT_PER_ROW = 4
"""Requests submitted per row of the engine: enough that a row which frees finds the next prompt ready."""
HELD_PER_ROW = 64
"""Requests per row that may be in memory in all: in input order, finished ones wait for the slowest before them."""


@dataclass(frozen=True)
class Submitted:
    """A request in the engine."""

    request: BatchRequest
    handle: RequestHandle

    @property
    def finished(self) -> bool:
        """All of its answers are there, or have failed."""
        return self.handle.state in FINAL


class BatchRun:
    """Feeds `items` to the engine and hands each finished record to `write`.

    `prepare` makes a prompt of a plain text. `done` and `tokens` count what has been written.
    """

    def __init__(
        self,
        engine: Engine,
        items: Iterable[BatchRequest | BadLine],
        write: Callable[[Record], None],
        prepare: Callable[[str], str | list[Message]],
        *,
        rows: int,
        ordered: bool,
    ) -> None:
        self.done = 0
        self.tokens = 0
        self.in_flight: dict[int, Submitted] = {}
        self._engine = engine
        self._items = enumerate(items)
        self._write = write
        self._prepare = prepare
        self._ordered = ordered
        self._most_in_flight = rows * IN_FLIGHT_PER_ROW
        self._most_held = rows * HELD_PER_ROW
        self._records: dict[int, Record] = {}
        self._next = 0
        self._exhausted = False
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time since the run was made."""
        return time.monotonic() - self._started

    def run(self, tick: Callable[[], None]) -> None:
        """Run to the end, calling `tick` between steps. An interrupt cancels what runs and keeps what has finished."""
        try:
            while not self._exhausted or self.in_flight or self._records:
                submitted, collected = self._submit(), self._collect()
                self._emit(in_order=self._ordered)
                tick()
                if not submitted and not collected:
                    time.sleep(POLL_SECONDS)
        except BaseException:
            with suppress(EngineClosed):
                self._collect()
            self._emit(in_order=False)
            for unfinished in self.in_flight.values():
                unfinished.handle.cancel()
            raise

    def _submit(self) -> bool:
        """Take items while there is room. True if one was taken."""
        taken = False
        while (
            not self._exhausted
            and len(self.in_flight) < self._most_in_flight
            and len(self.in_flight) + len(self._records) < self._most_held
        ):
            place, item = next(self._items, (-1, None))
            if item is None:
                self._exhausted = True
            elif isinstance(item, BadLine):
                self._records[place] = error_record(item, item.message)
            else:
                self._start(place, item)
            taken = True
        return taken

    def _start(self, place: int, request: BatchRequest) -> None:
        prompt = (
            self._prepare(request.prompt) if isinstance(request.prompt, str) and not request.raw else request.prompt
        )
        try:
            handle = self._engine.submit(prompt, request.params, patient=True)
        except EngineClosed:
            raise
        except CortexError as error:
            self._records[place] = error_record(request, str(error))
        else:
            self.in_flight[place] = Submitted(request, handle)

    def _collect(self) -> bool:
        """Turn finished requests into records. True if there was one."""
        finished = [place for place, submitted in self.in_flight.items() if submitted.finished]
        for place in finished:
            self._records[place] = self._record(self.in_flight.pop(place))
        return bool(finished)

    def _record(self, submitted: Submitted) -> Record:
        try:
            first = submitted.handle.result()
        except EngineClosed:
            raise
        except CortexError as error:
            return error_record(submitted.request, str(error), code=type(error).__name__)
        answers = (first, *first.others)
        self.tokens += sum(len(answer.token_ids) for answer in answers)
        if any(answer.finish_reason is FinishReason.CANCELLED for answer in answers):
            return error_record(submitted.request, "cancelled before it could finish", code="cancelled")
        return answer_record(submitted.request, answers, self._engine.info.name)

    def _emit(self, *, in_order: bool) -> None:
        """Write the records that may be written: in order up to the first that is missing, or all."""
        if not in_order:
            for place in sorted(self._records):
                self._write(self._records.pop(place))
                self.done += 1
        while self._next in self._records:
            self._write(self._records.pop(self._next))
            self._next += 1
            self.done += 1
