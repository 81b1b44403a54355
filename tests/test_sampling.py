"""BatchSampler against mlx-lm's own samplers, float64 NumPy, and itself in other batches."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_repetition_penalty

from cortexmlx.logits import draw, nucleus_threshold, top_tokens, uniforms
from cortexmlx.request import SamplingParams
from cortexmlx.sampling import BatchSampler, Sampled, SamplingRow


@pytest.fixture(scope="module", autouse=True)
def mlx_lm_uncompiled() -> Iterator[None]:
    """mlx-lm compiles its filters anew for every top-p and shape: on a CPU a second each, and a C++ compiler."""
    mx.disable_compile()
    yield
    mx.enable_compile()


Floats = npt.NDArray[np.float64]


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0.0, spread, (rows, vocab)).astype(np.float32)


def row(params: SamplingParams, seed: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> SamplingRow:
    return SamplingRow(params, seed, prompt, output)


def sample(rows: Sequence[SamplingRow], logits: npt.NDArray[np.float32], index: int = 0) -> Sampled:
    return BatchSampler(rows, logits.shape[1])(mx.array(logits), np.full(len(rows), index))


def tokens(rows: Sequence[SamplingRow], logits: npt.NDArray[np.float32], index: int = 0) -> list[int]:
    return sample(rows, logits, index).tokens.tolist()


# -- what may be drawn, and how often ----------------------------------------------------------------------------------


def judged_probabilities(logits: npt.NDArray[np.float32], params: SamplingParams) -> Floats:
    """What mlx-lm would draw from, by its own functions in the order of its `make_sampler`; one row."""
    logprobs = mx.array(logits)[None]
    logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
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


def chi_square(counts: Counter[int], expected: Floats, draws: int) -> float:
    """How many standard deviations the statistic lies from its mean; rare tokens are put together."""
    common = np.flatnonzero(expected * draws >= 5.0)
    seen = np.array([counts[t] for t in common], np.float64)
    wanted = expected[common] * draws
    if draws - wanted.sum() >= 5.0:
        seen, wanted = np.append(seen, draws - seen.sum()), np.append(wanted, draws - wanted.sum())
    freedom = max(1, len(wanted) - 1)
    return float((((seen - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom))


DISTRIBUTIONS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.7, top_p=0.5),
    SamplingParams(temperature=1.0, top_k=7),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.8),
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


def nucleus_of(logits: npt.NDArray[np.float32], top_p: float) -> npt.NDArray[np.bool_]:
    weights = np.exp(logits.astype(np.float64) - logits.max()).astype(np.float32)
    threshold = nucleus_threshold(mx.array(weights)[None], mx.array([[top_p]], mx.float32))
    return weights >= np.array(threshold)[0, 0]


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 0.3, 2.0, 6.0, 30.0]),
    coarse=st.booleans(),
    top_p=st.floats(1e-6, 0.9999),
)
@example(seed=0, vocab=3000, spread=0.0, coarse=True, top_p=0.5)
@example(seed=0, vocab=3000, spread=0.01, coarse=False, top_p=0.999)
@settings(max_examples=80, deadline=None)
def test_the_nucleus_is_that_of_mlx_lm(seed: int, vocab: int, spread: float, coarse: bool, top_p: float) -> None:
    logits = random_logits(1, vocab, seed, spread)[0]
    if coarse:  # as bfloat16 logits are: many ties
        logits = np.round(logits * 4) / 4
    logprobs = mx.array(logits)[None] - mx.logsumexp(mx.array(logits))
    judged = np.isfinite(np.array(apply_top_p(logprobs, top_p))[0])
    ours = nucleus_of(logits, top_p)
    # Where they differ, the mass above the token equals top_p within the rounding of a float32 sum.
    exact = np.exp(logits.astype(np.float64) - logits.max())
    exact /= exact.sum()
    for token in np.flatnonzero(ours != judged):
        assert abs(exact[logits > logits[token]].sum() - top_p) < 1e-5


def test_rounding_of_long_sums_does_not_let_the_whole_vocabulary_into_the_nucleus() -> None:
    """Added one by one in float32, 25,000 times 0.3 falls short of its sum by more than the share left to the rest."""
    weights = np.full((1, 50_000), 1e-12, np.float32)
    weights[:, ::2] = 0.3
    threshold = nucleus_threshold(mx.array(weights), mx.array([[0.99999]], mx.float32))
    assert weights.min() < threshold.item() <= weights.max()


FILTERS = st.builds(
    SamplingParams,
    temperature=st.just(100.0),  # makes whatever may be drawn come up soon
    top_p=st.sampled_from([1.0, 0.99, 0.6, 0.2]),
    top_k=st.sampled_from([0, 0, 1, 2, 4, 7, 11, 50]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.6]),
)


@given(st.lists(FILTERS, min_size=1, max_size=5), st.integers(0, 10**6), st.sampled_from([0.7, 3.0, 30.0]))
@settings(max_examples=40, deadline=None)
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


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(2, 2000),
    coarse=st.booleans(),
    count=st.integers(1, 100),
)
@example(seed=1, vocab=2000, coarse=True, count=100)
def test_top_tokens_are_the_largest_and_ties_go_to_the_lower_id(
    seed: int, vocab: int, coarse: bool, count: int
) -> None:
    values = random_logits(3, vocab, seed)
    if coarse:
        values = np.round(values)
    values[1] = -np.inf
    count = min(count, vocab)
    best, ids = top_tokens(mx.array(values), count)
    for r in range(3):
        wanted = sorted(range(vocab), key=lambda t, r=r: (-values[r, t], t))[:count]
        assert ids[r].tolist() == wanted
        assert np.array_equal(np.array(best)[r], values[r, wanted])


def test_draw_never_returns_an_index_of_weight_zero_and_respects_the_ends() -> None:
    weights = np.zeros((4, 1000), np.float32)
    weights[:, [63, 64, 999]] = [0.25, 0.5, 0.25]
    last = 1.0 - 2.0**-23
    ends = mx.array([[0.0, 0.0], [0.25, 0.0], [0.74999, last], [last, last]], mx.float32)
    assert draw(mx.array(weights), ends).tolist() == [63, 64, 64, 999]


def test_a_sum_that_descends_by_rounding_draws_nothing_of_weight_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a parallel scan on a GPU may round: here the sum is a little larger over every other element."""
    exact = mx.cumsum
    wave = mx.array(np.tile(np.array([1.0, 1.0 + 1e-6], np.float32), 32))
    monkeypatch.setattr(mx, "cumsum", lambda a, axis: exact(a, axis=axis) * wave[: a.shape[axis]])
    weights = np.zeros((2000, 64), np.float32)
    weights[:, ::2] = 1.0
    points = np.linspace(0, 1 - 2.0**-23, 2000, dtype=np.float32)
    edges = np.stack([np.zeros(2000, np.float32), np.round(points * 32) / 32], axis=1) * np.float32(1 - 2.0**-23)
    assert all(index % 2 == 0 for index in draw(mx.array(weights), mx.array(edges)).tolist())


