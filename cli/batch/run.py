"""Run a batch: requests through the engine, records as they finish or in input order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import count, tee
from typing import TYPE_CHECKING, Protocol

from cortexmlx.cli.limits import cut_form
from cortexmlx.core.as_completed import NotYet
from cortexmlx.errors import CortexError, EngineClosed, HostLost, InvalidRequest
from cortexmlx.protocols.batch import INVALID, BadLine, BatchRequest, Recorder, error_record
from cortexmlx.protocols.error_text import error_text
from cortexmlx.protocols.openai.embeddings import EmbeddingRequest
from cortexmlx.protocols.openai.errors import is_refusal
from cortexmlx.protocols.request import Asked, Body, Request
from cortexmlx.system.waits import LONGEST_SECONDS
from cortexmlx.types.embeddings import Embeddings
from cortexmlx.types.request import Completion, FinishReason
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.core.prompt import Prompt
    from cortexmlx.engine import Engine

HELD_PER_ROW = 64
"""Prompts per row in memory, at most, while finished ones wait for slower ones before them."""

NOTHING: Prompt = ()
"""The prompt of a bad line: no tokens. The engine ends it at once, and it keeps its place among the others."""


class Writer(Protocol):
    """A destination of records."""

    def write(self, record: Body) -> None:
        """Take one record."""

    def sync(self) -> None:
        """Bring the records to the disk."""


@dataclass
class _Open:
    """An item of the input in progress, with the results of its prompts so far."""

    place: int
    item: BatchRequest | BadLine
    left: int
    refused: InvalidRequest | None = None
    results: dict[int, Completion | CortexError] = field(default_factory=dict)
    embedded: Future[Embeddings] | None = None
    """What computes the embeddings that the item asks for; None: it asks for answers."""

    @property
    def ready(self) -> bool:
        """Whether nothing but its results is waited for."""
        return self.embedded is None or self.embedded.done()


class BatchRun:
    """A run that feeds `items` to the engine and hands each finished record to `writer`.

    Records that finish together are synced together: one sync may take longer than many answers of the engine.

    - `items`: None stands for an item that has not arrived yet.
    - `prepare`: makes the engine's input of one prompt of a request, or raises InvalidRequest.
    - `in_order`: holds records back until those before them are written.
    - `done`, `failed`: how many items have finished, and how many of them are errors.
    - `tokens`, `cached`: generated tokens, and prompt tokens from the cache.
    - `cut`: how many answers end before their form is whole. They have a note.
    - `last`: seconds from the start to the last answer.
    - `broken`: whether a record could not be written.
    """

    def __init__(
        self,
        engine: Engine,
        items: Iterable[BatchRequest | BadLine | None],
        writer: Writer,
        prepare: Callable[[Request, Asked], Prompt],
        recorder: Recorder,
        *,
        rows: int,
        in_order: bool,
    ) -> None:
        self.done = 0
        self.failed = 0
        self.last = 0.0
        self.tokens = 0
        self.cached = 0
        self.cut = 0
        self._engine = engine
        self._items = items
        self._writer = writer
        self._prepare = prepare
        self._recorder = recorder
        self._in_order = in_order
        self._most_held = rows * HELD_PER_ROW
        self._embedding = ThreadPoolExecutor(rows, "cortexmlx-embed")
        self._asked: dict[int, tuple[_Open, int]] = {}
        self._records: dict[int, Body] = {}
        self._next = 0
        self.broken = False
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the run was made."""
        return time.monotonic() - self._started

    def run(self) -> None:
        """Run to the end. An interrupt cancels unfinished requests and keeps finished ones. Raises EngineClosed if the
        engine ends before the requests do.
        """
        prompts, params, adapters = tee(self._read(), 3)
        completed = self._engine.as_completed(
            (prompt for prompt, _, _ in prompts),
            (own for prompt, own, _ in params if not isinstance(prompt, NotYet)),
            window=self._most_held if self._in_order else None,
            adapter=(own for prompt, _, own in adapters if not isinstance(prompt, NotYet)),
        )
        try:
            for index, result in completed:
                self._take(index, result)
                for other, its_result in completed.finished():
                    self._take(other, its_result)
                self._emit(in_order=self._in_order)
            if self._asked:
                raise EngineClosed(f"the engine ended before {len(self._asked)} requests did: --resume asks them again")
        except BaseException:
            completed.close()
            if not self.broken:
                for index, result in completed.finished():
                    if not _cancelled(result) and self._asked[index][0].ready:
                        self._take(index, result)
                self._emit(in_order=False)
            raise
        finally:
            self._embedding.shutdown(wait=False, cancel_futures=True)  # the engine's end ends what is computed

    def _read(self) -> Iterator[tuple[Prompt | NotYet, SamplingParams, str | None]]:
        """Yield the prompts of all items in order, each with its parameters and its adapter."""
        index, places = count(), count()
        for item in self._items:
            if item is None:
                yield NotYet.NOT_YET, SamplingParams(), None
                continue
            place = next(places)
            if isinstance(item, BadLine):
                self._asked[next(index)] = _Open(place, item, left=1), 0
                yield NOTHING, SamplingParams(), None
                continue
            if isinstance(item.request, EmbeddingRequest):
                made = self._embedding.submit(self._embed, item.request)
                self._asked[next(index)] = _Open(place, item, left=1, embedded=made), 0
                yield NOTHING, SamplingParams(), None
                continue
            opened = _Open(place, item, left=len(item.request.prompts))
            for which, asked in enumerate(item.request.prompts):
                self._asked[next(index)] = opened, which
                yield self._prompt(opened, item.request, asked), item.request.params, item.request.adapter

    def _embed(self, asked: EmbeddingRequest) -> Embeddings:
        return self._engine.embed(
            asked.inputs, prompt=asked.prompt, dimensions=asked.dimensions, truncate=asked.truncate
        )

    def _prompt(self, opened: _Open, request: Request, asked: Asked) -> Prompt:
        try:
            return self._prepare(request, asked)
        except InvalidRequest as error:
            opened.refused = error
            return NOTHING

    def _take(self, index: int, result: Completion | CortexError) -> None:
        """Keep the result of a prompt. Make the record of an item when its last prompt has finished."""
        opened, which = self._asked.pop(index)
        opened.results[which] = result
        opened.left -= 1
        if isinstance(result, Completion):
            self.tokens += sum(len(answer.token_ids) for answer in (result, *result.others))
            self.cached += result.usage.cached_tokens
        if not opened.left:
            self._records[opened.place] = self._record(opened)
            self.done += 1
            if self._records[opened.place].get("error"):
                self.failed += 1
            else:
                self.last = self.seconds

    def _record(self, opened: _Open) -> Body:
        item, results = opened.item, [opened.results[which] for which in sorted(opened.results)]
        if isinstance(item, BadLine):
            return error_record(item, item.message)
        if opened.embedded is not None:
            return self._embedded(item, opened.embedded)
        if opened.refused is not None:
            return error_record(item, str(opened.refused))
        assert isinstance(item.request, Request)
        answers: list[tuple[Completion, ...]] = []
        for result in results:
            if isinstance(result, CortexError):
                return _refused(item, result)
            if _cancelled(result):
                return error_record(item, "cancelled before it could finish", code="cancelled")
            answers.append(tuple(self._noted(each, item.request.params) for each in (result, *result.others)))
        return self._recorder.answer(item, answers)

    def _noted(self, answer: Completion, params: SamplingParams) -> Completion:
        """Return an answer with a note if it ends before its form is whole."""
        cut = cut_form(replace(answer, others=()), params)
        self.cut += bool(cut)
        return replace(answer, notes=(*answer.notes, cut)) if cut else answer

    def _embedded(self, item: BatchRequest, embedded: Future[Embeddings]) -> Body:
        """Wait for the embeddings of a request, and return their record."""
        while not embedded.done():
            wait([embedded], LONGEST_SECONDS)  # a signal ends it soon, whenever it comes
        try:
            made = embedded.result()
        except (EngineClosed, HostLost):
            raise
        except CortexError as error:
            return _refused(item, error)
        self.cached += sum(made.cached_tokens)
        return self._recorder.embedded(item, made)

    def _emit(self, *, in_order: bool) -> None:
        """Write finished records: all of them, or `in_order` up to the first that is missing. A record is forgotten
        only after it is written, since an interrupt may come in between.
        """
        try:
            if not in_order:
                for place in sorted(self._records):
                    self._writer.write(self._records[place])
                    del self._records[place]
            while self._next in self._records:
                self._writer.write(self._records[self._next])
                del self._records[self._next]
                self._next += 1
            self._writer.sync()
        except Exception:
            self.broken = True
            raise


def _refused(item: BatchRequest, error: CortexError) -> Body:
    return error_record(item, error_text(error, options=True), INVALID if is_refusal(error) else type(error).__name__)


def _cancelled(result: Completion | CortexError) -> bool:
    """Return whether an answer, or one of several, was cancelled."""
    if isinstance(result, CortexError):
        return False
    return any(answer.finish_reason is FinishReason.CANCELLED for answer in (result, *result.others))
