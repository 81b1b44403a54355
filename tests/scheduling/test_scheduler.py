"""Cases of the scheduler that once went wrong, told as short stories on the shadow arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cortexmlx.errors import PromptTooLong
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.spec import TAIL_COLUMNS, KVSpec, LayerGroup
from cortexmlx.request import FinishReason, RequestState, SamplingParams
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import StepKind
from cortexmlx.scheduling.scheduler import Scheduler
from support.requests import add
from support.shadow import Shadow, Story

VOCAB = 11


class Stage:
    """A scheduler with a shadow arena, ready for requests."""

    def __init__(self, blocks: int, block_size: int = 4, limit: int | None = None, **settings: Any) -> None:
        group = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))
        self.cache = KVCache([group], blocks, block_size, max_blocks=limit, prefix=PrefixCache(block_size))
        defaults = {"max_rows": 4, "prefill_budget": 64, "context_length": 1000, "headroom": 0}
        self.scheduler = Scheduler(self.cache, **(defaults | settings))
        self.shadow = Shadow(self.scheduler, VOCAB)

    def ask(self, prompt: Sequence[int], max_tokens: int | None = 30, fork_of: Job | None = None) -> Job:
        number = len(self.shadow.stories)
        params = SamplingParams(max_tokens=max_tokens)
        job = add(self.scheduler, number, prompt, params, number, fork_of=fork_of)
        self.shadow.stories[job.id] = Story(job, VOCAB)
        return job

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.shadow.step()

    def finish(self) -> None:
        self.shadow.finish(2000)
        for story in self.shadow.stories.values():
            if story.job.state is RequestState.FINISHED:
                assert story.job.output == story.answer()
        stats = self.cache.stats()
        assert (stats.used_blocks, stats.free_blocks) == (0, stats.total_blocks)


def test_one_request_is_one_prefill_step_and_then_windows_of_decode_steps() -> None:
    stage = Stage(blocks=40)
    stage.ask([1, 2, 3, 4, 5], 40)
    plans = []
    while not stage.scheduler.idle:
        if (plan := stage.shadow.plan()) is not None:
            plans.append(plan)
        if stage.shadow.in_flight and (plan is None or len(stage.shadow.in_flight) > 1):
            stage.shadow.commit()
    kinds = [p.kind for p in plans]
    assert kinds == [StepKind.MIXED, *[StepKind.DECODE] * 39, StepKind.FLUSH]
    assert [p.column for p in plans[1:-1]] == [i % TAIL_COLUMNS for i in range(39)]
    assert [p.flush is not None for p in plans[1:-1]] == [i % TAIL_COLUMNS == 0 and i > 0 for i in range(39)]
    assert [p.tokens is None for p in plans[1:-1]] == [i % TAIL_COLUMNS != 0 or i == 0 for i in range(39)]


def test_the_token_just_sampled_is_not_counted_as_stored() -> None:
    """After the prefill of T tokens, T keys and values exist, not T + 1: the newest token's come with the next step."""
    stage = Stage(blocks=10)
    job = stage.ask([1, 2, 3, 4], 5)
    stage.steps(2)
    assert job.generated == 1 and stage.cache.length(job.id) == job.num_computed_tokens
    first, second = stage.shadow.in_flight[0][0].segments[0], job.prompt_length
    assert first.first == second, "the first generated token stands right behind the prompt"
    stage.finish()


def test_many_short_prompts_share_one_step() -> None:
    stage = Stage(blocks=200, max_rows=16, prefill_budget=512)
    for i in range(16):
        stage.ask([i] * 20, 2)
    plan = stage.shadow.plan()
    assert plan is not None and len(plan.segments) == 16
    stage.finish()


def test_a_prompt_that_fills_the_cache_waits_for_no_copy_of_a_partial_match() -> None:
    """The cached block that matches in part cannot be kept beside the copy of it when every block is needed."""
    stage = Stage(blocks=2, block_size=2, max_rows=1, prefill_budget=1)
    first = stage.ask([1, 2, 3, 4], None)
    stage.ask([1, 2, 3, 4], None, fork_of=first)
    stage.finish()


@pytest.mark.parametrize("more", [1, 2, 7])
def test_a_flush_keeps_off_blocks_that_the_arena_grows_by(more: int) -> None:
    """The unused columns of a row that ended go to scratch, which has moved when the arena has grown in between."""
    stage = Stage(blocks=9, block_size=1, limit=9 + more, max_rows=2)
    short, long = stage.ask([1], 3), stage.ask([2], None)
    stage.steps(6)
    assert short.state is RequestState.FINISHED and long.state is RequestState.DECODING
    stage.finish()
    assert stage.cache.blocks > 9


