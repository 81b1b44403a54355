"""One rank chooses tokens for all. The others learn them by one sum of integers at the end of a step's graph.

All ranks get the same logits, up to rounding: chips differ, and so may a tie. So rank 0 alone has a sampler. The others
have no masks, no penalties and no draws: they add zeros. The sum is as lazy as the tokens of one process, so decode is
pipelined one step ahead. Its type is int32, in which a sum of one number and zeros is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from cortexmlx.execution.boundary import TokenMask
from cortexmlx.execution.sampling import BatchSampler, SampledTokens, Sampler, TokenIndex
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.sampling_params import LogitsProcessor


class SharedSamplerFactory:
    """Makes a rank's samplers; rank 0 chooses for all. Every rank must call its sampler in every step with logits."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group

    def __call__(
        self,
        rows: Sequence[SamplingRow],
        vocab_size: int,
        processors: Mapping[JobId, Sequence[LogitsProcessor]] = {},
    ) -> Sampler:
        """Return the sampler of some rows: see `BatchSampler`."""
        if self._group.rank() == 0:
            return _LeaderSampler(BatchSampler(rows, vocab_size, processors), self._group)
        return _FollowerSampler(self._group)


class _LeaderSampler:
    """The sampler of rank 0: chooses tokens, and sends them to the other ranks."""

    def __init__(self, sampler: BatchSampler, group: mx.distributed.Group) -> None:
        self._sampler, self._group = sampler, group

    def __call__(
        self,
        logits: mx.array,
        token_index: TokenIndex,
        live_flags: Sequence[bool] | None = None,
        mask: TokenMask | None = None,
    ) -> SampledTokens:
        sampled_tokens = self._sampler(logits, token_index, live_flags, mask)
        return replace(sampled_tokens, tokens=mx.distributed.all_sum(sampled_tokens.tokens, group=self._group))


class _FollowerSampler:
    """The sampler of any other rank: receives the tokens that rank 0 chooses. The sum depends on this rank's logits,
    although it has no use for them: rank 0's logits need this rank in every collective that comes before.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group

    def __call__(
        self,
        logits: mx.array,
        token_index: TokenIndex,
        live_flags: Sequence[bool] | None = None,
        mask: TokenMask | None = None,
    ) -> SampledTokens:
        nothing = mx.depends(mx.zeros(logits.shape[:1], mx.int32), logits)
        return SampledTokens(mx.distributed.all_sum(nothing, group=self._group))
