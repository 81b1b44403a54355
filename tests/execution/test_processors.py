"""Logits processors of the caller's own: mlx-lm's tokens with the same functions, whatever else goes on; what they are
called with, and how often; and that one which fails takes nobody with it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx import Engine, SamplingParams
from cortexmlx.errors import LogitsProcessorError
from cortexmlx.types.request import RequestState
from support.effort import examples
from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.tiny import VOCAB, tokens_of

Processor = Callable[[mx.array, mx.array], mx.array]

LENGTHS = (9, 20, 3, 31)
TOKENS = 24
TIGHT = 80
"""Tokens of an arena in which rows lose their blocks."""


def no_repeats(tokens: mx.array, logits: mx.array) -> mx.array:
    """Never one of the last five tokens."""
    return mx.put_along_axis(logits, tokens[None, -5:], mx.array(-mx.inf, logits.dtype), axis=-1)


def in_place(tokens: mx.array, logits: mx.array) -> mx.array:
    """The same, changing what it was given."""
    logits[:, tokens[-5:]] = -mx.inf
    return logits


def careless(tokens: mx.array, logits: mx.array) -> mx.array:
    """The same, leaving nothing of what it was given."""
    wanted = no_repeats(tokens, logits)
    tokens[:], logits[:] = 0, 0
    return wanted


def by_chance(tokens: mx.array, logits: mx.array) -> mx.array:
    """Gumbel noise, so that the best token is a draw: by a seed that is the place of the token."""
    return logits + mx.random.gumbel(logits.shape, key=mx.random.key(tokens.size))


def reading(tokens: mx.array, logits: mx.array) -> mx.array:
    """A function on the host, of the newest token and the best next ones."""
    best = np.argsort(np.array(logits[0].astype(mx.float32)))[::-1]
    return mx.where(mx.arange(VOCAB)[None] == int(best[tokens[-1].item() % 3]), 5.0, logits - 1e4)


def evaluating(tokens: mx.array, logits: mx.array) -> mx.array:
    mx.eval(tokens, logits)
    mx.synchronize()
    return no_repeats(tokens, logits)


def mlx_lms_own() -> list[Processor]:
    from mlx_lm.sample_utils import make_logits_processors

    own: list[Processor] = make_logits_processors({5: 3.0, 7: -2.0}, 1.3, 20, 0.7, 20, 0.4, 20)
    return own


KINDS: dict[str, Callable[[], list[Processor]]] = {
    "lazy": lambda: [no_repeats],
    "in place": lambda: [in_place],
    "by chance": lambda: [by_chance],
    "reading": lambda: [reading],
    "evaluating": lambda: [evaluating],
    "mlx-lm's own": mlx_lms_own,
    "two, in their order": lambda: [no_repeats, reading],
}
"""Each made on the thread that asks, as a caller would."""


@pytest.fixture(scope="module")
def judge(judged: Callable[[str], Any]) -> Callable[[str, Sequence[int], Sequence[Processor]], list[int]]:
    """mlx-lm's greedy tokens with processors."""
    from mlx_lm.generate import generate_step

    @cache
    def tokens(name: str, prompt: tuple[int, ...], processors: tuple[Processor, ...]) -> list[int]:
        steps = generate_step(mx.array(prompt), judged(name)[0], max_tokens=TOKENS, logits_processors=list(processors))
        return [int(token) for token, _ in steps]

    return lambda name, prompt, processors: tokens(name, tuple(prompt), tuple(processors))


def prompts_of() -> list[list[int]]:
    return [tokens_of(n, seed=n) for n in LENGTHS]


# -- the same tokens as mlx-lm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_alone(tiny: Any, judge: Any, kind: str) -> None:
    prompt = tokens_of(20, seed=4)
    (mine,) = Driver(tiny("one layer")).answers([prompt], TOKENS, logits_processors=KINDS[kind]())
    assert list(mine) == judge("one layer", prompt, KINDS[kind]())


