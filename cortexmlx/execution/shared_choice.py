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
from cortexmlx.execution.sampling import BatchSampler, SampledTokens, TokenIndex
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.sampling_params import LogitsProcessor


class SharedSampler:
    """Samples the tokens of a batch on rank 0 of `group`, as `BatchSampler` does, and sends them to the other ranks.
    Every rank must call its own SharedSampler in every step with logits. The collective that sends the tokens depends
    on each rank's logits, so that no rank skips the collectives of the forward pass, which rank 0 needs.
    """

    def __init__(
        self,
        group: mx.distributed.Group,
        rows: Sequence[SamplingRow],
        vocab_size: int,
        processors: Mapping[JobId, Sequence[LogitsProcessor]] = {},
    ) -> None:
        self._sampler = BatchSampler(rows, vocab_size, processors) if group.rank() == 0 else None
        self._group = group

    def __call__(
        self,
        logits: mx.array,
        token_index: TokenIndex,
        live_flags: Sequence[bool] | None = None,
        mask: TokenMask | None = None,
    ) -> SampledTokens:
        if self._sampler is None:
            sampled = SampledTokens(mx.depends(mx.zeros(logits.shape[:1], mx.int32), logits))
        else:
            sampled = self._sampler(logits, token_index, live_flags, mask)
        return replace(sampled, tokens=mx.distributed.all_sum(sampled.tokens, group=self._group))
