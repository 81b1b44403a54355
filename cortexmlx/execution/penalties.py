"""Changes to the logits before a token is chosen: bias, repetition, presence and frequency penalties.

All rows are changed at once, and only the logits of the tokens concerned. The histories are on the device, and grow by
the tokens just sampled, which the host has not read yet. A row that asks for nothing is passed through bit by bit.

One trick serves all three: the tokens of a row are listed in a rectangle `[R, width]`, and the new logits are *set*,
not added to. So a list may name a token twice, as long as both entries have the same new value, and short lists are
filled up with their own entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.types.arrays import TokenList
from cortexmlx.types.sampling_params import TokenBiases

C = TypeVar("C", bound="Change")


class Change(Protocol):
    """A change to the logits of rows."""

    def apply(self, logits: mx.array) -> mx.array:
        """Return `logits [R, V] float32`, changed."""


class RowSubset(Generic[C]):
    """A change to some rows of a batch. The other rows cost nothing: lists are as wide as that of the longest changed
    row.
    """

    def __init__(self, change: C, rows: Sequence[int], total: int) -> None:
        """`rows`, of `total` rows, are those that `change` changes."""
        self.change = change
        self._rows = None if len(rows) == total else mx.array(list(rows))

    def apply(self, logits: mx.array) -> mx.array:
        """Return `logits [R, V] float32` with those rows changed."""
        if self._rows is None:
            return self.change.apply(logits)
        changed = logits[:]
        changed[self._rows] = self.change.apply(logits[self._rows])
        return changed

    def of(self, tokens: mx.array) -> mx.array:
        """Return the tokens of these rows out of `tokens [R]`."""
        return tokens if self._rows is None else tokens[self._rows]


class LogitBias:
    """Adds a constant to single logits, as `logit_bias` of the OpenAI API."""

    def __init__(self, biases: Sequence[Mapping[int, float]]) -> None:
        plain = [bias if isinstance(bias, TokenBiases) else TokenBiases(bias) for bias in biases]
        tokens = [np.frombuffer(bias.ids, np.int32) for bias in plain]
        values = [np.frombuffer(bias.amounts, np.float32) for bias in plain]
        self._tokens = mx.array(_rectangle(tokens, np.int32))
        self._values = mx.array(_rectangle(values, np.float32))

    def apply(self, logits: mx.array) -> mx.array:
        """Return `logits [R, V] float32` with the biases added."""
        biased = mx.take_along_axis(logits, self._tokens, axis=1) + self._values
        return mx.put_along_axis(logits, self._tokens, biased, axis=1)


class RepetitionPenalty:
    """Makes the last `context` tokens of prompt and answer less likely.

    Positive logits are divided by the penalty, negative ones multiplied (Keskar et al., arXiv:1909.05858), once however
    often the token occurs. This is the rule of mlx-lm's `make_repetition_penalty`.
    """

    def __init__(self, histories: Sequence[TokenList], penalties: Sequence[float], contexts: Sequence[int]) -> None:
        # A row without a penalty needs one column, whatever it says.
        self._contexts = np.array([c if p != 1.0 else 1 for c, p in zip(contexts, penalties, strict=True)])
        last = [np.asarray(h[-c:], np.int32) for h, c in zip(histories, self._contexts, strict=True)]
        self._lengths = np.array([len(tokens) for tokens in last])
        width = max(1, int(self._lengths.max()))
        self._tokens = mx.array(np.stack([np.pad(tokens, (width - len(tokens), 0)) for tokens in last]))
        self._penalties = np.array(penalties, np.float32)[:, None]

    def apply(self, logits: mx.array) -> mx.array:
        """Return `logits [R, V] float32` with the tokens of each row's context penalised."""
        width = self._tokens.shape[1]
        tokens = self._tokens
        in_context = np.arange(width) >= width - self._lengths[:, None]
        if not in_context.all():
            tokens = mx.where(mx.array(in_context), tokens, tokens[:, -1:])
        penalties = mx.array(np.where(self._lengths[:, None] > 0, self._penalties, np.float32(1.0)))
        chosen = mx.take_along_axis(logits, tokens, axis=1)
        penalised = mx.where(chosen < 0, chosen * penalties, chosen / penalties)
        return mx.put_along_axis(logits, tokens, penalised, axis=1)

    def append(self, tokens: mx.array) -> None:
        """Add the tokens `[R] int32` that were just sampled to the histories."""
        self._tokens = mx.concatenate([self._tokens, tokens[:, None]], axis=1)[:, -int(self._contexts.max()) :]
        self._lengths = np.minimum(self._lengths + 1, self._contexts)


class CountPenalty:
    """Lowers the logits of all tokens generated so far, as the OpenAI API defines it.

    `logit -= count * frequency + (count > 0) * presence`, where `count` is how often the answer has the token already.
    """

    def __init__(self, outputs: Sequence[TokenList], presence: Sequence[float], frequency: Sequence[float]) -> None:
        wanted = [p != 0.0 or f != 0.0 for p, f in zip(presence, frequency, strict=True)]
        counted = [
            np.unique(np.asarray(output if asked else (), np.int32), return_counts=True)
            for output, asked in zip(outputs, wanted, strict=True)
        ]
        self._tokens = mx.array(_rectangle([tokens for tokens, _ in counted], np.int32))
        self._counts = mx.array(_rectangle([counts for _, counts in counted], np.int32))
        self._presence = mx.array(np.array(presence, np.float32)[:, None])
        self._frequency = mx.array(np.array(frequency, np.float32)[:, None])

    def apply(self, logits: mx.array) -> mx.array:
        """Return `logits [R, V] float32` less the penalties of the tokens generated so far."""
        penalties = self._counts * self._frequency + (self._counts > 0) * self._presence
        penalised = mx.take_along_axis(logits, self._tokens, axis=1) - penalties
        return mx.put_along_axis(logits, self._tokens, penalised, axis=1)

    def append(self, tokens: mx.array) -> None:
        """Count the tokens `[R] int32` that were just sampled."""
        tokens = tokens[:, None]
        same = self._tokens == tokens
        counts = self._counts + same
        seen = mx.max(mx.where(same, counts, 1), axis=1, keepdims=True)
        self._tokens = mx.concatenate([self._tokens, tokens], axis=1)
        self._counts = mx.concatenate([counts, seen], axis=1)


def _rectangle(rows: Sequence[npt.NDArray[np.generic]], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Return rows of different lengths as `[R, width >= 1]`, filled up with their first entry, or with zeros."""
    filled = np.zeros((len(rows), max(1, *(len(row) for row in rows))), dtype)
    for line, row in zip(filled, rows, strict=True):
        if len(row):
            line[: len(row)] = row
            line[len(row) :] = row[0]
    return filled