@pytest.mark.parametrize(
    ("kind", "name", "setting"),
    [
        ("in place", "one layer", {}),
        ("by chance", "one layer", {"tokens": TIGHT}),
        ("mlx-lm's own", "one layer", {"tokens": TIGHT}),
        ("two, in their order", "gemma3_text", {"tokens": TIGHT, "prefix_cache": False}),
    ],
    ids=["roomy", "tight", "tight with tables of tokens", "tight with windows"],
)
def test_beside_rows_with_others_and_none(
    tiny: Any, judge: Any, theirs: Any, kind: str, name: str, setting: dict[str, Any]
) -> None:
    """Rows with the processor, with another and with none take turns; on a tight arena they lose their blocks."""
    driver = Driver(tiny(name), **({"max_rows": 4} | setting))
    prompts = prompts_of()
    wanted = [KINDS[kind](), [], [no_repeats], KINDS[kind]()]
    handles = []
    for prompt, processors in zip(prompts, wanted, strict=True):
        handles.append(driver.add(prompt, TOKENS, logits_processors=processors))
        driver.step(3)
    driver.finish()
    mine = [list(driver.result(handle).token_ids) for handle in handles]
    assert mine == [judge(name, p, f) for p, f in zip(prompts, wanted, strict=True)]
    stats = driver.core.stats()
    assert (stats.preemptions > 0) == ("tokens" in setting), "the arena must be small enough to say anything"
    assert_nothing_lost(stats)


def test_several_answers_share_a_function(tiny: Any, judge: Any) -> None:
    prompt = tokens_of(21, seed=6)
    driver = Driver(tiny("one layer"), tokens=TIGHT, max_rows=3)
    handle, other = (driver.add(prompt, TOKENS, n=n, logits_processors=[by_chance]) for n in (2, 3))
    driver.finish()
    answers = [c for h in (handle, other) for first in [driver.result(h)] for c in (first, *first.others)]
    assert [list(c.token_ids) for c in answers] == [judge("one layer", prompt, [by_chance])] * 5


def test_one_that_overwrites_what_it_was_given_changes_nothing_for_others(tiny: Any, judge: Any, theirs: Any) -> None:
    driver = Driver(tiny("one layer"))
    prompts, wanted = prompts_of(), [[careless, no_repeats], [careless], []]
    handles = [
        driver.add(p, TOKENS, logits_processors=f, ignore_eos=False) for p, f in zip(prompts, wanted, strict=False)
    ]
    driver.finish()
    mine = [list(driver.result(handle).token_ids) for handle in handles]
    assert mine[:2] == [judge("one layer", p, [no_repeats]) for p in prompts[:2]] and mine[2] == theirs(
        "one layer", prompts[2], TOKENS
    )