def test_uniforms_are_uniform_and_differ_between_neighbouring_seeds_and_indices() -> None:
    seeds, index = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    values = uniforms(seeds.ravel(), index.ravel())
    assert values.dtype == np.float32 and values.min() >= 0.0 and values.max() < 1.0
    n = len(values)
    assert len(np.unique(values, axis=0)) == n
    for column in values.T.astype(np.float64):
        counts = Counter((column * 100).astype(int).tolist())
        assert abs(chi_square(counts, np.full(100, 0.01), n)) < 4.0
        grid = column.reshape(300, 300)
        for shifted in (np.roll(grid, 1, 0), np.roll(grid, 1, 1)):
            assert abs(np.corrcoef(grid.ravel(), shifted.ravel())[0, 1]) < 4 / math.sqrt(n)
    assert abs(np.corrcoef(values.T)[0, 1]) < 4 / math.sqrt(n)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64, -(2**200), 10**30])
def test_any_integer_is_a_seed(seed: int) -> None:
    logits = random_logits(1, 100)
    params = SamplingParams(temperature=1.0)
    first = [tokens([row(params, seed)], logits, i) for i in range(20)]
    assert first == [tokens([row(params, seed)], logits, i) for i in range(20)]
    assert len({t[0] for t in first}) > 3


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(20, 500)
    rows = [row(SamplingParams(temperature=temperature, top_k=k), seed=s) for s, k in enumerate([0, 5] * 10)]
    assert tokens(rows, logits) == logits.argmax(axis=1).tolist()


