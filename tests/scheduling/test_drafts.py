"""Drafted tokens: verified in one step, taken as far as they are right, and never seen by anybody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.scheduling.decode_window import DrainReason
from cortexmlx.scheduling.drafts import MAX_DRAFTS
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import StepKind
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import FinishReason, RequestState
from cortexmlx.types.sampling_params import SamplingParams
from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.tiny import VOCAB, tokens_of
from support.scheduling.clockwork import LAYER
from support.scheduling.requests import add, commit
from support.scheduling.shadow import Shadow
from support.scheduling.stories import Story

WORDS = 50


def began(answer: int = 40, blocks: int = 64, **options: Any) -> tuple[Shadow, Job]:
    """A job that decodes, on a shadow arena, with nothing in flight."""
    cache = KVCache(BlockPools([LAYER], blocks, 4, prefix=PrefixCache(4)))
    config = SchedulerConfig(max_rows=4, prefill_budget=64, context_length=1000, **options)
    shadow = Shadow(Scheduler(cache, config), WORDS)
    return shadow, decoding(shadow, 1, [1, 2, 3, 4, 5], answer)


def decoding(shadow: Shadow, number: int, prompt: list[int], answer: int) -> Job:
    job = add(shadow.scheduler, number, prompt, SamplingParams(max_tokens=answer))
    shadow.stories[job.id] = Story(job, WORDS)
    while not job.num_generated:
        shadow.step()
    drained(shadow)
    return job


def drained(shadow: Shadow) -> None:
    while shadow.in_flight:
        shadow.commit()


def drafted(shadow: Shadow, job: Job, count: int, wrong: int | None = None) -> list[int]:
    """The job's next tokens, one of them wrong, as drafts."""
    story, known = shadow.stories[job.id], len(job.tokens)
    tokens = [story.token(known + place) for place in range(count)]
    if wrong is not None:
        tokens[wrong] = (tokens[wrong] + 1) % WORDS
    shadow.scheduler.set_drafts(job.id, tokens)
    return tokens


@pytest.mark.parametrize("wrong", [None, 0, 3, 6])
def test_a_step_takes_what_is_right_and_one_token_more(wrong: int | None) -> None:
    shadow, job = began()
    before = len(job.tokens)
    drafted(shadow, job, 7, wrong)
    plan = shadow.plan()
    assert plan is not None and plan.kind is StepKind.MIXED
    assert [list(s.logits) for s in plan.segments] == [list(range(before - 1, before + 7))]
    assert shadow.scheduler.plan(1) is None, "how far the row gets is not known yet"
    (row,) = commit(shadow.scheduler, *shadow.in_flight.popleft())
    assert len(job.tokens) - before == len(row.tokens) == (8 if wrong is None else wrong + 1)
    assert shadow.scheduler.cache.tables.length(job.id) == job.num_computed_tokens == len(job.tokens) - 1
    assert shadow.scheduler.pipeline_gate.steps[DrainReason.VERIFY] == 1
    right = 7 if wrong is None else wrong
    assert (row.job, row.num_drafted, row.num_accepted) == (job, 7, right)
    shadow.scheduler.check_invariants()
    shadow.finish(50)


@pytest.mark.parametrize("place", range(6))
def test_after_a_place_without_a_token_to_choose_a_job_begins_again_without_drafts(place: int) -> None:
    """A wrong draft may have left NaN in its last block. If the place has no token without drafts, its request
    fails.
    """
    shadow, job = began()
    before = len(job.tokens)
    drafted(shadow, job, 5)
    assert shadow.plan() is not None
    plan, tokens = shadow.in_flight.popleft()
    (row,) = commit(shadow.scheduler, plan, [*tokens[:place], -1, *tokens[place + 1 :]])
    assert row.tokens == tokens[:place] and len(job.tokens) == before + place
    assert not job.is_running and job.is_spoiled
    shadow.scheduler.check_invariants()
    shadow.step()
    drained(shadow)
    assert job.is_running and len(job.tokens) == before + place + 1 and job not in shadow.scheduler.draftable_jobs
    shadow.finish(50)


