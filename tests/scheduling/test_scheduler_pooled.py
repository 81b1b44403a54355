"""Requests without answers among others: each state counts once, chats keep what they have cached, and answers keep
their pace.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cortexmlx.errors import PromptTooLong
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixCache, PrefixEntry, PrefixNode
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.scheduling.job import Job, JobId
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.scheduling.latency import MIN_PIECE
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import FinishReason, RequestState
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples
from support.scheduling.clockwork import Clockwork
from support.scheduling.requests import add, text_of
from support.scheduling.shadow import Shadow
from support.scheduling.stage import Stage
from support.scheduling.stories import Story


def add_text(stage: Stage, *args: Any, **kwargs: Any) -> Job:
    """Ask for the states of a text."""
    job = stage.scheduler.add(JobId(len(stage.shadow.stories)), text_of(*args, **kwargs), frozenset())
    stage.shadow.stories[job.id] = Story(job, 11)
    return job


def test_a_text_ends_with_its_prompt_and_has_no_token() -> None:
    stage = Stage(16)
    job = add_text(stage, list(range(10)))
    plan = stage.shadow.plan()
    assert plan is not None and len(plan.logit_rows) == 0 and plan.sampling == ()
    assert plan.pooling is not None and plan.pooling.rows.tolist() == [9] and plan.pooling.weights.tolist() == [1.0]
    stage.shadow.commit()
    assert job.state is RequestState.FINISHED and job.num_generated == 0 and stage.scheduler.is_idle
    assert stage.cache.stats().cached_blocks == 0 and stage.cache.stats().used_blocks == 0


def test_states_are_weighted_by_their_positions() -> None:
    stage = Stage(16, prefill_budget=4)
    add_text(stage, list(range(10)), 3, position_weighted=True)
    seen = []
    while (plan := stage.shadow.plan()) is not None:
        assert plan.pooling is None or len(plan.pooling.weights) == plan.pooling.counts.sum()
        seen += [] if plan.pooling is None else plan.pooling.weights.tolist()
        stage.shadow.commit()
    assert seen == [4, 5, 6, 7, 8, 9, 10]


def test_a_text_may_be_as_long_as_the_context_and_the_cache() -> None:
    stage = Stage(4, context_length=16)
    add_text(stage, [1] * 16)
    stage.shadow.finish(50)
    with pytest.raises(PromptTooLong, match="the text has 17 tokens, and the model's context is 16") as refusal:
        add_text(stage, [1] * 17)
    assert (refusal.value.tokens, refusal.value.limit) == (17, 16)


def test_a_text_is_computed_whole_where_answers_keep_a_part() -> None:
    stage = Stage(16, keep=KeepPolicy(first=2, last=4))
    job = add_text(stage, list(range(11)) * 2, 0)
    while (plan := stage.shadow.plan()) is not None:
        assert plan.pooling is not None and plan.pooling.rows.tolist() == list(range(22))
        stage.shadow.commit()
    assert job.state is RequestState.FINISHED and not job.dropped_tokens


def test_texts_need_no_row() -> None:
    stage = Stage(64, max_rows=1, prefill_budget=64)
    chat = stage.ask([1, 2, 3], 40)
    stage.steps(2)
    texts = [add_text(stage, [5] * 6) for _ in range(8)]
    stage.steps(4)
    assert chat.state is RequestState.DECODING
    assert all(text.state is RequestState.FINISHED for text in texts)
    waiting = stage.ask([3, 2, 1], 2)
    stage.steps(4)
    assert waiting.state is RequestState.WAITING  # it does need one


def test_a_chat_begins_beside_a_text_that_takes_several_steps() -> None:
    stage = Stage(64, max_rows=1, prefill_budget=16)
    add_text(stage, [5] * 60)
    stage.steps(1)
    chat = stage.ask([1, 2, 3], 4)
    stage.steps(2)
    assert chat.state is not RequestState.WAITING


def test_a_text_that_must_wait_for_its_turn_holds_up_no_chat() -> None:
    stage = Stage(64, prefill_budget=16)
    add_text(stage, [5] * 60, client="many")
    stage.steps(1)
    text = add_text(stage, [5] * 8, client="few")
    chat = stage.ask([1, 2, 3], 4)
    stage.steps(2)
    assert text.state is RequestState.WAITING and chat.state is not RequestState.WAITING


def test_texts_do_not_wait_for_what_they_do_not_share() -> None:
    """The same text twice: the second waits for the instruction, and not for what comes after it."""
    stage = Stage(128, prefill_budget=64, worth_waiting=8)
    stage.ask([1] * 200, 2)  # it takes half of each step
    for _ in range(2):
        add_text(stage, [*range(10), *range(10), *[7] * 19], shared=20)
    assert stage.shadow.plan() is not None
    stage.shadow.commit()
    plan = stage.shadow.plan()
    assert plan is not None and [segment.first for segment in plan.segments][1:] == [32, 20]


def test_a_text_does_not_fit_where_chats_have_cached() -> None:
    stage = Stage(8)
    stage.ask([3] * 16, 1)
    stage.shadow.finish(100)
    running = stage.scheduler._running_set
    text = add_text(stage, [5] * 20)
    assert running.fits(text, None), "the first always fits"
    stage.ask([4] * 4, 20)
    stage.steps(2)
    late = add_text(stage, [6] * 20)
    assert not running.fits(late, None)


def test_a_text_alone_takes_what_chats_have_cached() -> None:
    stage = Stage(8)
    stage.ask([3] * 28, 1)
    stage.shadow.finish(100)
    text = add_text(stage, [5] * 20)
    stage.shadow.finish(100)
    assert text.state is RequestState.FINISHED


def test_while_memory_was_refused_texts_count_as_rows() -> None:
    stage = Stage(64, prefill_budget=64)
    stage.scheduler.restart_rows(rows=2)
    for _ in range(5):
        add_text(stage, [5] * 6)
    plan = stage.shadow.plan()
    assert plan is not None and len(plan.segments) == 2


def test_texts_with_an_instruction_wait_for_the_first_of_them() -> None:
    stage = Stage(64, prefill_budget=1000, worth_waiting=8)
    instruction = list(range(10)) * 2
    texts = [add_text(stage, [*instruction, 7, number], shared=20) for number in range(6)]
    plan = stage.shadow.plan()
    assert plan is not None and [s.count for s in plan.segments] == [22]
    stage.shadow.commit()
    plan = stage.shadow.plan()
    assert plan is not None and [s.count for s in plan.segments] == [2] * 5 and {s.first for s in plan.segments} == {20}
    stage.shadow.commit()
    assert all(text.state is RequestState.FINISHED for text in texts)
    assert sum(len(entry.tokens) for entry in stage.cache.prefix.entries) == 20


def test_an_instruction_within_a_block_is_found_by_all() -> None:
    """A partial block is copied and not taken over, so that the next text finds it, too."""
    stage = Stage(64, block_size=8, prefill_budget=1000)
    add_text(stage, [1, 2, 3, 4, 9], shared=4)
    stage.shadow.finish(50)
    texts = [add_text(stage, [1, 2, 3, 4, number], shared=4) for number in range(5, 9)]
    plan = stage.shadow.plan()
    assert plan is not None and [s.first for s in plan.segments] == [4] * 4 and len(plan.copies) == 4
    stage.shadow.commit()
    stage.shadow.check_shared()
    assert [text.cached for text in texts] == [4] * 4


def test_texts_leave_the_cache_of_chats_alone() -> None:
    stage = Stage(32)
    stage.cache.pools.spare = (16,)
    chats = [stage.ask([number] * 20, 4) for number in range(4)]
    stage.shadow.finish(2000)
    before = set(stage.cache.prefix.entries)
    assert len(before) > 8
    for number in range(40):
        add_text(stage, [10, number % 11, *[number % 7] * 40], shared=2)
    stage.shadow.finish(2000)
    assert before <= set(stage.cache.prefix.entries)
    again = [stage.ask(chat.tokens[:20], 4) for chat in chats[-2:]]
    stage.shadow.finish(2000)
    assert all(chat.cached for chat in again)


def test_chats_evict_instructions_first() -> None:
    stage = Stage(8)
    stage.ask([3] * 9, 1)
    stage.shadow.finish(100)
    add_text(stage, [1] * 9, shared=8)
    stage.shadow.finish(100)
    kept = {tuple(entry.tokens) for entry in stage.cache.prefix.entries if not entry.transient}
    assert any(entry.transient for entry in stage.cache.prefix.entries)
    stage.ask([2] * 20, 1)
    stage.shadow.finish(100)
    assert kept <= {tuple(entry.tokens) for entry in stage.cache.prefix.entries}
    assert not any(entry.transient for entry in stage.cache.prefix.entries)


def test_a_text_evicts_an_instruction_and_not_what_is_next() -> None:
    cache = Stage(8).cache
    for number, transient in enumerate((False, True)):
        cache.allocate_for(number, 8, transient=transient)
        cache.register(number, [number] * 8, 8)
        cache.free(number, evict_first=not transient)
    (pool,) = cache.pools
    assert (len(pool.passed), len(pool.transient)) == (2, 2)
    cache.allocate_for(2, 20, transient=True)
    assert (len(pool.passed), len(pool.transient)) == (2, 1)


def test_what_is_shared_is_computed_where_its_states_count() -> None:
    stage = Stage(16)
    for _ in range(2):
        job = add_text(stage, [1, 2, 3, 4] * 3, 2, shared=8)
        stage.shadow.finish(100)
        assert job.cached <= 2


def test_instructions_move_with_the_other_blocks() -> None:
    stage = Stage(16)
    add_text(stage, [3] * 9)  # it keeps nothing, so there is a hole before the other
    add_text(stage, [1] * 9, shared=8)
    stage.shadow.finish(100)
    stage.shadow.compact()
    stage.scheduler.check_invariants()
    stage.shadow.check_shared()
    again = add_text(stage, [1] * 10, shared=8)
    stage.shadow.finish(100)
    assert again.cached == 8
    assert stage.cache.pools.drop_cached() and not stage.cache.prefix.entries


def test_a_chat_that_uses_an_instruction_keeps_it() -> None:
    stage = Stage(16)
    add_text(stage, [1] * 9, shared=8)
    stage.shadow.finish(100)
    assert all(entry.transient for entry in stage.cache.prefix.entries)
    chat = stage.ask([1] * 10, 2)
    stage.shadow.finish(100)
    assert chat.cached == 8
    assert not any(entry.transient for entry in stage.cache.prefix.entries)


def test_a_chat_that_computed_an_instruction_itself_keeps_it() -> None:
    cache, tokens = Stage(16).cache, [1] * 8
    for number, transient in enumerate((True, False)):
        cache.allocate_for(number, 9, transient=transient)
    for number in range(2):
        cache.register(number, tokens, 8)
        assert [entry.transient for entry in cache.prefix.entries] == [not number] * 2


@pytest.mark.parametrize("texts", [1, 40])
def test_a_streaming_chat_keeps_its_pace_beside_texts(texts: int) -> None:
    """Its gaps stay within the target, whatever texts there are, as soon as the cost of a token is known."""
    machine = Clockwork(cost=0.001, target=0.1)
    chat = machine.add(0, prompt=50, tokens=400)
    machine.until_first(0)
    for number in range(1, texts + 1):
        machine.scheduler.add(JobId(number), text_of([1] * 700, None), frozenset())
    beside = 0
    while machine.scheduler.rows_running + machine.scheduler.rows_waiting > 1:
        machine.step()
        plan, seconds = machine.plans[-1]
        assert any(segment.job == chat.id for segment in plan.segments), "a step without a token of the chat"
        assert seconds <= 0.1 + 0.001, "the next token of the chat came late"
        beside += len(plan.positions) > 1
    assert beside >= texts * 700 / 100
    assert not chat.finish_reason


def test_a_target_that_cannot_be_met_leaves_the_least_piece() -> None:
    machine = Clockwork(cost=0.1, target=0.05)
    machine.add(0, prompt=5, tokens=100)
    machine.until_first(0)
    machine.scheduler.add(JobId(1), text_of([1] * 200, None), frozenset())
    while machine.scheduler.rows_running > 1 or machine.scheduler.rows_waiting:
        machine.step()
        assert len(machine.plans[-1][0].positions) <= MIN_PIECE + 1


def test_clients_take_turns_with_texts() -> None:
    """A client with a thousand texts does not make another wait for all of them."""
    stage = Stage(512, prefill_budget=32)
    for _ in range(100):
        add_text(stage, [1] * 16, client="many")
    stage.steps(3)
    one = add_text(stage, [2] * 16, client="few")
    chat = stage.ask([3] * 8, 2)
    stage.steps(8)
    assert one.state is RequestState.FINISHED and chat.num_generated
    assert stage.scheduler.rows_waiting > 50


def test_preempted_texts_count_no_state_twice() -> None:
    stage = Stage(10, prefill_budget=8)
    job = add_text(stage, [1, 2, 3, 4] * 5, 2)
    counted: list[int] = []
    for number in range(200):
        plan = stage.shadow.plan()
        if plan is None:
            break
        for segment in plan.segments:
            counted += list(segment.pooled)
        stage.shadow.commit()
        if number == 1:
            stage.scheduler.restart_rows()
    assert job.state is RequestState.FINISHED and counted == list(range(2, 20))
    assert np.array_equal(counted, range(2, 20))


# Random requests without answers among others: each state counts once, nothing is lost, and no text evicts what a
# chat has cached.


VOCAB = 5
LAYER = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))
THEMES = ([1, 2, 3, 4] * 12, [4, 4, 1] * 16, [0, 2] * 24)
"""Texts begin like each other, and like the prompts of chats."""


def text(entry: PrefixEntry) -> list[int]:
    """The tokens of a chain up to the end of an entry."""
    tokens: list[int] = []
    node: PrefixNode = entry
    while isinstance(node, PrefixEntry):
        tokens[:0], node = node.tokens, node.parent
    return tokens


class PooledMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 4, 8]),
        blocks=st.integers(8, 40),
        grown=st.booleans(),
        max_rows=st.integers(1, 4),
        prefill_budget=st.integers(1, 40),
        pipeline=st.booleans(),
        token_target=st.sampled_from([None, 0.01]),
        client_tokens=st.sampled_from([None, 40]),
    )
    def begin(self, block_size: int, blocks: int, grown: bool, **config: Any) -> None:
        blocks = -(-2 * 16 // block_size) + blocks
        first = blocks if grown else 2
        pools = BlockPools([LAYER], first, block_size, max_blocks=blocks, prefix=PrefixCache(block_size))
        self.longest = blocks // 2 * block_size
        pools.spare = (blocks // 2,)
        self.taken = False
        self.cache = KVCache(pools)
        self.scheduler = Scheduler(self.cache, SchedulerConfig(context_length=150, headroom=3, **config))
        self.shadow = Shadow(self.scheduler, VOCAB)
        self.counted: dict[int, Counter[int]] = {}
        self.texts: list[Job] = []
        make_room = pools.make_room

        def watched(group: int, count: int, transient: bool = False) -> None:
            before = self.of_chats()
            make_room(group, count, transient)
            assert not transient or self.of_chats() == before, "a text evicts what a chat has cached"

        pools.make_room = watched  # type: ignore[method-assign]
        drop_cached = pools.drop_cached
        self.dropping = False

        def dropped(entries: int | None = None) -> int:
            assert self.taken or self.dropping, "what is cached is dropped for a text"
            return drop_cached(entries)

        pools.drop_cached = dropped  # type: ignore[method-assign]

    def of_chats(self) -> set[PrefixEntry]:
        return {entry for entry in self.cache.prefix.entries if not entry.transient}

    @rule(
        theme=st.sampled_from(THEMES),
        length=st.integers(1, 48),
        answer=st.integers(1, 20),
        client=st.sampled_from([None, "a", "b"]),
    )
    def ask(self, theme: list[int], length: int, answer: int, client: str | None) -> None:
        number = len(self.shadow.stories)
        try:
            job = add(self.scheduler, number, theme[:length], SamplingParams(max_tokens=answer), number, client=client)
        except PromptTooLong:
            return
        self.shadow.stories[job.id] = Story(job, VOCAB)

    @rule(
        theme=st.sampled_from(THEMES),
        length=st.integers(1, 48),
        rest=st.lists(st.integers(0, VOCAB - 1), max_size=6),
        shared=st.integers(0, 48),
        first=st.integers(0, 48),
        last=st.booleans(),
        client=st.sampled_from([None, "a"]),
    )
    def embed(
        self, theme: list[int], length: int, rest: list[int], shared: int, first: int, last: bool, client: str | None
    ) -> None:
        prompt = [*theme[:length], *rest][: self.longest]
        first = len(prompt) - 1 if last else min(first, len(prompt) - 1)
        number = JobId(len(self.shadow.stories))
        try:
            request = text_of(prompt, first, min(shared, length, len(prompt) - 1), client)
            job = self.scheduler.add(number, request, frozenset())
        except PromptTooLong:
            assert self.taken
            return
        self.texts.append(job)
        self.shadow.stories[job.id] = Story(job, VOCAB)
        self.counted[job.id] = Counter()

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        before = len(self.shadow.in_flight)
        plan = self.shadow.plan()
        if plan is not None:
            self.check(plan)
        if self.shadow.in_flight and (plan is None or before):
            self.commit()
        elif plan is None:
            assert self.scheduler.is_idle, "there are requests but nothing to compute"

    def commit(self) -> None:
        plan = self.shadow.in_flight[0][0]
        for segment in plan.segments:
            job = self.shadow.stories[segment.job].job
            if segment.pooled and job.generation == segment.generation:
                self.counted[segment.job].update(segment.pooled)
        self.shadow.commit()

    def check(self, plan: StepPlan) -> None:
        """The step sums up the states of the right tokens."""
        if plan.pooling is None:
            return assert_nothing_pooled(plan)
        rows, end = iter(plan.pooling.rows.tolist()), 0
        counts = iter(plan.pooling.counts.tolist())
        for segment in plan.segments:
            begin, end = end, end + segment.count
            if segment.pooled:
                assert next(counts) == len(segment.pooled)
                assert [int(plan.positions[next(rows)]) for _ in segment.pooled] == list(segment.pooled)
                assert segment.first <= segment.pooled.start and segment.pooled.stop == segment.first + segment.count
            assert begin + segment.count == end
        assert next(rows, None) is None and next(counts, None) is None

    @precondition(lambda self: self.shadow.stories)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        jobs = list(self.shadow.stories.values())
        self.scheduler.finish(jobs[which % len(jobs)].job.id, FinishReason.CANCELLED, RequestState.CANCELLED)

    @precondition(lambda self: not self.shadow.in_flight)
    @rule(critical=st.booleans())
    def relieve(self, critical: bool) -> None:
        self.dropping = True
        self.scheduler.relieve_memory(critical)
        self.dropping = False

    @precondition(lambda self: self.scheduler.is_idle and not self.shadow.in_flight)
    @rule()
    def compact(self) -> None:
        self.shadow.compact()

    @rule(refused=st.booleans())
    def fail_a_step(self, refused: bool) -> None:
        self.shadow.in_flight.clear()
        self.dropping = True
        self.scheduler.restart_rows(rows=1 if refused else None)
        self.dropping = False

    @precondition(lambda self: not self.shadow.in_flight and not self.scheduler.rows_running and not self.taken)
    @rule()
    def take_memory(self) -> None:
        """The system takes memory away: the arena cannot grow again."""
        self.taken = True
        pools = self.cache.pools
        pools.max_blocks = tuple(
            max(have, most // 2) for have, most in zip(pools.blocks, pools.max_blocks, strict=True)
        )
        self.scheduler.end_stuck_jobs()
        self.scheduler.ended_jobs.clear()

    @invariant()
    def everything_fits_together(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.scheduler.check_invariants()
        self.shadow.check_shared()
        pool, spare = self.cache.pools[0], self.cache.pools.spare[0]
        cached = pool.evictable - len(pool.transient)
        if not self.taken:
            assert cached <= self.cache.pools.max_blocks[0] - spare, "chats have cached what texts need"
        shared = [job.tokens[: job.request.pooling.shared] for job in self.texts if job.request.pooling]
        for entry in self.cache.prefix.entries:
            if entry.transient:
                kept = text(entry)
                assert any(kept == tokens[: len(kept)] for tokens in shared), "more than an instruction is kept"

    @invariant()
    def each_state_counts_once(self) -> None:
        for job in getattr(self, "texts", ()):
            first = job.request.pooling.first if job.request.pooling else 0
            assert self.counted[job.id] == Counter(range(first, job.num_pooled_tokens))
            if job.state is RequestState.FINISHED:
                assert job.num_pooled_tokens == job.prompt_length and job.finish_reason is FinishReason.STOP

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        since, known = 0, -1
        while not (self.scheduler.is_idle and not self.shadow.in_flight):
            self.one_step()
            now = sum(s.job.num_generated for s in self.shadow.stories.values()) + sum(
                map(Counter.total, self.counted.values())
            )
            now += sum(job.num_computed_tokens for job in self.texts) + sum(
                j.finish_reason is not None for j in self.texts
            )
            since, known = (0, now) if now != known else (since + 1, now)
            assert since < 200, "nothing happens any more"
        assert all(job.finish_reason is not None for job in self.texts)
        self.everything_fits_together()
        self.each_state_counts_once()


def assert_nothing_pooled(plan: StepPlan) -> None:
    assert not any(segment.pooled for segment in plan.segments)


PooledMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPooled = PooledMachine.TestCase


class LongMachine(PooledMachine):
    pass


LongMachine.TestCase.settings = settings(
    max_examples=examples(1500), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPooledLong = pytest.mark.slow(LongMachine.TestCase)
