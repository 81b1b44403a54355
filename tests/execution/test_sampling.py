"""BatchSampler against mlx-lm's own samplers, float64 NumPy, and itself in other batches."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from cortexmlx.execution.sampling import BatchSampler, SampledTokens
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples
from support.engine.sampling_tools import Floats, chi_square, mlx_lm_uncompiled, random_logits, row


def sample(rows: Sequence[SamplingRow], logits: npt.NDArray[np.float32], index: int = 0) -> SampledTokens:
    return BatchSampler(rows, logits.shape[1])(mx.array(logits), np.full(len(rows), index))


def tokens(rows: Sequence[SamplingRow], logits: npt.NDArray[np.float32], index: int = 0) -> list[int]:
    return sample(rows, logits, index).tokens.tolist()


# -- what may be drawn, and how often ----------------------------------------------------------------------------------


def judged_probabilities(logits: npt.NDArray[np.float32], params: SamplingParams) -> Floats:
    """What mlx-lm would draw from, by its own functions in the order of its `make_sampler`; one row."""
    logprobs = mx.array(logits)[None]
    logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
    with mlx_lm_uncompiled():
        if params.top_p < 1.0:
            logprobs = apply_top_p(logprobs, params.top_p)
        if params.min_p > 0.0:
            logprobs = apply_min_p(logprobs, params.min_p)
        if params.top_k > 0:
            logprobs = apply_top_k(logprobs, params.top_k)
    scaled = np.array(logprobs[0], np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def observed_counts(logits: npt.NDArray[np.float32], params: SamplingParams, draws: int, seed: int = 0) -> Counter[int]:
    """How often each token comes up in a batch of `draws` rows that differ only in their seeds."""
    batch = np.broadcast_to(logits, (draws, len(logits)))
    return Counter(tokens([row(params, seed * draws + i) for i in range(draws)], batch))


DISTRIBUTIONS = [
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(temperature=0.7, top_p=0.5),
    SamplingParams(temperature=1.0, top_k=7),
    SamplingParams(temperature=1.5, min_p=0.1),
    SamplingParams(temperature=1.2, min_p=0.02, top_p=0.95, top_k=20),
]


@pytest.mark.parametrize("params", DISTRIBUTIONS)
def test_draws_follow_the_distribution_of_mlx_lm(params: SamplingParams) -> None:
    draws = 8_000
    for vocab, spread in ((100, 1.5), (50, 4.0)):
        logits = random_logits(1, vocab, seed=vocab, spread=spread)[0]
        expected = judged_probabilities(logits, params)
        counts = observed_counts(logits, params, draws)
        assert abs(chi_square(counts, expected, draws)) < 4.0
        assert all(expected[token] > 0.0 for token in counts)


def test_the_tail_of_a_large_vocabulary_keeps_its_share() -> None:
    vocab, draws = 50_000, 800
    logits = np.zeros(vocab, np.float32)
    logits[123] = math.log(vocab)
    counts = observed_counts(logits, SamplingParams(temperature=1.0), draws)
    tail = draws - counts[123]
    assert abs(tail - draws / 2) < 4 * math.sqrt(draws / 4)
    # Uniform within the tail: the mean of the ids is known.
    ids = np.array(list(counts.elements()))
    assert abs(ids[ids != 123].mean() - vocab / 2) < 4 * vocab / math.sqrt(12 * tail)


def test_successive_tokens_of_one_seed_are_independent() -> None:
    logits = np.zeros((8_000, 4), np.float32)
    sampler = BatchSampler([row(SamplingParams(temperature=1.0), seed=7)] * 8_000, 4)
    drawn = sampler(mx.array(logits), np.arange(8_000)).tokens.tolist()
    pairs = Counter(4 * a + b for a, b in pairwise(drawn))
    assert abs(chi_square(pairs, np.full(16, 1 / 16), len(drawn) - 1)) < 4.0


FILTERS = st.builds(
    SamplingParams,
    temperature=st.just(100.0),  # makes whatever may be drawn come up soon
    top_p=st.sampled_from([1.0, 0.99, 0.6, 0.2]),
    top_k=st.sampled_from([0, 0, 1, 2, 4, 7, 11, 50]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.6]),
)


@given(st.lists(FILTERS, min_size=1, max_size=5), st.integers(0, 10**6), st.sampled_from([0.7, 3.0, 30.0]))
@settings(max_examples=examples(40, few=12), deadline=None)
def test_what_may_be_drawn_in_a_mixed_batch_is_what_mlx_lm_would_draw(
    mix: list[SamplingParams], seed: int, spread: float
) -> None:
    vocab, draws = 12, 400
    coarse = np.round(random_logits(len(mix), vocab, seed, spread))
    drawn = np.array(tokens([row(p, i) for p in mix for i in range(draws)], np.repeat(coarse, draws, axis=0)))
    for logits, params, seen in zip(coarse, mix, drawn.reshape(len(mix), draws), strict=True):
        k = params.top_k if params.top_k < vocab else 0
        allowed = judged_probabilities(logits, dataclasses.replace(params, top_k=0)) > 0.0
        if 0 < k < allowed.sum():  # mlx-lm leaves open which of several equal tokens is the k-th; we take the lower id
            allowed[sorted(range(vocab), key=lambda t: (-logits[t], t))[k:]] = False
        assert set(seen.tolist()) == set(np.flatnonzero(allowed).tolist())


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64, -(2**200), 10**30])
def test_any_integer_is_a_seed(seed: int) -> None:
    logits = random_logits(1, 100)
    params = SamplingParams(temperature=1.0)
    first = [tokens([row(params, seed)], logits, i) for i in range(20)]
    assert first == [tokens([row(params, seed)], logits, i) for i in range(20)]
    assert len({t[0] for t in first}) > 3


@pytest.mark.parametrize(("temperature", "top_p"), [(1e-300, 1.0), (1e-9, 1.0), (1e-3, 1.0), (2.0, 1e-300)])
def test_a_tiny_temperature_and_a_tiny_top_p_are_greedy(temperature: float, top_p: float) -> None:
    logits, asked = random_logits(20, 500), {"temperature": temperature, "top_p": top_p}
    rows = [row(SamplingParams(**asked, top_k=k), seed=s) for s, k in enumerate([0, 5] * 10)]
    assert tokens(rows, logits) == logits.argmax(axis=1).tolist()


def test_a_top_k_beyond_the_vocabulary_keeps_every_token() -> None:
    logits = np.zeros(8, np.float32)
    assert set(observed_counts(logits, SamplingParams(temperature=1.0, top_k=10**9), 400)) == set(range(8))


def test_exactly_k_tokens_stay_when_logits_tie() -> None:
    logits = np.array([1.0, 2.0, 2.0, 2.0, 2.0, 0.0], np.float32)
    assert set(observed_counts(logits, SamplingParams(temperature=1.0, top_k=3), 300)) == {1, 2, 3}
    assert set(observed_counts(logits, SamplingParams(temperature=1.0, top_k=1), 300)) == {1}


# -- a row and its neighbours ------------------------------------------------------------------------------------------

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.3]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 0, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    repetition_context=st.integers(1, 30),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, 24), st.floats(-5, 5), max_size=3),
    logprobs=st.sampled_from([None, None, 0, 3]),
)
ROWS = st.lists(
    st.builds(
        SamplingRow,
        PARAMS,
        st.integers(0, 1000),
        st.lists(st.integers(0, 20), max_size=25),
        st.lists(st.integers(0, 20), max_size=25),
    ),
    min_size=1,
    max_size=8,
)


def run(
    rows: Sequence[SamplingRow], steps: Sequence[npt.NDArray[np.float32]], members: Sequence[int]
) -> list[SampledTokens]:
    """Several lazy steps of the rows `members`, evaluated only at the end."""
    sampler = BatchSampler([rows[m] for m in members], steps[0].shape[1])
    index = np.array([len(rows[m].output) for m in members])
    taken = [sampler(mx.array(logits[list(members)]), index + i) for i, logits in enumerate(steps)]
    mx.eval([s.arrays() for s in taken])
    return taken


@given(ROWS, st.randoms(use_true_random=False), st.integers(0, 1000), st.booleans())
@settings(max_examples=examples(60, few=8), deadline=None)
def test_a_row_gets_the_same_tokens_alone_and_in_any_batch(
    rows: list[SamplingRow], random: object, seed: int, ties: bool
) -> None:
    steps = [random_logits(len(rows), 300, seed + i) for i in range(3)]
    if ties:
        steps = [np.round(s) for s in steps]
    together = run(rows, steps, range(len(rows)))
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for members in [order, order[: len(order) // 2 + 1], *([m] for m in order)]:
        for step, apart in zip(together, run(rows, steps, members), strict=True):
            assert apart.tokens.tolist() == [step.tokens[m].item() for m in members]
            for place, m in enumerate(members):
                if rows[m].params.logprobs is not None:
                    assert apart.logprobs[place].item() == step.logprobs[m].item()
                for k in range(rows[m].params.logprobs or 0):
                    assert apart.top_ids[place, k].item() == step.top_ids[m, k].item()
                    assert apart.top_logprobs[place, k].item() == step.top_logprobs[m, k].item()


@given(ROWS, st.integers(0, 1000))
@settings(max_examples=examples(60, few=8), deadline=None)
def test_tokens_never_read_back_count_like_those_known_from_the_start(rows: list[SamplingRow], seed: int) -> None:
    steps = [np.round(random_logits(len(rows), 25, seed + i), 1) for i in range(4)]
    lazily = run(rows, steps, range(len(rows)))
    outputs = [list(r.output) for r in rows]
    for logits, step in zip(steps, lazily, strict=True):
        known = [SamplingRow(r.params, r.seed, r.prompt, list(o)) for r, o in zip(rows, outputs, strict=True)]
        drawn = run(known, [logits], range(len(rows)))[0].tokens.tolist()
        assert drawn == step.tokens.tolist()
        for output, token in zip(outputs, drawn, strict=True):
            output.append(token)


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_logprobs_are_those_of_the_logits_as_the_model_gave_them(dtype: mx.Dtype) -> None:
    logits = mx.array(random_logits(4, 1000)).astype(dtype)
    exact = np.array(logits.astype(mx.float32), np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    asked = [SamplingParams(temperature=1.0, top_k=3, presence_penalty=1.0, logprobs=n) for n in (None, 0, 2, 5)]
    drawn = BatchSampler([row(p, i, output=[i]) for i, p in enumerate(asked)], 1000)(logits, np.arange(4))
    assert drawn.logprobs is not None and drawn.top_ids is not None and drawn.top_logprobs is not None
    assert drawn.top_ids.shape == drawn.top_logprobs.shape == (4, 5)
    assert math.isnan(drawn.logprobs[0].item()) and drawn.top_ids[0].tolist() == [-1] * 5
    for i in (1, 2, 3):
        token = drawn.tokens[i].item()
        assert drawn.logprobs[i].item() == pytest.approx(exact[i, token], abs=1e-5)
        best = np.argsort(-exact[i], kind="stable")[:5]
        assert drawn.top_ids[i].tolist() == best.tolist()
        np.testing.assert_allclose(drawn.top_logprobs[i].tolist(), exact[i, best], atol=1e-5)


def test_only_the_chosen_logprob_when_no_row_asks_for_more() -> None:
    drawn = sample([row(SamplingParams(logprobs=0)), row(SamplingParams())], random_logits(2, 50))
    assert drawn.logprobs is not None and drawn.top_ids is None and drawn.top_logprobs is None


def test_more_logprobs_than_tokens_gives_all_of_them() -> None:
    drawn = sample([row(SamplingParams(logprobs=100))], random_logits(1, 7))
    assert drawn.top_ids is not None and sorted(drawn.top_ids[0].tolist()) == list(range(7))


# -- laziness and cost -------------------------------------------------------------------------------------------------


def test_nothing_is_evaluated_while_steps_are_built() -> None:
    """Lazy logits of 32 MB a step stay unborn until somebody asks for tokens."""
    rows = [
        row(
            SamplingParams(temperature=t, top_p=p, top_k=k, repetition_penalty=1.1, presence_penalty=0.1, logprobs=2), i
        )
        for i, (t, p, k) in enumerate([(0.0, 1.0, 0), (1.0, 0.9, 0), (0.7, 1.0, 40), (0.7, 0.9, 5)] * 2)
    ]
    sampler = BatchSampler(rows, 1_000_000)
    before = mx.get_active_memory()
    steps = [sampler(mx.random.normal((8, 1_000_000)), np.full(8, i)) for i in range(3)]
    assert mx.get_active_memory() - before < 1 << 20
    assert [s.tokens.shape for s in steps] == [(8,)] * 3


def operations(params: SamplingParams, tmp_path: Path) -> list[str]:
    """The names of the operations between given logits and the tokens of four such rows."""
    logits = mx.zeros((4, 10_000))
    mx.eval(logits)
    sampler = BatchSampler([row(params, prompt=[1], output=[2])] * 4, 10_000)
    graph = tmp_path / "graph.dot"
    mx.export_to_dot(str(graph), sampler(logits, np.zeros(4, np.int64)).tokens)
    return re.findall(r'label ="(\w+)', graph.read_text())


def test_greedy_rows_cost_an_argmax_and_a_look_at_its_logit(tmp_path: Path) -> None:
    """Nothing but the argmax reads more than one number of each row."""
    cheap = {"AsType", "Broadcast", "Full", "GatherAxis", "Greater", "Select", "Squeeze"}
    done = operations(SamplingParams(), tmp_path)
    assert done.count("ArgReduce") == 1 and set(done) <= cheap | {"ArgReduce"} and len(done) <= 10


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.7), SamplingParams(temperature=0.7, min_p=0.1)])
def test_nothing_is_sorted_unless_a_row_needs_it(params: SamplingParams, tmp_path: Path) -> None:
    assert not {"Sort", "ArgSort", "Partition", "ArgPartition"} & set(operations(params, tmp_path))


def test_the_vocabulary_is_sorted_only_for_a_nucleus_without_top_k(tmp_path: Path) -> None:
    whole = operations(SamplingParams(temperature=0.7, top_p=0.9), tmp_path)
    short = operations(SamplingParams(temperature=0.7, top_p=0.9, top_k=20), tmp_path)
    assert whole.count("Sort") == short.count("Sort") + 1