@pytest.mark.parametrize(("place", "cached"), [(0, 8), (1, 12), (2, 12), (3, 12)])
def test_the_last_block_of_an_answer_that_ends_beside_such_a_place_is_not_shared(place: int, cached: int) -> None:
    shadow, job = began(answer=7 + place)
    while len(job.tokens) < 11:
        shadow.step()
        drained(shadow)
    job.stop_ids = frozenset([shadow.stories[job.id].token(11 + place)])
    job.max_new_tokens = 40
    drafted(shadow, job, 5)
    assert shadow.plan() is not None
    plan, tokens = shadow.in_flight.popleft()
    (row,) = commit(shadow.scheduler, plan, [*tokens[: place + 1], *[-1] * (5 - place)])
    assert row.finish_reason is FinishReason.STOP and len(job.tokens) == 12 + place
    cache = shadow.scheduler.cache
    match = cache.match(job.tokens, cache.prefix.keys(job.tokens, None), 100)
    assert match.matched_tokens(cache.block_size) == cached


def test_the_last_block_of_a_row_that_is_cancelled_while_drafts_are_verified_is_not_shared() -> None:
    shadow, job = began()
    while len(job.tokens) < 11:
        shadow.step()
        drained(shadow)
    drafted(shadow, job, 5)
    assert shadow.plan() is not None
    shadow.scheduler.finish(job.id, FinishReason.CANCELLED, RequestState.CANCELLED)
    cache = shadow.scheduler.cache
    match = cache.match(job.tokens, cache.prefix.keys(job.tokens, None), 100)
    assert match.matched_tokens(cache.block_size) == 8
    shadow.commit()


def test_drafts_that_are_all_right_bring_sixteen_tokens_a_step() -> None:
    shadow, job = began(answer=100)
    while job.finish_reason is None:
        before = job.num_generated
        drafted(shadow, job, 20)
        shadow.step()
        drained(shadow)
        assert job.num_generated == min(100, before + MAX_DRAFTS + 1)
    shadow.finish(50)


def test_guesses_that_come_while_others_are_verified_are_ignored() -> None:
    shadow, job = began()
    before = len(job.tokens)
    drafted(shadow, job, 7, wrong=1)
    assert shadow.plan() is not None
    drafted(shadow, job, 7)
    shadow.commit()
    assert len(job.tokens) == before + 2 and job.drafts == ()
    shadow.finish(50)


def test_an_answer_ends_at_a_drafted_token_and_no_later() -> None:
    shadow, job = began(answer=9)
    drafted(shadow, job, 15)
    shadow.step()
    drained(shadow)
    assert job.num_generated == 9 and job.finish_reason is not None
    shadow.finish(50)


@pytest.mark.parametrize(("wrong", "left"), [(None, 4), (1, 0), (5, 4)])
def test_tokens_in_flight_shift_drafts_or_belie_them(wrong: int | None, left: int) -> None:
    shadow, job = began()
    assert shadow.plan() is not None and shadow.plan() is not None
    drafted(shadow, job, 6, wrong)
    drained(shadow)
    assert len(job.drafts) == left
    shadow.finish(50)


@pytest.mark.parametrize("columns", [2, 15, 16])
def test_drafts_that_a_token_in_flight_belies_end_no_window(columns: int) -> None:
    """The row goes on in its window, drained once, unless the window is full."""
    shadow, job = began()
    while (planned := shadow.plan()) is not None and planned.column < columns - 1:
        drained(shadow)
    drafted(shadow, job, 6, wrong=0)
    assert shadow.scheduler.plan(1) is None
    drained(shadow)
    plan = shadow.plan()
    assert plan is not None and plan.kind is StepKind.DECODE
    assert (plan.flush is None, plan.column) == ((True, columns) if columns < 16 else (False, 0))
    steps = shadow.scheduler.pipeline_gate.steps
    assert (steps[DrainReason.VERIFY], steps[DrainReason.CONTRADICTED]) == (0, int(columns < 16))
    shadow.finish(50)


def test_drafts_of_another_row_are_verified_all_the_same() -> None:
    shadow, job = began()
    other = decoding(shadow, 2, [9, 8, 7], 40)
    assert shadow.plan() is not None
    drafted(shadow, job, 6, wrong=0)
    drafted(shadow, other, 6)
    assert shadow.scheduler.plan(1) is None
    drained(shadow)
    plan = shadow.plan()
    assert plan is not None and [len(segment.logits) for segment in plan.segments] == [1, 6]
    assert shadow.scheduler.pipeline_gate.steps[DrainReason.VERIFY] == 1
    shadow.finish(50)


def test_a_row_that_begins_again_has_no_drafts() -> None:
    shadow, job = began()
    drafted(shadow, job, 5)
    shadow.scheduler.restart_rows()
    assert job.drafts == () and not job.is_running
    shadow.finish(50)


