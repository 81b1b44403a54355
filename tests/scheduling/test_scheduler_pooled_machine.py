"""Random requests without answers among others: each state counts once, nothing is lost, and no text evicts what a chat
has cached.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cortexmlx.errors import PromptTooLong
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixCache, PrefixEntry, PrefixNode
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.scheduling.job import Job, JobId
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import FinishReason, RequestState
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples
from support.scheduling.requests import add, text_of
from support.scheduling.shadow import Shadow
from support.scheduling.stories import Story

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