def test_they_come_after_bias_and_penalties(tiny: Any, judge: Any) -> None:
    """One that forbids the best token does not commute with anything before it."""
    from mlx_lm.sample_utils import make_logits_processors

    def second_best(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.where(logits == mx.max(logits), -mx.inf, logits)

    prompt, bias = tokens_of(30, seed=8), {5: 12.0, 70: 12.5}
    (mine,) = Driver(tiny("one layer")).answers(
        [prompt], TOKENS, logit_bias=bias, repetition_penalty=1.4, logits_processors=[second_best]
    )
    assert list(mine) == judge("one layer", prompt, [*make_logits_processors(bias, 1.4, 20), second_best])


@pytest.mark.parametrize("filters", [{}, {"min_p": 1e-6, "top_k": 40, "top_p": 0.999}], ids=str)
def test_a_mask_leaves_nothing_else_to_any_draw(tiny: Any, filters: dict[str, Any]) -> None:
    def even(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(VOCAB)[None] % 2 == 0, logits, -mx.inf)

    driver = Driver(tiny("one layer"))
    completion = driver.result_of(tokens_of(9), 60, temperature=5.0, logits_processors=[even], logprobs=0, **filters)
    assert {t % 2 for t in completion.token_ids} == {0} and len(set(completion.token_ids)) > 5
    assert all(np.isfinite(p.logprob) for p in completion.logprobs or ())


# -- what they are called with ----------------------------------------------------------------------------------------


class Notes:
    """A processor that keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[mx.array, Any]] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls.append((tokens, (tokens.dtype, logits.dtype, logits.shape)))
        return logits


@settings(max_examples=examples(15, few=6))
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 30), st.booleans(), st.integers(0, 6)), min_size=1, max_size=5
    ),
    st.sampled_from([TIGHT, 512]),
    st.booleans(),
    st.sampled_from([4, 32]),
)
def test_every_answer_shows_each_of_its_lengths_once_in_order(
    tiny: Any, requests: list[tuple[int, int, bool, int]], tokens: int, pipeline: bool, budget: int
) -> None:
    """Also across preemptions, forks and windows whose other rows have ended."""
    driver = Driver(tiny("one layer"), tokens=tokens, max_rows=3, pipeline=pipeline, prefill_budget=budget)
    asked = []
    for i, (length, limit, stops, steps) in enumerate(requests):
        notes, prompt = Notes(), tokens_of(length, seed=i)
        ends = range(0, VOCAB, 16) if stops else ()
        handle = driver.add(prompt, limit, logits_processors=[notes], stop_token_ids=ends, temperature=2.0, seed=i)
        asked.append((prompt, notes, handle))
        driver.step(steps)
    driver.finish()
    for prompt, notes, handle in asked:
        completion = driver.result(handle)
        seen = [tokens.tolist() for tokens, _ in notes.calls]
        whole = [*prompt, *completion.token_ids]
        # What stops an answer is known one step late, what bounds it is known before.
        most = len(completion.token_ids) + (completion.finish_reason.value == "stop" and pipeline)
        assert len(completion.token_ids) <= len(seen) <= most
        assert [len(s) for s in seen] == list(range(len(prompt), len(prompt) + len(seen)))
        assert all(s == whole[: len(s)] for s in seen)
        assert {kind for _, kind in notes.calls} == {(mx.int32, mx.float32, (1, VOCAB))}


# -- what goes wrong --------------------------------------------------------------------------------------------------


def raising(tokens: mx.array, logits: mx.array) -> mx.array:
    if tokens.size >= 25:
        raise KeyError("no such state")
    return logits


def too_wide(tokens: mx.array, logits: mx.array) -> mx.array:
    return mx.pad(logits, [(0, 0), (0, 1)])


def flat(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits[0]


def of_integers(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits.astype(mx.int32)


def nothing(tokens: mx.array, logits: mx.array) -> None:
    logits * 2


def of_another_thread() -> Processor:
    """MLX's lazy arrays belong to the thread that made them: this one's cannot be evaluated, which shows late."""
    made: list[mx.array] = []
    thread = threading.Thread(target=lambda: made.append(mx.arange(VOCAB) * 0.5))
    thread.start()
    thread.join()

    def foreign(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + made[0] if tokens.size >= 25 else logits

    return foreign


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (lambda: raising, "logits processor raising failed after 25 tokens: KeyError: 'no such state'"),
    "shape": (
        lambda: too_wide,
        r"too_wide .* of shape \[1, 320\], as it was given, but returned float32 .* \[1, 321\]",
    ),
    "one row": (lambda: flat, r"flat failed after 20 tokens: ValueError: .* but returned float32 of shape \[320\]"),
    "dtype": (lambda: of_integers, r"of_integers .* but returned int32 of shape \[1, 320\]"),
    "nothing": (lambda: nothing, "nothing failed after 20 tokens: TypeError: .* but returned NoneType"),
    "late": (of_another_thread, "foreign failed after 25 tokens: RuntimeError: There is no Stream"),
}


def test_an_error_that_is_kept_says_where_it_was_raised_and_holds_nothing_of_the_step(tiny: Any) -> None:
    gc.collect()
    before = mx.get_active_memory()
    driver = Driver(tiny("one layer"))
    bad = driver.add(tokens_of(20, seed=1), TOKENS, logits_processors=[raising])
    driver.finish()
    with pytest.raises(LogitsProcessorError) as caught:
        driver.result(bad)
    assert "in raising\n    raise" in caught.value.__notes__[0]
    driver.core.release()
    gc.collect()
    assert mx.get_active_memory() - before < 1024


@pytest.mark.parametrize(("wrong", "pipeline"), [*((wrong, True) for wrong in WRONG), ("late", False)])
def test_one_that_fails_fails_its_request_only(tiny: Any, theirs: Any, judge: Any, wrong: str, pipeline: bool) -> None:
    make, message = WRONG[wrong]
    driver = Driver(tiny("one layer"), tokens=512, max_rows=5, pipeline=pipeline)
    prompts = prompts_of()
    plain = [driver.add(p, TOKENS, ignore_eos=False) for p in prompts[:2]]
    bad = driver.add(tokens_of(20, seed=1), TOKENS, n=2, logits_processors=[make()])
    other = driver.result_of(prompts[3], TOKENS, logits_processors=[no_repeats])
    with pytest.raises(LogitsProcessorError, match=message) as caught:
        driver.result(bad)
    assert caught.value.__cause__ is not None
    assert bad.state is RequestState.FAILED
    for prompt, handle in zip(prompts, plain, strict=False):
        assert list(driver.result(handle).token_ids) == theirs("one layer", prompt, TOKENS)
    assert list(other.token_ids) == judge("one layer", prompts[3], [no_repeats])
    driver.core.check_invariants()
    assert_nothing_lost(driver.core.stats())
    (again,) = driver.answers(prompts[:1], TOKENS, ignore_eos=False)
    assert list(again) == theirs("one layer", prompts[0], TOKENS)


SETTINGS: list[dict[str, float]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.5},
]


def only_at(place: int, value: float, otherwise: float | None = None) -> Processor:
    """`value` as one token's logit; the others' stay, or are `otherwise`."""
    return lambda t, x: mx.where(mx.arange(VOCAB)[None] == place, value, x if otherwise is None else otherwise)


@pytest.mark.parametrize(
    ("wrong", "after", "params"),
    [
        ((-1, 0, mx.nan), 0, SETTINGS[0]),
        ((-1, 0, -mx.inf), 5, SETTINGS[0]),
        ((-1, 0, mx.nan), 5, SETTINGS[1]),
        ((-1, 0, -mx.inf), 0, SETTINGS[2]),
        ((7, mx.nan), 5, SETTINGS[2]),
        ((7, mx.nan, -mx.inf), 0, SETTINGS[3]),
        ((-1, 0, -mx.inf), 5, SETTINGS[3]),
    ],
    ids=str,
)
def test_logits_that_leave_no_token_to_choose_fail_their_request_only(
    tiny: Any, theirs: Any, wrong: Any, after: int, params: dict[str, Any]
) -> None:
    driver = Driver(tiny("one layer"), tokens=512)
    prompt = tokens_of(9, seed=9)
    neighbour = driver.add(prompt, TOKENS, ignore_eos=False)
    late = [lambda t, x: only_at(*wrong)(t, x) if t.size >= 9 + after else x]
    handle = driver.add(tokens_of(9), 20, logits_processors=late, **params)
    driver.finish()
    why = f"no token to choose after 9 tokens of the prompt and {after} of the answer: .* NaN or all -inf"
    with pytest.raises(LogitsProcessorError, match=why):
        driver.result(handle)
    assert list(driver.result(neighbour).token_ids) == theirs("one layer", prompt, TOKENS)
    assert_nothing_lost(driver.core.stats())


def test_an_infinite_logit_chooses_its_token(tiny: Any) -> None:
    driver, handles = Driver(tiny("one layer")), []
    for params in SETTINGS:
        for otherwise in (None, -mx.inf, -1e38):
            processors = [only_at(7, mx.inf, otherwise)]
            handles.append(driver.add(tokens_of(9), 5, logits_processors=processors, **params))
    driver.finish()
    assert [list(driver.result(handle).token_ids) for handle in handles] == [[7] * 5] * 12


def test_through_the_engine_on_its_own_thread(tiny: Any, judge: Any) -> None:
    threads = set()

    def where(tokens: mx.array, logits: mx.array) -> mx.array:
        threads.add(threading.current_thread())
        return reading(tokens, logits)

    prompts = prompts_of()
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logits_processors=[where])
    with Engine(tiny("one layer"), kv_memory="128KB", block_size=8) as engine:
        mine = [c.token_ids for c in engine.generate_batch(prompts, params)]
        events = list(engine.stream(prompts[0], params))
        with pytest.raises(LogitsProcessorError):
            list(engine.stream(prompts[0], SamplingParams(logits_processors=[flat])))
        last = engine.generate(prompts[1], params).token_ids
    wanted = [judge("one layer", p, [reading]) for p in prompts]
    assert [list(m) for m in mine] == wanted and list(last) == wanted[1]
    assert [e.token_id for e in events if e.token_id is not None] == wanted[0]
    assert len(threads) == 1 and threading.current_thread() not in threads