def test_nobody_finds_a_rejected_token_in_the_cache() -> None:
    shadow, job = began()
    text = [*job.tokens, *drafted(shadow, job, 12, wrong=1)]
    shadow.step()
    drained(shadow)
    cache = shadow.scheduler.cache
    match = cache.match(text, cache.prefix.keys(text, None), len(text))
    assert match.matched_tokens(cache.block_size) <= len(job.tokens) - 1
    shadow.finish(50)


def test_where_a_sequence_cannot_be_cut_back_drafts_are_ignored() -> None:
    shadow, job = began()
    shadow.scheduler.cache.can_take_back_drafts = False
    drafted(shadow, job, 5)
    assert job.drafts == () and not shadow.scheduler._running_set.has_drafts


def test_no_state_is_kept_after_a_draft() -> None:
    shadow, job = began()
    running, known = shadow.scheduler._running_set, len(job.tokens)
    running.cache.states = Mock(**{"make_snapshot.return_value": 7})
    job.snapshot_positions = {known, known + 1, known + 2}
    assert [cut.tokens for cut in running.plan_snapshots([(job, 3)])] == [known]


@pytest.mark.parametrize("outside", [-1, WORDS, 2**40, -(2**70)])
def test_drafts_end_before_a_token_outside_the_vocabulary(outside: int) -> None:
    shadow, job = began(vocab_size=WORDS)
    tokens = drafted(shadow, job, 3)
    shadow.scheduler.set_drafts(job.id, [*tokens, outside, 1])
    assert list(job.drafts) == tokens
    shadow.scheduler.set_drafts(job.id, [outside, *tokens])
    assert job.drafts == ()
    shadow.finish(50)


@pytest.mark.parametrize("most", [0, 1, 5, 99])
def test_no_more_is_drafted_than_may_be(most: int) -> None:
    shadow, job = began(answer=100)
    job.max_drafts = most
    drafted(shadow, job, 40)
    assert len(job.drafts) == min(most, MAX_DRAFTS)
    shadow.finish(200)


def test_nothing_is_drafted_while_steps_are_kept_small_after_a_refusal() -> None:
    shadow, job = began(answer=100)
    scheduler = shadow.scheduler
    assert scheduler.draftable_jobs == [job]
    scheduler.backoff.tighten(1)
    assert scheduler.draftable_jobs == []
    while scheduler.backoff.holds_back:
        scheduler.backoff.relax()
    assert scheduler.draftable_jobs == [job]
    shadow.finish(200)


def test_where_functions_of_the_caller_look_nothing_is_drafted() -> None:
    shadow, job = began()
    job.has_logits_processors = True
    drafted(shadow, job, 3)
    assert job.drafts == () and job not in shadow.scheduler.draftable_jobs
    job.has_logits_processors = False
    assert job in shadow.scheduler.draftable_jobs
    shadow.finish(50)


@pytest.mark.parametrize(("most", "got"), [(20, [13, 3, 1]), (60, [0, 15, 1])])
def test_guesses_take_no_blocks_from_others(most: int, got: list[int]) -> None:
    """Nor where there seems to be room for those of all rows, until the system refuses it."""
    gives = [True]
    cache = KVCache(BlockPools([LAYER], 20, 4, max_blocks=most, may_resize=lambda blocks: gives[0]))
    config = SchedulerConfig(max_rows=4, prefill_budget=64, context_length=1000, headroom=0, share_prefixes=False)
    shadow = Shadow(Scheduler(cache, config), WORDS)
    jobs = [decoding(shadow, number, [number], 60) for number in range(3)]
    for job in jobs:  # as many as they were promised room for when their last window opened
        drafted(shadow, job, 15)
    shadow.step()
    drained(shadow)
    before = [job.num_generated for job in jobs]
    gives[0] = False
    for job in jobs:
        drafted(shadow, job, 15)
    assert shadow.plan() is not None
    drafts = {row.job.id: row.num_drafted for row in commit(shadow.scheduler, *shadow.in_flight.popleft())}
    assert not any(job.preemptions for job in jobs)
    assert [drafts[job.id] for job in jobs] == got
    assert all(job.num_generated > generated for job, generated in zip(jobs, before, strict=True))
    shadow.finish(200)


