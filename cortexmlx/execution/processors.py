"""Logits processors: functions of the caller that change a row's logits before its token is chosen.

The signature is mlx-lm's, so its functions and those written for it work here:

    def processor(tokens: mx.array, logits: mx.array) -> mx.array

`tokens [n] int32` are prompt and answer so far, of which the newest may be lazy. `logits` are `[1, V] float32`. A
request's functions are called in their order, after its bias and penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from traceback import format_exception
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from cortexmlx.errors import LogitsProcessorError, with_causes
from cortexmlx.system.machine import is_refusal
from cortexmlx.types.arrays import dtype_name

if TYPE_CHECKING:
    from cortexmlx.types.sampling_params import LogitsProcessor


_LARGEST = 1e38
"""Replaces +inf, with which a processor chooses a token: differences of infinities are NaN."""


class LogitsProcessors:
    """The processors of the rows of a batch, and the tokens of those rows."""

    def __init__(self, processors: Sequence[Sequence[LogitsProcessor]], tokens: Sequence[Sequence[int]]) -> None:
        """`processors` are the functions of each row, and `tokens` the tokens of the rows that have functions."""
        asking = {index: functions for index, functions in enumerate(processors) if functions}
        self._rows = {index: _Row(functions, tokens[index]) for index, functions in asking.items()}

    def apply(
        self, logits: mx.array, live: Sequence[bool] | None = None
    ) -> tuple[mx.array, dict[int, LogitsProcessorError]]:
        """Return `logits [R, V] float32` with each live row changed by its processors, and the errors, by row. A row
        with an error keeps its logits. The processors of a row that is not `live`, or has failed before, are not
        called.
        """
        # Begun at once: it runs while the rows' own operations are built, and what those raise stays theirs.
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        parts, failures, end = [], {}, 0
        for index, row in self._rows.items():
            if row.failed or (live is not None and not live[index]):
                continue
            try:
                processed = row.processed(logits[index : index + 1])
            except LogitsProcessorError as error:
                failures[index] = _without_frames(error)
                row.failed = True
                continue
            parts += [logits[end:index], processed]
            end = index + 1
        return mx.concatenate([*parts, logits[end:]]), failures

    def append(self, tokens: mx.array) -> None:
        """Add the tokens `[R] int32` that were just sampled to the rows' tokens."""
        for index, row in self._rows.items():
            row.newer.append(tokens[index : index + 1])


class _Row:
    """One row: its functions, the tokens that were known at first, and those sampled since, each `[1]`."""

    def __init__(self, functions: Sequence[LogitsProcessor], tokens: Sequence[int]) -> None:
        self.functions = functions
        self.known = mx.array(np.array(tokens, np.int32))
        self.newer: list[mx.array] = []
        self.failed = False

    def processed(self, logits: mx.array) -> mx.array:
        """Return `logits [1, V] float32` after all functions. Raises LogitsProcessorError. A refusal of memory is
        raised unchanged, so that the step begins again with less.
        """
        for function in self.functions:
            name = getattr(function, "__qualname__", None) or type(function).__qualname__
            before = self.known.size + len(self.newer)
            try:
                # An array of its own for each call, which it may change.
                result = function(mx.concatenate([self.known, *self.newer]), logits[:])
                _check(result, logits.shape)
                result = mx.minimum(result.astype(mx.float32), _LARGEST)
                mx.async_eval(result)  # type: ignore[no-untyped-call]  # what only evaluation raises, is raised here
            except BaseException as error:  # whatever it is, it is of this row alone
                if is_refusal(error):
                    raise
                raise LogitsProcessorError(
                    f"logits processor {name} failed after {before} tokens: {type(error).__name__}: {error}"
                ) from error
            logits = result
        return logits


def _without_frames(error: LogitsProcessorError) -> LogitsProcessorError:
    """Return the error with its traceback as a note. Frames hold the step, its arrays and the model, and would keep
    them as long as the caller keeps the error.
    """
    assert error.__cause__ is not None
    error.add_note("".join(format_exception(error.__cause__)).rstrip())
    for each in with_causes(error):
        each.__traceback__ = None
    return error


def _check(result: object, shape: tuple[int, ...]) -> None:
    wanted = f"it must return float logits of shape {list(shape)}, as it was given"
    if not isinstance(result, mx.array):
        raise TypeError(f"{wanted}, but returned {type(result).__name__}")
    if result.shape != shape or not mx.issubdtype(result.dtype, mx.floating):
        kind = dtype_name(result.dtype)
        raise ValueError(f"{wanted}, but returned {kind} of shape {list(result.shape)}")