def test_a_flush_keeps_inside_an_arena_that_shrinks() -> None:
    stage = Stage(blocks=60, block_size=2, max_rows=2)
    short = stage.ask([1], 4)
    stage.ask([2, 3], 25)
    stage.steps(5)
    assert short.state is RequestState.FINISHED
    stage.scheduler.relieve(critical=True)
    stage.finish()
    assert stage.cache.blocks < 60


def test_preempted_requests_resume_with_the_same_tokens() -> None:
    stage = Stage(blocks=12, share_prefixes=False)
    jobs = [stage.ask([i] * 5, 30) for i in range(3)]
    stage.finish()
    assert sum(j.preemptions for j in jobs) > 0
    assert jobs[0].preemptions == 0, "the oldest goes on"


def test_results_of_a_row_that_changed_its_tenant_are_dropped() -> None:
    stage = Stage(blocks=20)
    job = stage.ask([1, 2, 3], 30)
    stage.steps(4)
    assert stage.shadow.in_flight
    before = len(job.tokens)
    stage.scheduler.finish(job.id, FinishReason.CANCELLED, RequestState.CANCELLED)
    other = stage.ask([4, 5, 6, 7], 12)
    stage.finish()
    assert len(job.tokens) == before and other.generated == 12


@pytest.mark.parametrize(("tokens", "room"), [(41, "40"), (1000, "1000")])
def test_what_can_never_fit_is_refused_with_the_numbers(tokens: int, room: str) -> None:
    stage = Stage(blocks=10 if tokens == 41 else 400)
    with pytest.raises(PromptTooLong, match=rf"{tokens} tokens .*{room}"):
        stage.ask([1] * tokens)
    assert stage.scheduler.idle


# -- to wait for another's prefix, or not -----------------------------------------------------------------------------


@pytest.mark.parametrize("worth", [1, 32])
def test_who_has_nothing_to_gain_waits_for_nobody(worth: int) -> None:
    """The last token of a prompt is computed in any case, so a prompt of one block of one token finds nothing."""
    stage = Stage(blocks=40, block_size=1, worth_waiting=worth)
    jobs = [stage.ask([1]), stage.ask([1]), stage.ask([2])]
    stage.steps(1)
    assert [job.running for job in jobs] == [True, True, True]
    stage.finish()


def shared_prompts(count: int, shared: int, own: int) -> list[list[int]]:
    return [[*[i % 7 for i in range(shared)], *[i % 9 + 2] * own] for i in range(count)]


def prompt_tokens_computed(stage: Stage) -> list[int]:
    """Prompt tokens of each step, until everything has ended."""
    counts = []
    while not stage.scheduler.idle:
        if (plan := stage.shadow.plan()) is not None:
            stories = stage.shadow.stories
            counts.append(sum(s.count for s in plan.segments if s.first < stories[s.job].job.prompt_length))
        if stage.shadow.in_flight:
            stage.shadow.commit()
    return counts


def test_a_long_shared_beginning_is_computed_once() -> None:
    stage = Stage(blocks=400, block_size=32, max_rows=16, prefill_budget=512)
    for prompt in shared_prompts(16, 512, 20):
        stage.ask(prompt, 20)
    assert sum(prompt_tokens_computed(stage)) == 512 + 16 * 20


def test_the_same_prompt_twice_is_computed_once() -> None:
    stage = Stage(blocks=400, block_size=32, prefill_budget=512)
    for prompt in [list(range(10)) * 30] * 2:
        stage.ask(prompt, 20)
    assert sum(prompt_tokens_computed(stage)) == 300 + 300 % 32


@pytest.mark.parametrize(("shared", "steps"), [(24, 1), (31, 1), (32, 2), (48, 2)])
def test_a_beginning_is_waited_for_if_it_saves_as_many_tokens_as_a_step_costs(shared: int, steps: int) -> None:
    stage = Stage(blocks=400, block_size=8, max_rows=8, prefill_budget=1024)
    prompts = shared_prompts(8, shared, 40)
    for prompt in prompts:
        stage.ask(prompt, 2)
    counts = [count for count in prompt_tokens_computed(stage) if count]
    assert len(counts) == steps
    assert sum(counts) == (8 * len(prompts[0]) if steps == 1 else shared + 8 * 40)


def test_who_waits_begins_as_soon_as_the_shared_part_is_stored() -> None:
    """Not only when the other's whole prompt is."""
    stage = Stage(blocks=400, block_size=8, prefill_budget=64)
    long, short = stage.ask([1] * 64 + [2] * 900), stage.ask([1] * 64 + [3] * 9)
    stage.steps(3)
    assert short.running and long.state is RequestState.PREFILLING and short.num_computed_tokens >= 64
    stage.finish()
