"""Bias and penalties against their definitions in float64, and mlx-lm's repetition penalty."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_repetition_penalty

from cortexmlx.execution.sampling import BatchSampler
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples
from support.engine.sampling_tools import Floats, random_logits, row


def penalised(logits: npt.NDArray[np.float32], r: SamplingRow) -> Floats:
    """The definition, one token at a time in float64."""
    p, out = r.params, logits.astype(np.float64)
    for token, bias in p.logit_bias.items():
        out[token] += bias
    for token in set([*r.prompt, *r.output][-p.repetition_context :]):
        out[token] = out[token] * p.repetition_penalty if out[token] < 0 else out[token] / p.repetition_penalty
    for token, count in Counter(r.output).items():
        out[token] -= count * p.frequency_penalty + p.presence_penalty
    return out


GREEDY = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.5]),
    repetition_context=st.integers(1, 12) | st.just(10**9),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.9, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -0.2]),
    logit_bias=st.dictionaries(st.integers(0, 5), st.floats(-5, 5), max_size=4),
)
HISTORY = st.lists(st.integers(0, 5), max_size=12)
PENALISED_ROWS = st.lists(st.builds(SamplingRow, GREEDY, st.just(0), HISTORY, HISTORY), min_size=1, max_size=6)


@given(PENALISED_ROWS, st.integers(0, 10**6))
@settings(max_examples=examples(150, few=10), deadline=None)
def test_penalties_agree_with_their_definition(rows: list[SamplingRow], seed: int) -> None:
    """The adjusted logits of every token, told by the log-probabilities under which nothing but the draw is left."""
    logits = random_logits(len(rows), 6, seed)
    sampler = BatchSampler(rows, 6)
    outputs = [list(r.output) for r in rows]
    for _ in range(4):
        adjusted = np.array(sampler._apply_changes(mx.array(logits)))
        drawn = sampler(mx.array(logits), np.zeros(len(rows), np.int64)).tokens.tolist()
        for i, (r, output) in enumerate(zip(rows, outputs, strict=True)):
            wanted = penalised(logits[i], SamplingRow(r.params, 0, r.prompt, list(output)))
            np.testing.assert_allclose(adjusted[i], wanted, rtol=2e-6, atol=2e-6)
            assert wanted[drawn[i]] >= wanted.max() - 1e-5
            output.append(drawn[i])


def test_the_history_kept_is_no_longer_than_the_longest_context() -> None:
    params = [SamplingParams(repetition_penalty=1.2, repetition_context=c) for c in (3, 9)]
    sampler = BatchSampler([row(p, prompt=range(100)) for p in params], 100)
    for _ in range(12):
        sampler(mx.array(random_logits(2, 100)), np.zeros(2, np.int64))
    (history,) = sampler._histories
    assert history.change._tokens.shape == (2, 9)


@given(HISTORY.filter(len), st.floats(0.1, 3.0), st.integers(1, 15), st.integers(0, 100))
@settings(max_examples=examples(50, few=10), deadline=None)
def test_the_repetition_penalty_is_that_of_mlx_lm(history: list[int], penalty: float, context: int, seed: int) -> None:
    logits = random_logits(1, 6, seed)
    judged = make_repetition_penalty(penalty, context)(mx.array(history), mx.array(logits))
    params = SamplingParams(repetition_penalty=penalty, repetition_context=context)
    ours = BatchSampler([row(params, prompt=history[:3], output=history[3:])], 6)._apply_changes(mx.array(logits))
    assert mx.array_equal(ours, judged)


def test_rows_that_ask_for_nothing_pass_bit_by_bit() -> None:
    logits = random_logits(3, 100)
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, logit_bias={3: 4.0})
    rows = [
        row(SamplingParams(), prompt=[1, 2], output=[5]),
        row(params, prompt=[7], output=[8]),
        row(SamplingParams()),
    ]
    adjusted = np.array(BatchSampler(rows, 100)._apply_changes(mx.array(logits)))
    assert np.array_equal(adjusted[[0, 2]], logits[[0, 2]]) and not np.array_equal(adjusted[1], logits[1])


def test_prompts_and_outputs_may_be_numpy_arrays() -> None:
    logits = random_logits(1, 30)
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5)
    plain = BatchSampler([row(params, prompt=[1, 2, 3], output=[4, 4])], 30)
    arrays = BatchSampler([row(params, prompt=np.array([1, 2, 3]), output=np.array([4, 4], np.int32))], 30)
    assert mx.array_equal(plain._apply_changes(mx.array(logits)), arrays._apply_changes(mx.array(logits)))
