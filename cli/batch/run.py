"""Run a batch: requests through the engine, records as they finish or in input order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import count, tee
from typing import TYPE_CHECKING

from cortexmlx.cli.limits import incomplete_form_note
from cortexmlx.core.as_completed import PendingPrompt
from cortexmlx.errors import CortexError, EngineClosed, HostLost, InvalidRequest
from cortexmlx.protocols.batch import INVALID_REQUEST, BatchRequest, InvalidLine, RecordBuilder, error_record
from cortexmlx.protocols.error_text import error_text
from cortexmlx.protocols.openai.embeddings import EmbeddingRequest
from cortexmlx.protocols.openai.errors import is_client_error
from cortexmlx.protocols.request import Body, PromptInput, Request
from cortexmlx.system.waits import LONGEST_SECONDS
from cortexmlx.types.embeddings import Embeddings
from cortexmlx.types.request import Completion, FinishReason
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.cli.batch.files import BatchWriter
    from cortexmlx.core.prompt import Prompt
    from cortexmlx.engine import Engine

MAX_HELD_PER_ROW = 64
"""Prompts per row in memory, at most, while finished ones wait for slower ones before them."""

NAMED_FAILURES = 3
"""Failed lines that the summary names."""

EMPTY_PROMPT: Prompt = ()
"""The prompt of a bad line: no tokens. The engine ends it at once, and it keeps its place among the others."""


@dataclass
class _PendingItem:
    """An input item in progress, with the results of its prompts so far."""

    position: int
    item: BatchRequest | InvalidLine
    unfinished_count: int
    error: InvalidRequest | None = None
    results: dict[int, Completion | CortexError] = field(default_factory=dict)
    embeddings: Future[Embeddings] | None = None
    """What computes the embeddings that the item asks for; None: it asks for answers."""

    @property
    def is_ready(self) -> bool:
        """Whether the embeddings that the item asks for, if any, are computed."""
        return self.embeddings is None or self.embeddings.done()


class BatchRun:
    """One batch run: submits `items` to the engine and gives each finished record to `writer`.

    Records that finish together are synced together: one sync may take longer than many answers of the engine.

    - `items`: None stands for an item that has not arrived yet.
    - `prepare`: makes the engine's input of one prompt of a request, or raises InvalidRequest.
    - `in_order`: holds records back until those before them are written.
    - `done_count`, `failed_count`: how many items have finished and could be written; how many of them are errors.
    - `first_failures`: line and message of the first of these errors.
    - `tokens`, `cached_tokens`: generated tokens, and prompt tokens from the cache.
    - `cut_count`: how many answers end before their form is whole. They have a note.
    - `last_answer_seconds`: seconds from the start to the last answer.
    - `has_write_error`: whether a record could not be written.
    """

    def __init__(
        self,
        engine: Engine,
        items: Iterable[BatchRequest | InvalidLine | None],
        writer: BatchWriter,
        prepare: Callable[[Request, PromptInput], Prompt],
        recorder: RecordBuilder,
        *,
        rows: int,
        in_order: bool,
    ) -> None:
        self.done_count = 0
        self.failed_count = 0
        self.first_failures: list[tuple[int, str]] = []
        self.last_answer_seconds = 0.0
        self.tokens = 0
        self.cached_tokens = 0
        self.cut_count = 0
        self._engine = engine
        self._items = items
        self._writer = writer
        self._prepare = prepare
        self._recorder = recorder
        self._in_order = in_order
        self._most_held = rows * MAX_HELD_PER_ROW
        self._embedding = ThreadPoolExecutor(rows, "cortexmlx-embed")
        self._pending_prompts: dict[int, tuple[_PendingItem, int]] = {}
        self._records: dict[int, Body] = {}
        self._next_position = 0
        self.has_write_error = False
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the run was made."""
        return time.monotonic() - self._started

    def run(self) -> None:
        """Run all items. An interrupt keeps finished items only. Raises EngineClosed if the engine ends first."""
        prompts, params, adapters = tee(self._prompts(), 3)
        completions = self._engine.as_completed(
            (prompt for prompt, _, _ in prompts),
            (value for prompt, value, _ in params if not isinstance(prompt, PendingPrompt)),
            window=self._most_held if self._in_order else None,
            adapter=(own for prompt, _, own in adapters if not isinstance(prompt, PendingPrompt)),
        )
        try:
            for index, result in completions:
                self._store_result(index, result)
                for other_index, other_result in completions.finished():
                    self._store_result(other_index, other_result)
                self._write_records(in_order=self._in_order)
            if self._pending_prompts:
                raise EngineClosed(
                    f"the engine ended before {len(self._pending_prompts)} requests did: --resume asks them again"
                )
        except BaseException:
            completions.close()
            if not self.has_write_error:
                for index, result in completions.finished():
                    if not _is_cancelled(result) and self._pending_prompts[index][0].is_ready:
                        self._store_result(index, result)
                self._write_records(in_order=False)
            raise
        finally:
            self._embedding.shutdown(wait=False, cancel_futures=True)  # the engine's end ends what is computed

    def _prompts(self) -> Iterator[tuple[Prompt | PendingPrompt, SamplingParams, str | None]]:
        """Yield the prompts of all items in order, each with its sampling parameters and its adapter."""
        prompt_numbers, positions = count(), count()
        for item in self._items:
            if item is None:
                yield PendingPrompt.NOT_YET, SamplingParams(), None
                continue
            position = next(positions)
            request = None if isinstance(item, InvalidLine) else item.request
            if not isinstance(request, Request):
                future = None if request is None else self._embedding.submit(self._embed, request)
                pending_item = _PendingItem(position, item, unfinished_count=1, embeddings=future)
                self._pending_prompts[next(prompt_numbers)] = pending_item, 0
                yield EMPTY_PROMPT, SamplingParams(), None
                continue
            pending_item = _PendingItem(position, item, unfinished_count=len(request.prompts))
            for prompt_index, prompt_input in enumerate(request.prompts):
                self._pending_prompts[next(prompt_numbers)] = pending_item, prompt_index
                prompt = self._prepare_prompt(pending_item, request, prompt_input)
                yield prompt, request.params, request.adapter

    def _embed(self, request: EmbeddingRequest) -> Embeddings:
        return self._engine.embed(
            request.inputs, prompt=request.prompt, dimensions=request.dimensions, truncate=request.truncate
        )

    def _prepare_prompt(self, pending_item: _PendingItem, request: Request, prompt_input: PromptInput) -> Prompt:
        """Return the prompt to submit. If the request is invalid, return an empty prompt, to keep the place."""
        try:
            return self._prepare(request, prompt_input)
        except InvalidRequest as error:
            pending_item.error = error
            return EMPTY_PROMPT

    def _store_result(self, index: int, result: Completion | CortexError) -> None:
        """Store a prompt's result. Make the item's record when its last prompt has finished."""
        pending_item, prompt_index = self._pending_prompts.pop(index)
        pending_item.results[prompt_index] = result
        pending_item.unfinished_count -= 1
        if isinstance(result, Completion):
            self.tokens += sum(len(answer.token_ids) for answer in (result, *result.others))
            self.cached_tokens += result.usage.cached_tokens
        if not pending_item.unfinished_count:
            self._records[pending_item.position] = self._make_record(pending_item)
            self.done_count += 1
            if error := self._records[pending_item.position].get("error"):
                self.failed_count += 1
                failures = [*self.first_failures, (pending_item.item.line, error["message"])]
                self.first_failures = sorted(failures)[:NAMED_FAILURES]
            else:
                self.last_answer_seconds = self.seconds

    def _make_record(self, pending_item: _PendingItem) -> Body:
        item = pending_item.item
        results = [pending_item.results[prompt_index] for prompt_index in sorted(pending_item.results)]
        if isinstance(item, InvalidLine):
            return error_record(item, item.message)
        if pending_item.embeddings is not None:
            return self._embedding_record(item, pending_item.embeddings)
        if pending_item.error is not None:
            return error_record(item, str(pending_item.error))
        assert isinstance(item.request, Request)
        answers: list[tuple[Completion, ...]] = []
        for result in results:
            if isinstance(result, CortexError):
                return _refusal_record(item, result)
            if _is_cancelled(result):
                return error_record(item, "cancelled before it could finish", code="cancelled")
            answers.append(tuple(self._with_cut_note(each, item.request.params) for each in (result, *result.others)))
        return self._recorder.completion_record(item, answers)

    def _with_cut_note(self, answer: Completion, params: SamplingParams) -> Completion:
        """Return the answer, with a note if it ends before its structured output is complete."""
        cut_note = incomplete_form_note(replace(answer, others=()), params)
        self.cut_count += bool(cut_note)
        return replace(answer, notes=(*answer.notes, cut_note)) if cut_note else answer

    def _embedding_record(self, item: BatchRequest, future: Future[Embeddings]) -> Body:
        """Wait for a request's embeddings, and return their record."""
        while not future.done():
            wait([future], LONGEST_SECONDS)  # a signal ends it soon, whenever it comes
        try:
            embeddings = future.result()
        except (EngineClosed, HostLost):
            raise
        except CortexError as error:
            return _refusal_record(item, error)
        self.cached_tokens += sum(embeddings.cached_tokens)
        return self._recorder.embedding_record(item, embeddings)

    def _write_records(self, *, in_order: bool) -> None:
        """Write the finished records: all, or with `in_order` up to the first that is missing. A record is dropped
        from memory only after it is written, since an interrupt may come in between.
        """
        try:
            if not in_order:
                for position in sorted(self._records):
                    self._writer.write(self._records[position])
                    del self._records[position]
            while self._next_position in self._records:
                self._writer.write(self._records[self._next_position])
                del self._records[self._next_position]
                self._next_position += 1
            self._writer.sync()
        except Exception:
            self.has_write_error = True
            self.done_count -= len(self._records)
            self.failed_count -= sum(bool(record.get("error")) for record in self._records.values())
            raise


def _refusal_record(item: BatchRequest, error: CortexError) -> Body:
    """Return the error record of a request that the engine refused."""
    return error_record(
        item, error_text(error, options=True), INVALID_REQUEST if is_client_error(error) else type(error).__name__
    )


def _is_cancelled(result: Completion | CortexError) -> bool:
    """Return whether an answer, or one of its alternatives, was cancelled."""
    if isinstance(result, CortexError):
        return False
    return any(answer.finish_reason is FinishReason.CANCELLED for answer in (result, *result.others))