def test_a_tiny_top_p_is_greedy() -> None:
    logits = random_logits(20, 500)
    rows = [row(SamplingParams(temperature=2.0, top_p=1e-300, top_k=k), seed=s) for s, k in enumerate([0, 5] * 10)]
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


def run(rows: Sequence[SamplingRow], steps: Sequence[npt.NDArray[np.float32]], members: Sequence[int]) -> list[Sampled]:
    """Several lazy steps of the rows `members`, evaluated only at the end."""
    sampler = BatchSampler([rows[m] for m in members], steps[0].shape[1])
    index = np.array([len(rows[m].output) for m in members])
    taken = [sampler(mx.array(logits[list(members)]), index + i) for i, logits in enumerate(steps)]
    mx.eval([s.arrays() for s in taken])
    return taken


@given(ROWS, st.randoms(use_true_random=False), st.integers(0, 1000), st.booleans())
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=60, deadline=None)
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


# -- bias and penalties ------------------------------------------------------------------------------------------------


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
@settings(max_examples=150, deadline=None)
def test_penalties_agree_with_their_definition(rows: list[SamplingRow], seed: int) -> None:
    """The adjusted logits of every token, told by the log-probabilities under which nothing but the draw is left."""
    logits = random_logits(len(rows), 6, seed)
    sampler = BatchSampler(rows, 6)
    outputs = [list(r.output) for r in rows]
    for _ in range(4):
        adjusted = np.array(sampler._adjusted(mx.array(logits)))
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
    assert history._tokens.shape == (2, 9)


@given(HISTORY.filter(len), st.floats(0.1, 3.0), st.integers(1, 15), st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_the_repetition_penalty_is_that_of_mlx_lm(history: list[int], penalty: float, context: int, seed: int) -> None:
    logits = random_logits(1, 6, seed)
    judged = make_repetition_penalty(penalty, context)(mx.array(history), mx.array(logits))
    params = SamplingParams(repetition_penalty=penalty, repetition_context=context)
    ours = BatchSampler([row(params, prompt=history[:3], output=history[3:])], 6)._adjusted(mx.array(logits))
    assert mx.array_equal(ours, judged)


def test_rows_that_ask_for_nothing_pass_bit_by_bit() -> None:
    logits = random_logits(3, 100)
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, logit_bias={3: 4.0})
    rows = [
        row(SamplingParams(), prompt=[1, 2], output=[5]),
        row(params, prompt=[7], output=[8]),
        row(SamplingParams()),
    ]
    adjusted = np.array(BatchSampler(rows, 100)._adjusted(mx.array(logits)))
    assert np.array_equal(adjusted[[0, 2]], logits[[0, 2]]) and not np.array_equal(adjusted[1], logits[1])


def test_prompts_and_outputs_may_be_numpy_arrays() -> None:
    logits = random_logits(1, 30)
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5)
    plain = BatchSampler([row(params, prompt=[1, 2, 3], output=[4, 4])], 30)
    arrays = BatchSampler([row(params, prompt=np.array([1, 2, 3]), output=np.array([4, 4], np.int32))], 30)
    assert mx.array_equal(plain._adjusted(mx.array(logits)), arrays._adjusted(mx.array(logits)))


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


def test_greedy_rows_cost_an_argmax_and_nothing_else(tmp_path: Path) -> None:
    assert operations(SamplingParams(), tmp_path) == ["ArgReduce", "Squeeze", "AsType"]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.7), SamplingParams(temperature=0.7, min_p=0.1)])
def test_nothing_is_sorted_unless_a_row_needs_it(params: SamplingParams, tmp_path: Path) -> None:
    assert not {"Sort", "ArgSort", "Partition", "ArgPartition"} & set(operations(params, tmp_path))


def test_the_vocabulary_is_sorted_only_for_a_nucleus_without_top_k(tmp_path: Path) -> None:
    whole = operations(SamplingParams(temperature=0.7, top_p=0.9), tmp_path)
    short = operations(SamplingParams(temperature=0.7, top_p=0.9, top_k=20), tmp_path)
    assert whole.count("Sort") == short.count("Sort") + 1
