"""Rank 0 chooses, and the others add zeros to what it chose. `tests/distributed` sums over processes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.execution.boundary import TokenMask
from cortexmlx.execution.logits import NO_TOKEN
from cortexmlx.execution.sampling import BatchSampler
from cortexmlx.execution.shared_choice import SharedSampler
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.sampling_params import SamplingParams

ROWS = (
    SamplingRow(SamplingParams(temperature=0.0), 0, (1,), []),
    SamplingRow(SamplingParams(temperature=0.8, presence_penalty=0.5), 7, (1, 2), [3]),
    SamplingRow(SamplingParams(temperature=0.8, top_k=3, logprobs=2), 8, (1, 2), [3]),
)
INDEX = np.array([0, 1, 1], np.int32)


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[mx.array, Any]]]:
    """What is added over all ranks, which are not there: the sum is what this rank adds."""
    added: list[tuple[mx.array, Any]] = []

    def all_sum(array: mx.array, *, group: Any) -> mx.array:
        added.append((array, group))
        return array

    monkeypatch.setattr(mx.distributed, "all_sum", all_sum)
    yield added


def of_rank(rank: int) -> Any:
    return SimpleNamespace(rank=lambda: rank)


def logits(rows: int = 3) -> mx.array:
    return mx.array(np.random.default_rng(1).standard_normal((rows, 40)).astype(np.float32))


def test_rank_0_tells_what_the_sampler_of_one_process_chooses(summed: list[tuple[mx.array, Any]]) -> None:
    group = of_rank(0)
    mine, theirs = SharedSampler(group, ROWS, 40), BatchSampler(ROWS, 40)
    for step in range(3):
        mask = TokenMask(np.array([0], np.int32), np.array([[0b1000, 0]], np.uint32)) if step == 2 else None
        ours, one = mine(logits(), INDEX + step, None, mask), theirs(logits(), INDEX + step, None, mask)
        assert ours.tokens.tolist() == one.tokens.tolist() and ours.logprobs is not None
        assert ours.top_ids is not None and one.top_ids is not None
        assert ours.top_ids.tolist() == one.top_ids.tolist()
        array, of = summed[step]
        assert array.dtype == mx.int32 and of is group


def test_no_token_is_told_too(summed: list[tuple[mx.array, Any]]) -> None:
    nothing = mx.full((3, 40), -mx.inf)
    tokens = SharedSampler(of_rank(0), ROWS[:1] * 3, 40)(nothing, INDEX).tokens
    assert tokens.tolist() == [NO_TOKEN] * 3 == summed[0][0].tolist()


def test_other_ranks_add_zeros_and_have_no_sampler(summed: list[tuple[mx.array, Any]]) -> None:
    sampled = SharedSampler(of_rank(2), ROWS, 40)(logits(), INDEX)
    assert (sampled.tokens.tolist(), sampled.tokens.dtype, sampled.logprobs) == ([0, 0, 0], mx.int32, None)
    assert len(summed) == 1


def test_other_ranks_compute_their_logits_although_they_need_none(summed: list[tuple[mx.array, Any]]) -> None:
    """Rank 0 waits in the collectives that their logits are made by."""
    large = mx.zeros((64, 1024))
    mx.eval(large)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    lazy = (large[:, :, None] + mx.zeros((64, 1024, 16))).sum(axis=-1)  # 4 MB on the way
    mx.eval(SharedSampler(of_rank(1), ROWS, 1024)(lazy, INDEX).tokens)
    assert mx.get_peak_memory() - before > 1 << 20
