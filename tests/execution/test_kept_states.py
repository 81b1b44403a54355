"""What is asked of prompts' tokens: sums of states and logits of tokens, from the states that a step keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.execution.prompt_scores import KeptStates, PromptResults, find_kept_rows, rows_at_once
from cortexmlx.scheduling.plan import Pooling, Scoring

WIDTH, VOCAB = 6, 9
HEAD = np.random.default_rng(1).standard_normal((WIDTH, VOCAB)).astype(np.float32)


@dataclass
class Plan:
    """What is read of a plan."""

    scoring: Scoring | None = None
    pooling: Pooling | None = None

    @property
    def has_prompt_results(self) -> bool:
        return self.scoring is not None or self.pooling is not None


@dataclass
class Rows:
    """A model whose last norm doubles."""

    projected: list[int] = field(default_factory=list)

    def hidden_states(self, kept: mx.array) -> mx.array:
        return 2 * kept

    def project(self, kept: mx.array) -> mx.array:
        self.projected.append(kept.shape[0])
        return 2 * kept @ mx.array(HEAD)


def states(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, WIDTH)).astype(np.float32)


def pooling(counts: list[int], weights: list[float], logits: list[tuple[int, ...]], begin: int = 0) -> Pooling:
    rows = np.arange(begin, begin + sum(counts), dtype=np.int32)
    return Pooling(rows, np.array(weights, np.float32), np.array(counts, np.int32), tuple(logits))


def results(kept: np.ndarray, plan: Plan, rows: Rows | None = None, vocab: int = VOCAB) -> PromptResults:
    rows = rows or Rows()
    return KeptStates(mx.array(kept), plan, rows, vocab).compute_results()  # type: ignore[arg-type]


def test_states_are_summed_up_with_their_weights() -> None:
    kept = states(6)
    asked = Plan(pooling=pooling([1, 3, 2], [1, 1, 1, 1, 4, 5], [(), (), ()]))
    found = results(kept, asked).pooled
    right = [2 * kept[0], 2 * kept[1:4].sum(0), 2 * (4 * kept[4] + 5 * kept[5])]
    assert all(part.dtype == np.float32 for part in found)
    np.testing.assert_allclose(found, right, rtol=1e-6)


def test_a_nan_state_of_one_text_is_in_no_other_sum() -> None:
    kept = states(4)
    kept[1] = np.nan
    found = results(kept, Plan(pooling=pooling([2, 2], [1] * 4, [(), ()]))).pooled
    assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()


def test_logits_are_those_after_the_last_token() -> None:
    kept = states(5)
    asked = Plan(pooling=pooling([2, 1, 2], [1] * 5, [(3, 1), (), (8,)]))
    found = results(kept, asked).pooled
    logits = 2 * kept @ HEAD
    np.testing.assert_allclose(found[0], logits[1, [3, 1]], rtol=1e-5)
    np.testing.assert_allclose(found[1], 2 * kept[2], rtol=1e-6)
    np.testing.assert_allclose(found[2], logits[4, [8]], rtol=1e-5)


def test_a_bounded_number_of_rows_is_projected_at_once() -> None:
    rows, vocab = Rows(), 1 << 19
    most = rows_at_once(vocab)
    count = 2 * most + 3
    found = results(states(count), Plan(pooling=pooling([1] * count, [1] * count, [(0,)] * count)), rows, vocab)
    assert rows.projected == [most, most, 3] and len(found.pooled) == count


def test_scores_and_sums_in_one_step() -> None:
    kept = states(5)
    scoring = Scoring(np.array([0, 1], np.int32), np.array([4, 2], np.int32), 1)
    asked = Plan(scoring, pooling([3], [1, 1, 1], [()], begin=2))
    rows = find_kept_rows(asked)  # type: ignore[arg-type]
    assert rows is not None and rows.tolist() == [0, 1, 2, 3, 4]
    found = results(kept, asked)
    logits = (2 * kept @ HEAD).astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert found.scores is not None
    np.testing.assert_allclose(found.scores.logprobs, exact[[0, 1], [4, 2]], atol=1e-5)
    np.testing.assert_allclose(found.pooled[0], 2 * kept[2:].sum(0), rtol=1e-6)


def test_a_step_that_asks_nothing_keeps_nothing() -> None:
    assert find_kept_rows(Plan()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_sums_are_made_in_float32(dtype: mx.Dtype) -> None:
    """Two thousand ones are two thousand, which neither half type can add one by one."""
    kept: Any = mx.ones((3000, WIDTH), dtype) / 2
    asked = Plan(pooling=pooling([3000], [1] * 3000, [()]))
    (found,) = KeptStates(kept, asked, Rows(), VOCAB).compute_results().pooled  # type: ignore[arg-type]
    assert (found == 3000).all() and found.dtype == np.float32
