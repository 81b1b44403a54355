"""The scheduler: who runs, and what the next step computes. Pure Python and NumPy; it never sees mlx.

Life of a request: waiting -> prefilling -> decoding -> finished; one that loses its blocks is preempted and waits
again. Requests join and leave between steps.

A step is planned before the one in flight is known, so a job counts what is *planned* and what is *committed*. Decode
steps run in a *window*: a fixed set of lanes and up to TAIL_COLUMNS steps, whose new keys and values live in the
tail. Everything that writes the arena (prefill, the flush at a window's end) happens drained: `plan` returns None
until the engine has collected and committed what is in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from cortexmlx.errors import KVCacheFull, PromptTooLong
from cortexmlx.job import Committed, Job, Lane, Window
from cortexmlx.kv.cache import BlockCopy, IntArray, KVCache
from cortexmlx.kv.prefix import Key, Match
from cortexmlx.latency import CostModel, share
from cortexmlx.placement import EMPTY, flush_of, group_plans
from cortexmlx.plan import TAIL_COLUMNS, Flush, GroupPlan, Segment, StepKind, StepPlan
from cortexmlx.request import FinishReason, RequestState, SamplingParams

_LEAST_PIECE = 16
"""Prompt tokens that a step computes at least, however tight the target."""


class Scheduler:
    """Plans steps over the requests it was given, within `max_rows` rows and the cache's blocks.

    A step computes at most `prefill_budget` prompt tokens, and while rows decode only as many as fit into
    `token_target` seconds (None: no target), but 16 at least. `headroom` tokens are asked for beyond a prompt, so that
    its answer stays in one run. `share_prefixes` False computes every prompt anew. `pipeline` False plans a step only
    when nothing is in flight.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_rows: int,
        prefill_budget: int,
        context_length: int,
        max_request_tokens: int | None = None,
        client_tokens: int | None = None,
        token_target: float | None = None,
        pipeline: bool = True,
        headroom: int = 128,
        share_prefixes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.prefill_budget = prefill_budget
        self.context_length = context_length
        self.max_request_tokens = max_request_tokens
        self.client_tokens = client_tokens
        self.token_target = token_target
        self.pipeline = pipeline
        self.headroom = headroom
        self.share_prefixes = share_prefixes
        self.costs = CostModel()
        self.steps = 0
        self.preemptions = 0
        self.cached_tokens = 0
        self._clock = clock
        self._jobs: dict[int, Job] = {}
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._window = Window()
        self._leaving: list[Lane] = []
        self._claims: dict[Key, Job] = {}
        self._result_of: dict[tuple[int, int], int] = {}
        self._arrivals = 0
        self._changes = 0
        self._nobody_at = -1
        self._shrinking = False

    # -- requests come and go -----------------------------------------------------------------------------------------

    def check_prompt(self, prompt_tokens: int) -> None:
        """Raise PromptTooLong, with the numbers, if a prompt of that length can never be answered."""
        capacity = self.cache.capacity_tokens
        if prompt_tokens + 1 > self.context_length:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens and the model's context is {self.context_length}: "
                "shorten the prompt"
            )
        if prompt_tokens > capacity:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens and the KV cache holds {capacity}: "
                "raise the KV memory (--kv-memory) or shorten the prompt"
            )
        if prompt_tokens + 1 > self._longest:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens and a request may have {self._longest} with its answer: "
                "shorten the prompt or raise max_request_tokens"
            )

    @property
    def _longest(self) -> int:
        """Tokens that a prompt and its answer may have."""
        return min(self.context_length, self.max_request_tokens or self.context_length)

    def add(
        self,
        request: int,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        stop_ids: frozenset[int],
        fork_of: Job | None = None,
        client: str | None = None,
        patient: bool = False,
    ) -> Job:
        """Queue a request; with `fork_of`, another answer to that one's prompt. Nobody watches the tokens of a
        `patient` one come. Raises PromptTooLong if it can never
        fit.
        """
        self.check_prompt(len(prompt))
        room = min(self._longest, self.cache.capacity_tokens + 1) - len(prompt)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        if fork_of is not None:
            keys = list(fork_of.keys)
        else:
            keys = self.cache.prefix.keys(prompt) if self.share_prefixes else []
        self._arrivals += 1
        arrival = self._clock() if fork_of is None else fork_of.arrival
        job = Job(
            request,
            len(prompt),
            list(prompt),
            params,
            seed,
            stop_ids,
            limit,
            arrival,
            self._arrivals,
            keys,
            fork_of,
            client,
            patient,
        )
        self._jobs[request] = job
        self._enqueue(job)
        return job

    def finish(self, request: int, reason: FinishReason, state: RequestState = RequestState.FINISHED) -> None:
        """End a request, whatever it is doing; unknown ones are ignored.

        Its row is free at once, and so are its blocks; only a request that finished well keeps them until its newest
        tokens have gone from the tail to the arena, for others to begin with.
        """
        job = self._jobs.pop(request, None)
        if job is None:
            return
        lane = next((lane for lane in self._window.lanes if lane.job is job and lane.live), None)
        running = job.running
        job.state, job.finish_reason = state, reason
        job.generation += 1
        self._changes += 1
        if not running:
            self._waiting.remove(job)
            return
        self._running.remove(job)
        self._unclaim(job)
        if state is RequestState.FINISHED and lane is not None and self.share_prefixes:
            self._leaving.append(lane)
        else:
            self._retire(job)

    def forget_all(self) -> None:
        """End everything after a step that failed: nothing that it should have written can be trusted."""
        for job in list(self._jobs.values()):
            if job.running:
                self.cache.free(job.id)
            job.state, job.finish_reason = RequestState.FAILED, FinishReason.ERROR
            job.generation += 1
        for lane in self._leaving:
            self.cache.free(lane.job.id)
        for held in (self._jobs, self._waiting, self._running, self._leaving, self._claims, self._result_of):
            held.clear()
        self._window = Window()
        self._changes += 1
        self.cache.drop_cached()

    def relieve(self, critical: bool) -> None:
        """Make room in memory: forget half of what is cached and unused, or (critical) all of it and, at the next
        drain, the free end of the arena.
        """
        unused = self.cache.prefix.unused
        self.cache.drop_cached(None if critical else (unused + 1) // 2)
        if not critical:
            return
        self._drop_headroom()
        self._shrinking = True
        if self.idle:
            self._shrink()

    def _shrink(self) -> None:
        self._shrinking = False
        self.cache.shrink(1)

    @property
    def idle(self) -> bool:
        """Nothing is waiting, running or on its way to the arena."""
        return not self._jobs and not self._leaving

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Everything unfinished: running first, then waiting in order."""
        return (*self._running, *self._waiting)

    @property
    def rows_running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def rows_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, in_flight: int) -> StepPlan | None:
        """The next step; None if there is nothing to compute, or nothing before the `in_flight` steps are committed."""
        if in_flight and not self.pipeline:
            return None
        if self._wants_drain():
            return None if in_flight else self._plan_drained()
        return self._plan_decode(flush=None)

    def _wants_drain(self) -> bool:
        window = self._window
        if any(j.state is RequestState.PREFILLING for j in self._running) or (self._leaving and self._waiting):
            return True
        if self._next_to_admit() is not None:
            return True
        dead = sum(not lane.live for lane in window.lanes)
        full = window.column == TAIL_COLUMNS
        return full or bool(dead and dead * (TAIL_COLUMNS - window.column) >= len(window.lanes))

    def _plan_drained(self) -> StepPlan | None:
        """Nothing is in flight: flush the tail, admit who fits, then prefill with everybody's decode, or open a
        window.
        """
        flush = self._close_window()
        if self._shrinking:
            self._shrink()
        copies = self._admit()
        plan = None
        if any(j.state is RequestState.PREFILLING for j in self._running):
            plan = self._plan_mixed(flush, copies)
        if plan is None:
            plan = self._plan_decode(flush)
        if plan is None and flush is not None:
            plan = self._step(StepKind.FLUSH, [], flush=flush)
        return plan

    def _plan_mixed(self, flush: Flush | None, copies: tuple[BlockCopy, ...]) -> StepPlan | None:
        """One token for every decoding row and prefill pieces within the budget, all written straight to the arena."""
        for job in sorted(self._running, key=lambda j: j.order):
            if job.unfinished:
                self._reserve(job, job.computed + 1)
        decoding = [j for j in self._running if j.unfinished]
        prefilling = sorted((j for j in self._running if j.state is RequestState.PREFILLING), key=lambda j: j.order)
        counts = share(self._budget(decoding), [len(j.tokens) - j.computed for j in prefilling])
        pieces = [(job, count) for job, count in zip(prefilling, counts, strict=True) if count]
        work = [(j, 1) for j in decoding] + [p for p in pieces if p[1] == 1] + [p for p in pieces if p[1] > 1]
        if not work:
            return None
        segments, tokens, positions = [], [], []
        for job, count in work:
            end = job.computed + count
            segments.append(Segment(job.id, job.generation, job.computed, count, needs_logits=end == len(job.tokens)))
            tokens.append(np.array(job.tokens[job.computed : end], np.int32))
            positions.append(np.arange(job.computed, end, dtype=np.int32))
        plan = self._step(
            StepKind.DRAINED,
            segments,
            tokens=np.concatenate(tokens),
            positions=np.concatenate(positions),
            places=np.array([j.sampled for (j, _), s in zip(work, segments, strict=True) if s.needs_logits], np.int32),
            groups=group_plans(self.cache, work, write=True),
            flush=flush,
            copies=copies,
        )
        self._planned(plan, work)
        return plan

    def _budget(self, decoding: Sequence[Job]) -> int:
        """Prompt tokens of the next step: fewer while somebody watches their tokens come."""
        most = self.prefill_budget
        least = min(_LEAST_PIECE, most)
        if self.token_target is not None and any(not job.patient for job in decoding):
            most = self.costs.tokens_within(self.token_target, least, most)
        return max(least, most - len(decoding))

    def _plan_decode(self, flush: Flush | None) -> StepPlan | None:
        """One token for every lane of the window; opens a window if none is."""
        opening = self._window.column == 0
        if opening:
            self._open_window()
        window = self._window
        todo = {i: lane.job for i, lane in enumerate(window.lanes) if lane.live and lane.job.unfinished}
        if not todo:
            return None
        committed = all(job.sampled == job.generated for job in todo.values())
        if opening and not committed and any(job.needs_history for job in todo.values()):
            window.lanes = ()  # the sampler must know the tokens in flight
            return None
        tokens, positions, places, source = (np.zeros(len(window.lanes), np.int32) for _ in range(4))
        segments = []
        for i, lane in enumerate(window.lanes):
            if i in todo:
                positions[i], places[i] = lane.job.computed, lane.job.sampled
                tokens[i] = lane.job.tokens[lane.job.computed] if committed else 0
            segments.append(Segment(lane.job.id, lane.generation, int(positions[i]), 1, True, live=i in todo))
            source[i] = self._result_of.get((lane.job.id, lane.generation), 0)
        in_place = len(source) == len(self._result_of) and bool((source == np.arange(len(source))).all())
        plan = self._step(
            StepKind.DECODE,
            segments,
            tokens=tokens if committed else None,
            source=None if committed or in_place else source,
            positions=positions,
            places=places,
            groups=group_plans(self.cache, [(lane.job, 1) for lane in window.lanes], write=False) if opening else None,
            column=window.column,
            flush=flush,
        )
        self._planned(plan, [(job, 1) for job in todo.values()])
        window.column += 1
        return plan

    def _step(
        self,
        kind: StepKind,
        segments: Sequence[Segment],
        *,
        tokens: IntArray | None = EMPTY,
        source: IntArray | None = None,
        positions: IntArray = EMPTY,
        places: IntArray = EMPTY,
        groups: tuple[GroupPlan, ...] | None = None,
        column: int = 0,
        flush: Flush | None = None,
        copies: tuple[BlockCopy, ...] = (),
    ) -> StepPlan:
        self.steps += 1
        return StepPlan(
            number=self.steps,
            kind=kind,
            segments=tuple(segments),
            tokens=tokens,
            source=source,
            positions=positions,
            places=places,
            groups=groups,
            column=column,
            blocks=self.cache.blocks,
            flush=flush,
            copies=copies,
        )

    def _planned(self, plan: StepPlan, work: Sequence[tuple[Job, int]]) -> None:
        """Advance the jobs of a step by what it computes, and remember where its results will be."""
        self._result_of = {(s.request, s.generation): i for i, s in enumerate(plan.sampled)}
        for job, count in work:
            job.computed += count
            self.cache.append(job.id, count)
            if plan.kind is StepKind.DRAINED:
                self._store(job, job.computed)
            if job.computed >= len(job.tokens):
                if job.state is RequestState.PREFILLING:
                    self._unclaim(job)
                job.state = RequestState.DECODING
                job.sampled += 1

    # -- decode windows -----------------------------------------------------------------------------------------------

    def _open_window(self) -> None:
        """The decoding rows become the lanes of a new window, each with room for the tokens it may get there."""
        for job in sorted(self._running, key=lambda j: j.order):
            if job.unfinished:
                self._reserve(job, job.computed + min(TAIL_COLUMNS, job.limit - job.sampled))
        ready = [j for j in self._running if j.unfinished]
        self._window = Window(tuple(Lane(job, job.generation, job.computed) for job in ready))

    def _close_window(self) -> Flush | None:
        """Where the tail's columns go. Everything is committed, so a live lane has all its columns, and one whose job
        finished has those up to its last committed token, which was never computed.
        """
        window, self._window = self._window, Window()
        ends = {}
        for i, lane in enumerate(window.lanes):
            if lane.live:
                ends[i] = lane.job.computed
            elif lane in self._leaving:
                ends[i] = min(lane.base + window.column, len(lane.job.tokens) - 1)
        flush = flush_of(self.cache, window, ends) if ends and window.column else None
        for i, end in ends.items():
            self._store(window.lanes[i].job, end)
        for lane in self._leaving:
            self._retire(lane.job)
        self._leaving.clear()
        return flush

    def _store(self, job: Job, tokens: int) -> None:
        """The job's first `tokens` tokens are in the arena by the time anyone reads them."""
        job.stored = tokens
        if self.share_prefixes:
            self.cache.register(job.id, job.tokens, min(tokens, len(job.tokens)), job.keys)
        self._changes += 1

    # -- admission ----------------------------------------------------------------------------------------------------

    def _next_to_admit(self) -> tuple[Job, Match | None] | None:
        """The first in the queue who can begin now, and what of its tokens is cached; None if nobody can.

        One whose client has its share, or whose next block is being computed by another, lets others pass. One that
        waits for memory lets nobody pass.
        """
        if not self._waiting or len(self._running) >= self.max_rows or self._nobody_at == self._changes:
            return None
        allowed = (job for job in self._waiting if self._within_client_share(job))
        for job in islice(allowed, self.max_rows):
            if job.fork_of is not None and job.fork_of.id in self._jobs and not self._can_fork(job):
                continue
            match = self.cache.match(job.tokens, job.keys, len(job.tokens) - 1) if self.share_prefixes else None
            if match is not None and self._waits_for_claim(job, match):
                continue
            shared = self.cache.in_use(match) if match is not None else 0
            need = self.cache.blocks_for(len(job.tokens)) - shared + len(self._running)
            if need > self.cache.free_blocks:
                self._drop_headroom()
            if need <= self.cache.free_blocks or not self._running:
                return job, match
            break
        self._nobody_at = self._changes
        return None

    def _within_client_share(self, job: Job) -> bool:
        """Whether the job's client may have it running; one request is always allowed."""
        if self.client_tokens is None or job.client is None:
            return True
        held = sum(j.most_tokens for j in self._running if j.client == job.client)
        return not held or held + job.most_tokens <= self.client_tokens

    def _can_fork(self, job: Job) -> bool:
        parent = job.fork_of
        return parent is not None and parent.state is RequestState.DECODING and parent.stored >= job.prompt_length - 1

    def _waits_for_claim(self, job: Job, match: Match) -> bool:
        reached = len(match.entries)
        return reached < len(job.keys) and job.keys[reached] in self._claims

    def _admit(self) -> tuple[BlockCopy, ...]:
        """Give rows and blocks to those who can begin; returns the block copies that this takes."""
        copies: list[BlockCopy] = []
        while (found := self._next_to_admit()) is not None:
            job, match = found
            try:
                copies += self._begin(job, match)
            except KVCacheFull:
                self._nobody_at = self._changes
                break
            self._waiting.remove(job)
            self._running.append(job)
            job.state = RequestState.PREFILLING
            job.sampled, job.reserved = job.generated, len(job.tokens)
            job.computed = job.stored = self.cache.length(job.id)
            if job.fork_of is not None:
                job.cached = job.fork_of.cached
            elif not job.preemptions:
                job.cached = job.computed
                self.cached_tokens += job.cached
            for key in job.keys[job.computed // self.cache.block_size :]:
                self._claims.setdefault(key, job)
        return tuple(copies)

    def _begin(self, job: Job, match: Match | None) -> tuple[BlockCopy, ...]:
        if job.fork_of is None or job.generated or not self._can_fork(job):
            headroom = min(self.headroom, max(0, job.limit - job.generated))
            return self.cache.allocate_for(job.id, len(job.tokens), headroom, match)
        copies = self.cache.fork(job.fork_of.id, job.id, job.prompt_length - 1)
        try:
            self.cache.reserve(job.id, len(job.tokens))
        except KVCacheFull:
            self.cache.free(job.id)
            raise
        return copies

    def _unclaim(self, job: Job) -> None:
        for key in job.keys:
            if self._claims.get(key) is job:
                del self._claims[key]
        self._changes += 1

    def _enqueue(self, job: Job) -> None:
        """Into the queue behind everyone who comes first."""
        place = next((i for i, other in enumerate(self._waiting) if job.order < other.order), len(self._waiting))
        self._waiting.insert(place, job)
        self._changes += 1

    # -- blocks under pressure ----------------------------------------------------------------------------------------

    def _reserve(self, job: Job, tokens: int) -> None:
        """Room for `tokens` tokens of a running job: drop headroom, then preempt the youngest, lowest-priority row.

        One job alone always fits: its limit keeps it within the cache.
        """
        job.reserved = max(job.reserved, tokens)
        while job.running:
            try:
                self.cache.reserve(job.id, tokens)
                return
            except KVCacheFull:
                if self._drop_headroom():
                    continue
                if len(self._running) == 1:
                    raise
                self._preempt(max(self._running, key=lambda j: j.order))

    def _drop_headroom(self) -> int:
        """Free the blocks that running jobs have beyond what was promised to them. Returns how many those were."""
        return sum(self.cache.give_back(job.id, job.reserved) for job in self._running)

    def _preempt(self, job: Job) -> None:
        """Take a job's row and blocks. What it stored stays cached, so that resuming is a prefix hit while memory
        allows.
        """
        self._running.remove(job)
        self._unclaim(job)
        self._retire(job)
        if self.share_prefixes:
            job.keys = self.cache.prefix.keys(job.tokens)
        job.state = RequestState.PREEMPTED
        job.generation += 1
        job.preemptions += 1
        job.computed = job.stored = 0
        job.sampled = job.generated
        self.preemptions += 1
        self._enqueue(job)

    def _retire(self, job: Job) -> None:
        """Give up a job's blocks; what it stored stays cached."""
        if self.share_prefixes:
            self.cache.retire(job.id, job.tokens, min(job.stored, len(job.tokens)), job.keys)
        else:
            self.cache.free(job.id)
        self._changes += 1

    # -- results ------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: Sequence[int], seconds: float | None = None) -> list[Committed]:
        """Take a step's tokens; `seconds` is what it took. Results of rows that changed their tenant are dropped."""
        if seconds is not None and plan.kind is StepKind.DRAINED:
            self.costs.observe(len(plan.positions), seconds)
        news = []
        for place, (segment, token) in enumerate(zip(plan.sampled, tokens, strict=True)):
            job = self._jobs.get(segment.request)
            if job is None or job.generation != segment.generation or not segment.live:
                continue
            job.tokens.append(token)
            reason = None
            if token in job.stop_ids:
                reason = FinishReason.STOP
            elif job.generated >= job.limit:
                reason = FinishReason.LENGTH
            news.append(Committed(job, token, place, reason))
            if reason is not None:
                self.finish(job.id, reason)
        return news
