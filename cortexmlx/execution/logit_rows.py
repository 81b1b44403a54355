"""Project only the tokens that need logits to the vocabulary.

mlx-lm's models project every token of a step, which for a prefill of hundreds of tokens and a vocabulary of tens of
thousands costs as much as several layers. Almost all of them end their body in a final norm, so the rows are picked
there: the norm is wrapped, and the wrapper drops the tokens that nobody asked for. A model whose final norm is not
found projects everything, and the rows are picked after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm")


class LogitRows:
    """Runs a model and returns the logits of chosen flat tokens."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._pick: _PickRows | None = None
        for body in (getattr(model, "model", None), getattr(model, "transformer", None)):
            name = next((n for n in _NORMS if isinstance(getattr(body, n, None), nn.Module)), None)
            if body is not None and name is not None:
                norm = getattr(body, name)
                self._pick = norm if isinstance(norm, _PickRows) else _PickRows(norm)
                setattr(body, name, self._pick)
                return

    def run(self, tokens: mx.array, caches: Sequence[Any], rows: npt.NDArray[np.int32]) -> mx.array:
        """Logits `[len(rows), vocab]` of the flat tokens `[T, 1]`; with no rows, logits that must not be evaluated."""
        everything = len(rows) in (0, tokens.shape[0])
        picked = None if everything else mx.array(rows)
        if self._pick is not None:
            self._pick.pick(picked)
        logits: mx.array = self._model(tokens, cache=caches)[:, 0]
        if self._pick is not None:
            self._pick.pick(None)
        if picked is not None and logits.shape[0] != len(rows):
            logits = logits[picked]
        return logits


class _PickRows(nn.Module):  # type: ignore[misc]
    """A final norm that first drops the rows nobody asked for."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self._picked: list[mx.array] = []

    def pick(self, rows: mx.array | None) -> None:
        """Keep only `rows` from now on; None keeps all."""
        self._picked[:] = [] if rows is None else [rows]

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.norm(x[self._picked[0]] if self._picked else x)
        return out
