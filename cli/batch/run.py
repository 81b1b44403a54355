"""Running a batch: requests through the engine, records in input order or as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import tee
from typing import TYPE_CHECKING, Any

from cortexmlx.cli.batch.input import BadLine, BatchRequest
from cortexmlx.cli.batch.output import Record, answer_record, error_record
from cortexmlx.errors import CortexError, InvalidRequest, PromptTooLong
from cortexmlx.messages import ChatPrompt
from cortexmlx.request import Completion, FinishReason, Message, SamplingParams

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.serving.prompt import Prompt

HELD_PER_ROW = 64
"""Requests per row that may be in memory in all: in input order, finished ones wait for the slowest before them."""

NOTHING: Prompt = ()
"""A bad line goes to the engine as a prompt without tokens: it ends at once, in its place among the others."""


class BatchRun:
    """Feeds `items` to the engine and hands each finished record to `write`.

    `prepare` makes a prompt of a plain text. `done` and `tokens` count what has been written.
    """

    def __init__(
        self,
        engine: Engine,
        items: Iterable[BatchRequest | BadLine],
        write: Callable[[Record], None],
        prepare: Callable[[str], str | list[Message] | ChatPrompt],
        *,
        rows: int,
        ordered: bool,
    ) -> None:
        self.done = 0
        self.tokens = 0
        self._engine = engine
        self._items = items
        self._write = write
        self._prepare = prepare
        self._ordered = ordered
        self._most_held = rows * HELD_PER_ROW
        self._asked: dict[int, BatchRequest | BadLine] = {}
        self._records: dict[int, Record] = {}
        self._next = 0
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time since the run was made."""
        return time.monotonic() - self._started

    def run(self) -> None:
        """Run to the end. An interrupt cancels what runs and keeps what has finished."""
        prompts, params = tee(self._read())
        completed = self._engine.as_completed(
            map(self._prompt, prompts), map(_params, params), window=self._most_held if self._ordered else None
        )
        try:
            for place, result in completed:
                self._records[place] = self._record(place, result)
                self._emit(in_order=self._ordered)
        except BaseException:
            completed.close()
            for place, result in completed.finished():
                if not _cancelled(result):
                    self._records[place] = self._record(place, result)
            self._emit(in_order=False)
            raise

    def _read(self) -> Iterator[BatchRequest | BadLine]:
        for place, item in enumerate(self._items):
            self._asked[place] = item
            yield item

    def _prompt(self, item: BatchRequest | BadLine) -> Prompt:
        if isinstance(item, BadLine):
            return NOTHING
        prompt = self._prepare(item.prompt) if isinstance(item.prompt, str) and not item.raw else item.prompt
        if not item.template_vars:
            return prompt
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return ChatPrompt(messages, item.template_vars)

    def _record(self, place: int, result: Completion | CortexError) -> Record:
        item = self._asked.pop(place)
        if isinstance(item, BadLine):
            return error_record(item, item.message)
        if isinstance(result, (InvalidRequest, PromptTooLong)):
            return error_record(item, str(result))
        if isinstance(result, CortexError):
            return error_record(item, str(result), code=type(result).__name__)
        answers = (result, *result.others)
        self.tokens += sum(len(answer.token_ids) for answer in answers)
        if _cancelled(result):
            return error_record(item, "cancelled before it could finish", code="cancelled")
        return answer_record(item, answers, self._engine.info.name)

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


def _params(item: BatchRequest | BadLine) -> SamplingParams:
    return SamplingParams() if isinstance(item, BadLine) else item.params


def _cancelled(result: Completion | CortexError) -> bool:
    """Whether an answer was cut short; one of several counts."""
    if isinstance(result, CortexError):
        return False
    return any(answer.finish_reason is FinishReason.CANCELLED for answer in (result, *result.others))