def test_a_sequence_is_not_cut_back_into_what_is_cached() -> None:
    shadow, job = began()
    with pytest.raises(ValueError, match="of which 4 are cached, and cannot be cut back to 3"):
        shadow.scheduler.cache.truncate(job.id, 3)
    with pytest.raises(ValueError, match="cannot be cut back to 100"):
        shadow.scheduler.cache.truncate(job.id, 100)


# -- with models -------------------------------------------------------------------------------------------------------

PROMPTS = [tokens_of(n, seed=n) for n in (21, 9, 40)]
Guess = Callable[[tuple[int, ...], int], list[int]]
GUESSES: dict[str, Guess] = {
    "right": lambda answer, at: [*answer[at : at + 5]],
    "wrong at the third": lambda answer, at: [*answer[at : at + 2], (answer[at] + 1) % VOCAB, 3],
    "all wrong": lambda answer, at: [(token + 1) % VOCAB for token in answer[at : at + 4]],
}


def test_an_engine_drafts_within_its_models_vocabulary(tiny: Any) -> None:
    driver = Driver(tiny("llama"))
    driver.add(PROMPTS[0], 30)
    driver.step(3)
    (job,) = driver.core.scheduler.jobs
    driver.core.scheduler.set_drafts(job.id, [3, VOCAB, 3])
    assert job.drafts == (3,)


def answers(driver: Driver, wanted: list[tuple[int, ...]] | None = None, guess: str = "", **params: Any) -> Any:
    """Completions of all prompts. At two of three steps each row gets drafts of the answer that is wanted of it."""
    handles = [driver.add(prompt, 30, seed=i, **params) for i, prompt in enumerate(PROMPTS)]
    core = driver.core
    for step in range(5_000):
        if core.idle:
            break
        for job in core.scheduler.jobs if wanted is not None and step % 3 else ():
            core.scheduler.set_drafts(job.id, GUESSES[guess](wanted[job.id], job.num_generated))
        core.step()
        core.check_invariants()
    return [driver.result(handle) for handle in handles]


@pytest.mark.parametrize(
    ("name", "guess", "params"),
    [
        ("llama", "wrong at the third", {}),
        ("llama", "right", {"temperature": 0.8, "logprobs": 1}),
        ("llama", "wrong at the third", {"frequency_penalty": 0.4}),
        ("windowed llama", "all wrong", {"temperature": 0.8}),
        ("deepseek_v3", "wrong at the third", {"repetition_penalty": 1.2}),
        ("lfm2", "right", {}),
    ],
)
def test_drafts_change_no_token(name: str, guess: str, params: Any, tiny: Any) -> None:
    plain = answers(Driver(tiny(name)), **params)
    wanted = [completion.token_ids for completion in plain]
    driver = Driver(tiny(name))
    got = answers(driver, wanted, guess, **params)
    assert [completion.token_ids for completion in got] == wanted
    for mine, theirs in zip(got, plain, strict=True):
        if theirs.logprobs is not None:
            assert [p.logprob for p in mine.logprobs] == pytest.approx([p.logprob for p in theirs.logprobs], abs=1e-3)
    verified = driver.core.stats().steps_by_reason.get("verify", 0)
    assert verified > 2
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_stop_string_or_token_ends_an_answer_among_right_drafts(name: str, tiny: Any) -> None:
    """The step has chosen more tokens after it. They are no part of the answer, nor of a text that goes on from it."""
    whole = Driver(tiny(name)).result_of(PROMPTS[0], 30)
    stops = [{"stop": (whole.text[at : at + 3],)} for at in range(6, 14, 3)]
    for stop in [*stops, *({"stop_token_ids": (token,)} for token in whole.token_ids[6:14:3])]:
        plain = Driver(tiny(name)).result_of(PROMPTS[0], 30, **stop)
        driver = Driver(tiny(name))
        handle = driver.add(PROMPTS[0], 30, **stop)
        while not driver.core.idle:
            for job in driver.core.scheduler.jobs:
                driver.core.scheduler.set_drafts(job.id, GUESSES["right"](whole.token_ids, job.num_generated))
            driver.core.step()
        result = driver.result(handle)
        assert result.finish_reason is FinishReason.STOP
        assert (result.text, result.token_ids) == (plain.text, plain.token_ids)
        text = [*PROMPTS[0], *result.token_ids, 5]
        assert driver.result_of(text, 9).token_ids == Driver(tiny(name)).result_of(text, 9).token_ids
        assert_nothing_lost(driver.core.stats())
