"""Tiny models below float32, and judges of what they say.

An answer in half precision is judged by the same rounded weights computed in float32: what is left is the error of
half-precision arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from support.models.tiny import write_tiny

TOP = 5
"""Likeliest tokens of each place whose log-probabilities are compared."""

Likeliest = list[list[tuple[int, float]]]
"""Of each place of an answer, the likeliest tokens with their log-probabilities."""


def write_rounded(folder: Path, name: str, dtype: str, **changes: Any) -> tuple[Path, Path]:
    """Two folders of one tiny model whose weights are rounded to `dtype`: stored in it, and stored in float32."""
    stored = []
    for kept in (dtype, "float32"):
        path = write_tiny(folder / kept, name, **changes)
        file = str(path / "model.safetensors")
        weights = {key: w.astype(getattr(mx, dtype)).astype(getattr(mx, kept)) for key, w in mx.load(file).items()}
        mx.eval(weights)
        mx.save_safetensors(file, weights, metadata={"format": "mlx"})
        stored.append(path)
    return stored[0], stored[1]


def log_softmax(logits: mx.array) -> Any:
    """Log-probabilities `[places, vocab]` float64 of logits of any dtype."""
    values = np.array(logits.astype(mx.float32)).astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


def mlx_lm_answer(model: Any, prompt: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], Likeliest]:
    """mlx-lm's greedy tokens, and what its logits say (its own log-probabilities are rounded once more)."""
    from mlx_lm.generate import generate_step

    logits: list[mx.array] = []

    def seen(_: mx.array, row: mx.array) -> mx.array:
        logits.append(row)
        return row

    steps = generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens, logits_processors=[seen])
    tokens = tuple(int(token) for token, _ in steps)
    rows = log_softmax(mx.concatenate(logits[:max_tokens]))
    likeliest = np.argsort(-rows, axis=-1, kind="stable")[:, :TOP]
    return tokens, [[(int(t), float(row[t])) for t in best] for row, best in zip(rows, likeliest, strict=True)]


def errors(judge: Any, prompt: Sequence[int], tokens: Sequence[int], said: Likeliest) -> list[float]:
    """How far each log-probability of an answer lies from what `judge` says after the same tokens."""
    right = log_softmax(judge(mx.array([[*prompt, *tokens[:-1]]]))[0, len(prompt) - 1 :])
    return [abs(value - right[place, token]) for place, best in enumerate(said) for token, value in best]
