"""Log-probabilities of known tokens, such as a prompt's, from a few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.execution.boundary import TokenScores
from cortexmlx.execution.logits import log_total, top_tokens
from cortexmlx.types.arrays import IntArray

_LOGITS_AT_ONCE = 1 << 23
"""How many logits exist at a time: 32 MiB in float32, unless that is fewer than `_LEAST_ROWS` rows."""

_LEAST_ROWS, _MOST_ROWS = 16, 256


def rows_at_once(vocab_size: int) -> int:
    """Return how many rows of logits are computed at a time."""
    return max(_LEAST_ROWS, min(_MOST_ROWS, _LOGITS_AT_ONCE // vocab_size))


def scores_of(logits: Callable[[slice], mx.array], tokens: IntArray, top: int, at_once: int) -> TokenScores:
    """Return the log-probabilities of `tokens [n]`, and the `top` likeliest tokens at the place of each.

    `logits(part)` returns the logits before these tokens, `[len, vocab]`. The parts come in order. Each is processed
    before the next is asked for, and only its results are kept.
    """
    parts = (slice(first, first + at_once) for first in range(0, len(tokens), at_once))
    return joined([_scored(logits(part), tokens[part], top) for part in parts])


def joined(parts: Sequence[TokenScores]) -> TokenScores:
    """Return the scores of several parts, one after the other. There must be at least one part."""
    fields = ("logprobs", "top_ids", "top_logprobs")
    return TokenScores(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields))


def _scored(logits: mx.array, tokens: IntArray, top: int) -> TokenScores:
    logits = logits.astype(mx.float32)
    total = log_total(logits)
    own = (mx.take_along_axis(logits, mx.array(tokens)[:, None], axis=1) - total)[:, 0]
    if not top:
        none = np.zeros((len(tokens), 0))
        return TokenScores(_host(own), none.astype(np.int32), none.astype(np.float32))
    best, ids = top_tokens(logits, min(top, logits.shape[-1]))
    best = best - total
    mx.eval(own, best, ids)
    return TokenScores(_host(own), _host(ids), _host(best))


def _host(array: mx.array) -> Any:
    return np.array(array)
