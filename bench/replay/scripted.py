"""Scripted answers: a real model computes all steps and samples tokens, and then a script's tokens replace the sampled
ones.

A small model left alone soon repeats itself, which flatters whoever guesses its next tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import numpy as np

from cortexmlx.execution import runner
from cortexmlx.execution.boundary import TokenMask
from cortexmlx.execution.sampling import BatchSampler, SampledTokens, TokenIndex
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.arrays import IntArray
from cortexmlx.types.sampling_params import LogitsProcessor

Scripts = Mapping[int, Sequence[int]]
"""The tokens of an answer, by the seed of its request. Other requests, and what comes after a script, are free."""

_FREE = -1


class ScriptedSampler:
    """A `BatchSampler` that replaces sampled tokens by a script's. Penalties would count the model's own tokens."""

    def __init__(
        self,
        scripts: Scripts,
        rows: Sequence[SamplingRow],
        vocab_size: int,
        processors: Mapping[JobId, Sequence[LogitsProcessor]],
    ) -> None:
        self._sampler = BatchSampler(rows, vocab_size, processors)
        self._scripts = [scripts.get(row.seed, ()) for row in rows]

    def __call__(
        self,
        logits: mx.array,
        token_index: TokenIndex,
        live_flags: Sequence[bool] | None = None,
        mask: TokenMask | None = None,
    ) -> SampledTokens:
        """See `BatchSampler`. The tokens stay lazy, and depend on the choice that was computed."""
        sampled = self._sampler(logits, token_index, live_flags, mask)
        script_tokens = mx.array(self._script_tokens(token_index))
        return replace(sampled, tokens=mx.where(script_tokens == _FREE, sampled.tokens, script_tokens))

    def _script_tokens(self, token_index: TokenIndex) -> IntArray:
        """Return each row's next script token, or `_FREE` where its script has ended."""
        script_positions = zip(self._scripts, token_index.tolist(), strict=True)
        return np.array(
            [script[position] if position < len(script) else _FREE for script, position in script_positions], np.int32
        )


@contextmanager
def use_scripts(scripts: Scripts) -> Iterator[None]:
    """Make all engines of this process take the scripts' tokens. No request may run when the context begins or ends."""
    names = vars(runner)
    original_sampler = names["BatchSampler"]
    names["BatchSampler"] = lambda *arguments: ScriptedSampler(scripts, *arguments)
    try:
        yield
    finally:
        names["BatchSampler"] = original_sampler
