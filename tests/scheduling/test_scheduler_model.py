"""The scheduler under random requests, cancellations, pressure and delays, with a fake model on a shadow arena: every
request gets exactly its tokens, every read finds the row's own tokens, and no block is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.sizing import max_row_blocks
from cortexmlx.kv.snapshots import SnapshotRegistry
from cortexmlx.kv.spec import TAIL_COLUMNS, AttentionWindow, KVSpec, LayerGroup
from cortexmlx.scheduling import builder as placement
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import FinishReason, RequestState
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples
from support.scheduling.requests import add
from support.scheduling.shadow import Shadow
from support.scheduling.stories import KeptStory, Story

ALL = AttentionWindow()
REACHES: list[list[AttentionWindow]] = [
    *(
        [ALL],
        [ALL],
        [ALL, ALL],
        [AttentionWindow(5)],
        [ALL, AttentionWindow(1)],
        [AttentionWindow(12), ALL],
        [AttentionWindow(3), AttentionWindow(20)],
        [AttentionWindow(40), ALL],
    ),
    *(
        [ALL, AttentionWindow(2), AttentionWindow(17)],
        [ALL, AttentionWindow(6, True)],
        [AttentionWindow(16, True)],
        [AttentionWindow(9), AttentionWindow(8, True)],
    ),
]
"""How far the layers of a model see: everything, windows and chunks, smaller and larger than blocks and pieces."""


def groups(reaches: Sequence[AttentionWindow]) -> tuple[LayerGroup, ...]:
    specs = [KVSpec(1, 4 + i, 4, "float32", r.tokens, chunked=r.chunked) for i, r in enumerate(reaches)]
    return tuple(LayerGroup(spec, (i,)) for i, spec in enumerate(specs))


VOCAB = 5
CONTEXT = 150
THEMES = ([1, 2, 3, 4] * 20, [4, 4, 1] * 25, [0, 2] * 40)
"""Prompts begin like each other, so that prefixes are shared."""
WAITS = (RequestState.WAITING, RequestState.PREEMPTED)


MORE = st.one_of(st.just([]), st.lists(st.integers(-2, VOCAB + 1), max_size=40))
"""Drafts that are no part of an answer, or no tokens at all."""


class SchedulerMachine(RuleBasedStateMachine):
    jobs = Bundle("jobs")

    @initialize(
        reaches=st.sampled_from(REACHES),
        more_than_a_row=st.sampled_from([0, 2, 30]),
        origin=st.sampled_from([1, 16, 512]),
        block_size=st.sampled_from([1, 2, 4, 8]),
        first=st.one_of(st.integers(2, 12), st.integers(20, 60)),
        more=st.sampled_from([0, 0, 1, 9, 40]),
        max_rows=st.integers(1, 5),
        prefill_budget=st.integers(1, 40),
        pipeline=st.booleans(),
        headroom=st.sampled_from([0, 3, 128]),
        share=st.booleans(),
        token_target=st.sampled_from([None, 0.01]),
        client_tokens=st.sampled_from([None, 40]),
        between=st.booleans(),
        worth_waiting=st.sampled_from([1, 1, 5, 64]),
        snapshots=st.sampled_from([None, None, 0, 1, 3, 20]),
        long_tail_rows=st.sampled_from([0, 0, 1, 2]),
        keep=st.sampled_from([None, None, (0, 1), (4, 3), (1, 9), (7, 5), (0, 30)]),
    )
    def begin(
        self,
        reaches: list[AttentionWindow],
        more_than_a_row: int,
        origin: int,
        block_size: int,
        first: int,
        more: int,
        max_rows: int,
        prefill_budget: int,
        pipeline: bool,
        headroom: int,
        share: bool,
        token_target: float | None,
        client_tokens: int | None,
        between: bool,
        worth_waiting: int,
        snapshots: int | None,
        long_tail_rows: int,
        keep: tuple[int, int] | None,
    ) -> None:
        self.now = 0.0
        self.keep = keep
        self.worth_waiting = worth_waiting
        self.client_tokens = client_tokens
        self.allowed = first + more
        self.origin = mock.patch.object(placement, "ORIGIN_UNIT", origin)
        self.origin.start()
        most = [max_row_blocks(attention_window, block_size) for attention_window in reaches]
        limits = [first + more if n is None else min(first + more, n + more_than_a_row) for n in most]
        cache = KVCache(
            BlockPools(
                groups(reaches),
                [min(first, limit) for limit in limits],
                block_size,
                max_blocks=limits,
                prefix=PrefixCache(block_size),
                may_resize=lambda blocks: max(blocks) <= self.allowed,
                snapshots=None if snapshots is None else SnapshotRegistry(snapshots),
            )
        )
        config = SchedulerConfig(
            max_rows=max_rows,
            prefill_budget=prefill_budget,
            context_length=CONTEXT,
            pipeline=pipeline,
            headroom=headroom,
            share_prefixes=share,
            token_target=token_target,
            client_tokens=client_tokens,
            keep=None if keep is None else KeepPolicy(*keep),
            share_between_clients=between,
            worth_waiting=worth_waiting,
            vocab_size=VOCAB,
            long_tail_rows=long_tail_rows if most == [None] * len(most) else 0,  # as `sizing.long_tail_rows`
        )
        self.scheduler = Scheduler(cache, config, clock=lambda: self.now)
        self.shadow = Shadow(self.scheduler, VOCAB)
        self.open: list[Job] = []
        self.requests = 0

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        stop: bool,
        parent: Job | None,
        client: str | None,
        background: bool,
    ) -> Job:
        self.requests += 1
        self.now += 1
        stop_ids = frozenset([VOCAB - 1]) if stop else frozenset()
        job = add(
            self.scheduler,
            self.requests,
            prompt,
            params,
            seed,
            stop_ids,
            fork_of=parent,
            client=client,
            background=background,
        )
        kept = {} if self.keep is None else dict(zip(("first", "last"), self.keep, strict=True))
        self.shadow.stories[job.id] = KeptStory(job, VOCAB, **kept) if kept else Story(job, VOCAB)
        self.open.append(job)
        return job

    @rule(
        target=jobs,
        theme=st.integers(0, 2),
        alike=st.one_of(st.integers(0, 6), st.integers(0, 70)),
        rest=st.lists(st.integers(0, VOCAB - 1), max_size=12),
        max_tokens=st.one_of(st.none(), st.integers(1, 40)),
        answers=st.sampled_from([1, 1, 1, 2, 3]),
        equal=st.booleans(),
        seed=st.integers(0, 1000),
        stop=st.booleans(),
        history=st.booleans(),
        priority=st.integers(-1, 1),
        client=st.sampled_from([None, None, "one", "other"]),
        background=st.booleans(),
        waiting=st.sampled_from([0.0, 0.0, 25.0]),
    )
    def ask(
        self,
        theme: int,
        alike: int,
        rest: list[int],
        max_tokens: int | None,
        answers: int,
        equal: bool,
        seed: int,
        stop: bool,
        history: bool,
        priority: int,
        client: str | None,
        background: bool,
        waiting: float,
    ) -> object:
        self.now += waiting
        prompt = [*THEMES[theme][:alike], *rest][: self.longest_prompt] or [0]
        params = SamplingParams(
            max_tokens=max_tokens, presence_penalty=0.5 if history else 0.0, priority=priority, n=answers
        )
        first = self.submit(prompt, params, seed, stop, None, client, background)
        seeds = [seed if equal else seed + i for i in range(1, answers)]
        others = [self.submit(prompt, params, other, stop, first, client, background) for other in seeds]
        return multiple(first, *others)

    @rule(target=jobs, job=jobs, seed=st.integers(0, 1000))
    def another_answer(self, job: Job, seed: int) -> Job:
        """A fork of whatever has become of the first answer meanwhile."""
        assume(job.prompt_length <= self.longest_prompt)
        prompt = list(job.request.prompt)
        return self.submit(prompt, job.params, seed, bool(job.stop_ids), job, job.client, job.request.background)

    @rule(
        target=jobs,
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
        max_tokens=st.integers(1, 30),
        answers=st.integers(2, 3),
        seed=st.integers(0, 1000),
        before=st.integers(0, 20),
        after=st.integers(0, 20),
    )
    def press_equal_answers(
        self, prompt: list[int], max_tokens: int, answers: int, seed: int, before: int, after: int
    ) -> object:
        """Answers that compute the same: the blocks of one are doubles of another's, and free when they end."""
        prompt = prompt[: self.longest_prompt]
        params = SamplingParams(max_tokens=max_tokens, n=answers)
        first = self.submit(prompt, params, seed, False, None, None, False)
        others = [self.submit(prompt, params, seed, False, first, None, False) for _ in range(1, answers)]
        self.steps(before)
        self.scheduler.relieve_memory(True)
        self.steps(after)
        return multiple(first, *others)

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt that is not refused. One that keeps a part of its tokens may be longer than the cache."""
        capacity = self.scheduler.cache.tables.capacity_tokens
        if self.keep is not None and self.keep[0] + 2 * self.keep[1] <= capacity:
            return 1000
        return min(capacity, CONTEXT - 1)

    @rule(job=jobs)
    def cancel(self, job: Job) -> None:
        self.scheduler.finish(job.id, FinishReason.CANCELLED, RequestState.CANCELLED)

    @rule(job=jobs, count=st.integers(1, 20), wrong=st.one_of(st.none(), st.integers(0, 20)), more=MORE)
    def guess(self, job: Job, count: int, wrong: int | None, more: list[int]) -> None:
        """The next tokens of an answer, of which one may be wrong, and `more`: past its end, or no tokens at all."""
        if job.can_decode:
            self.draft(job, count, wrong, more)

    def draft(self, job: Job, count: int, wrong: int | None, more: list[int]) -> None:
        guessed = self.shadow.next_tokens(job, count)
        if wrong is not None and wrong < len(guessed):
            guessed[wrong] = (guessed[wrong] + 1) % VOCAB
        self.scheduler.set_drafts(job.id, guessed + more)
        assert all(0 <= token < VOCAB for token in job.drafts) and len(job.drafts) < TAIL_COLUMNS

    @rule(
        count=st.integers(1, 12),
        right=st.lists(st.integers(0, 17), min_size=1, max_size=5),
        more=MORE,
        pressed=st.booleans(),
    )
    def verify(self, count: int, right: list[int], more: list[int], pressed: bool) -> None:
        """Steps in a row that all verify: each row in turn gets as many right tokens as `right` says, and `more`.
        Memory may be `pressed` between drafts and their step.
        """
        for step in range(count):
            for place, job in enumerate(self.scheduler.draftable_jobs):
                self.draft(job, right[(place + step) % len(right)], None, more)
            if pressed:
                self.scheduler.relieve_memory(True)
            self.step()

    @rule(job=jobs)
    def end_at_a_stop_string(self, job: Job) -> None:
        """The engine ends an answer itself when its text is complete."""
        if job.num_generated:
            self.scheduler.finish(job.id, FinishReason.STOP)

    @rule(count=st.integers(1, 20))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        waiting = [(job, job.preemptions) for job in self.open if job.state in WAITS]
        computing = [job for job in self.open if job.state is RequestState.PREFILLING]
        drops = [(job, job.drops) for job in self.open]
        held = {job for job, _ in waiting if self.lets_others_pass(job, computing)}
        limit = self.scheduler.cache.pools.max_blocks
        self.shadow.step()
        computing += [job for job, before in drops if job.drops > before]
        if self.scheduler.cache.pools.max_blocks == limit:  # shorter answers change who has its share
            self.nobody_jumped_the_queue(waiting, computing, held)

    def lets_others_pass(self, job: Job, computing: list[Job]) -> bool:
        """Whatever memory there is: its parent's prompt is not there yet, another computes what it can begin with, or
        its client has its share, or has it with one that comes before.
        """
        parent_computes = job.fork_of is not None and job.fork_of.finish_reason is None
        if parent_computes or any(self.shared(job, other) >= self.worth_waiting for other in computing):
            return True
        if job.client is None or self.client_tokens is None:
            return False
        before = [j for j in self.open if j.state in WAITS and j.client == job.client and j.order <= job.order]
        return any(self.share_is_taken(j, self.client_tokens) for j in before)

    def shared(self, job: Job, other: Job) -> int:
        """How many tokens `job` can begin with when `other` has computed its prompt."""
        if job.salt != other.salt or job is other:
            return 0
        size = self.scheduler.cache.block_size
        pairs = enumerate(zip(job.tokens, other.tokens, strict=False))
        common = next((i for i, (a, b) in pairs if a != b), min(len(job.tokens), len(other.tokens)))
        return min(common // size * size, len(job.tokens) - 1)

    def share_is_taken(self, job: Job, share: int) -> bool:
        held = sum(j.max_total_tokens for j in self.open if j.client == job.client and j.is_running)
        return held > 0 and held + job.max_total_tokens > share

    def nobody_jumped_the_queue(self, waiting: list[tuple[Job, int]], computing: list[Job], held: set[Job]) -> None:
        """Who begins comes before all of its client that wait on, but for those who let others pass. As the order is
        that of arrival up to a bounded head start, waiting is bounded. Turns of clients: `test_admission_model`.
        """
        begun = [job for job, preemptions in waiting if job.is_running and job.preemptions == preemptions]
        for job, preemptions in waiting:
            if job.state in WAITS and job.preemptions == preemptions and job not in held:
                passed = [b.id for b in begun if b.client == job.client and b.order > job.order]
                before = [b for b in begun if b.order < job.order or b.client != job.client]  # clients take turns
                assert not passed or self.lets_others_pass(job, computing + before), (
                    f"job {job.id} was passed by {passed}"
                )

    @precondition(lambda self: self.shadow.in_flight)
    @rule()
    def late_commit(self) -> None:
        self.shadow.commit()

    @precondition(lambda self: len(self.shadow.in_flight) < 2)
    @rule()
    def run_ahead(self) -> None:
        self.shadow.plan()

    @rule(critical=st.sampled_from([False, True, True]))
    def memory_pressure(self, critical: bool) -> None:
        self.scheduler.relieve_memory(critical)

    @rule(share=st.sampled_from([0.0, 0.5, 1.0]))
    def the_system_refuses(self, share: float) -> None:
        """More than the arena has, or all but a part of what it may still grow by."""
        cache = self.scheduler.cache
        self.allowed = max(cache.pools.blocks) + int(share * (max(cache.pools.max_blocks) - max(cache.pools.blocks)))

    @precondition(lambda self: self.scheduler.is_idle and not self.shadow.in_flight)
    @rule()
    def compact(self) -> None:
        self.shadow.compact()

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check_invariants()
        self.shadow.check_shared()

    def teardown(self) -> None:
        if not hasattr(self, "shadow"):
            return
        for job in self.open:
            if job.max_new_tokens > 2 * CONTEXT:  # without end
                self.scheduler.finish(job.id, FinishReason.CANCELLED, RequestState.CANCELLED)
        try:
            self.shadow.finish(bound=1000)
        finally:
            self.origin.stop()
        for job in self.open:
            answer = self.shadow.stories[job.id].answer()
            if job.state is RequestState.FINISHED and job.finish_reason is FinishReason.LENGTH:
                assert job.output == answer
            else:
                assert job.output == answer[: len(job.output)]
                assert job.finish_reason is not None
                assert job.finish_reason is not FinishReason.ERROR or job in self.scheduler.ended_jobs
        stats = self.scheduler.cache.stats()
        assert stats.free_blocks == stats.total_blocks and stats.sequences == 0
        assert self.scheduler.rows_running == self.scheduler.rows_waiting == 0
        self.shadow.states.nothing_is_left_but_snapshots()
        self.scheduler.cache.pools.drop_cached()
        assert not self.scheduler.cache.states.snapshots
        for group in range(len(self.scheduler.cache.groups)):
            allocator = self.scheduler.cache.pools[group].allocator
            assert allocator.free_blocks == allocator.total_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=examples(100), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestSchedulerAtLength(SchedulerMachine.TestCase):
    settings = settings(
        max_examples=examples(1000), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
