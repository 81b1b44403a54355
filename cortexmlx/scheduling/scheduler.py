"""The scheduler: what the next step computes, and what becomes of its result. Pure Python; it never sees mlx.

Life of a request: waiting -> prefilling -> decoding -> finished; one that loses its blocks is preempted and waits
again. Requests join and leave between steps.

A step is planned before the one in flight is known, so a job counts what is *planned* and what is *committed*. Decode
steps run in a *window*: a fixed set of lanes and up to TAIL_COLUMNS steps, whose new keys and values live in the
tail. Everything that writes the arena (prefill, the flush at a window's end) happens drained: `plan` returns None
until the engine has collected and committed what is in flight.

Who waits and who may begin is up to `Admission`, which jobs run and what blocks they hold is in `Rows`, and
`StepBuilder` puts a step into arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cortexmlx.errors import PromptTooLong
from cortexmlx.kv.cache import BlockCopy, KVCache
from cortexmlx.kv.spec import TAIL_COLUMNS
from cortexmlx.request import FinishReason, RequestState, SamplingParams
from cortexmlx.scheduling.admission import Admission
from cortexmlx.scheduling.claims import WORTH_WAITING
from cortexmlx.scheduling.job import Committed, Job, Lane, Window
from cortexmlx.scheduling.latency import CostModel, share
from cortexmlx.scheduling.placement import flush_of
from cortexmlx.scheduling.plan import Flush, StepKind, StepPlan
from cortexmlx.scheduling.running import Rows
from cortexmlx.scheduling.shortage import fit_all
from cortexmlx.scheduling.steps import StepBuilder

_LEAST_PIECE = 16
"""Prompt tokens that a step computes at least, however tight the target."""


class Scheduler:
    """Plans steps over the requests it was given, within `max_rows` rows and the cache's blocks.

    A step computes at most `prefill_budget` prompt tokens, and while rows decode only as many as fit into
    `token_target` seconds (None: no target), but 16 at least. `headroom` tokens are asked for beyond a prompt, so that
    its answer stays in one run. `share_prefixes` False computes every prompt anew; True shares what a client's prompts
    have in common among that client's, and with `share_between_clients` among all; `worth_waiting`: see `Claims`.
    `pipeline` False plans a step only when nothing is in flight. `ended` is for whoever asks for plans to empty: jobs
    that ended without a new token, because the system refused memory for the cache.
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
        share_between_clients: bool = False,
        worth_waiting: int = WORTH_WAITING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.prefill_budget = prefill_budget
        self.context_length = context_length
        self.max_request_tokens = max_request_tokens
        self.token_target = token_target
        self.pipeline = pipeline
        self.share_between_clients = share_between_clients
        self.costs = CostModel()
        self.preemptions = 0
        self.ended: list[Job] = []
        self._clock = clock
        self._rows = Rows(cache, max_rows, headroom, share_prefixes)
        self._admission = Admission(self._rows, client_tokens, worth_waiting)
        self._builder = StepBuilder(cache)
        self._jobs: dict[int, Job] = {}
        self._window = Window()
        self._leaving: list[Lane] = []
        self._arrivals = 0
        self._shrinking = False

    # -- requests come and go -----------------------------------------------------------------------------------------

    def check_prompt(self, prompt_tokens: int, at_least: bool = False) -> None:
        """Raise PromptTooLong, with the numbers, if a prompt of (`at_least`) that length can never be answered."""
        count = f"at least {prompt_tokens}" if at_least else prompt_tokens
        capacity = self.cache.capacity_tokens
        if prompt_tokens + 1 > self.context_length:
            raise PromptTooLong(
                f"the prompt has {count} tokens and the model's context is {self.context_length}: shorten the prompt"
            )
        if prompt_tokens > capacity:
            raise PromptTooLong(
                f"the prompt has {count} tokens and the KV cache holds {capacity}: "
                "raise the KV memory (--kv-memory) or shorten the prompt"
            )
        if prompt_tokens + 1 > self._longest:
            raise PromptTooLong(
                f"the prompt has {count} tokens and a request may have {self._longest} with its answer: "
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
        `patient` one come. Raises PromptTooLong if it can never fit.
        """
        self.check_prompt(len(prompt))
        room = min(self._longest, self.cache.capacity_tokens + 1) - len(prompt)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        full = len(prompt) // self.cache.block_size  # a parent that was preempted knows keys of its answer, too
        salt = None if self.share_between_clients else client
        keys = self._rows.keys(prompt, salt) if fork_of is None else fork_of.keys[:full]
        self._arrivals += 1
        job = Job(
            id=request,
            prompt_length=len(prompt),
            tokens=list(prompt),
            params=params,
            seed=seed,
            stop_ids=stop_ids,
            limit=limit,
            arrival=self._clock() if fork_of is None else fork_of.arrival,
            number=self._arrivals,
            keys=keys,
            fork_of=fork_of,
            client=client,
            salt=salt if fork_of is None else fork_of.salt,
            patient=patient,
        )
        self._jobs[request] = job
        self._admission.enqueue(job)
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
        if not running:
            self._admission.remove(job)
            return
        self._rows.leave(job)
        self._admission.unclaim(job)
        if state is RequestState.FINISHED and lane is not None and self._rows.share_prefixes:
            self._leaving.append(lane)
        else:
            self._rows.retire(job)

    def forget_all(self) -> None:
        """End everything after a step that failed: nothing that it should have written can be trusted."""
        for job in list(self._jobs.values()):
            if job.running:
                self.cache.free(job.id)
            job.state, job.finish_reason = RequestState.FAILED, FinishReason.ERROR
            job.generation += 1
        for lane in self._leaving:
            self.cache.free(lane.job.id)
        self._jobs.clear()
        self._rows.jobs.clear()
        self._leaving.clear()
        self._window = Window()
        self._admission.clear()
        self._builder.forget()
        self.cache.drop_cached()

    def relieve(self, critical: bool) -> None:
        """Make room in memory: forget half of what is cached and unused, or (critical) all of it and, at the next
        drain, the free end of the arena.
        """
        unused = self.cache.prefix.unused
        self.cache.drop_cached(None if critical else (unused + 1) // 2)
        if not critical:
            return
        self._rows.drop_headroom()
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
        return (*self._rows.jobs, *self._admission.waiting)

    def check_invariants(self) -> None:
        """Raise AssertionError if what is known of jobs, rows, sequences and blocks does not fit together."""
        running, leaving = self._rows.jobs, [lane.job for lane in self._leaving]
        assert len(running) <= self.max_rows and all(job.running for job in running)
        assert set(self.jobs) == set(self._jobs.values()), "a job is in no queue, or in one after its end"
        assert self.cache.sequences == {job.id for job in (*running, *leaving)}, "blocks of nobody, or nobody's blocks"
        for job in running:
            assert job.stored <= job.computed == self.cache.length(job.id), f"job {job.id} has other tokens than blocks"
            assert job.generated <= job.sampled <= job.limit, f"job {job.id} has more tokens than it may have"
        self._admission.check_invariants()
        self.cache.check_invariants()

    @property
    def rows_running(self) -> int:
        """Requests that have a row."""
        return len(self._rows.jobs)

    @property
    def rows_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._admission)

    @property
    def steps(self) -> int:
        """Steps planned so far."""
        return self._builder.count

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache so far."""
        return self._admission.cached_tokens

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, in_flight: int) -> StepPlan | None:
        """The next step; None if there is nothing to compute, or nothing before the `in_flight` steps are committed."""
        limit = self.cache.limit
        plan = self._plan(in_flight)
        if self.cache.limit < limit:
            self._fit_cache()
            plan = plan or self._plan(in_flight)
        return plan

    def _fit_cache(self) -> None:
        """The cache may not grow as it was promised: end who cannot go on in what it has."""
        for job in fit_all(self._jobs.values(), self.cache.capacity_tokens):
            if job.generated:
                self.finish(job.id, FinishReason.LENGTH)
            else:
                self.finish(job.id, FinishReason.ERROR, RequestState.FAILED)
            self.ended.append(job)
        self._admission.ask_again()

    def _plan(self, in_flight: int) -> StepPlan | None:
        if in_flight and not self.pipeline:
            return None
        if self._wants_drain():
            return None if in_flight else self._plan_drained()
        return self._plan_decode(flush=None)

    def _wants_drain(self) -> bool:
        window = self._window
        if self._rows.prefilling or (self._leaving and self._admission):
            return True
        if self._admission.possible:
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
        copies = self._admission.admit()
        plan = None
        if self._rows.prefilling:
            plan = self._plan_mixed(flush, copies)
        if plan is None:
            plan = self._plan_decode(flush)
        if plan is None and flush is not None:
            plan = self._builder.flush(flush)
        return plan

    def _plan_mixed(self, flush: Flush | None, copies: tuple[BlockCopy, ...]) -> StepPlan | None:
        """One token for every decoding row and prefill pieces within the budget, all written straight to the arena."""
        for job in self._rows.in_order:
            if job.unfinished:
                self._reserve(job, job.computed + 1)
        decoding = [j for j in self._rows.jobs if j.unfinished]
        prefilling = [j for j in self._rows.in_order if j.state is RequestState.PREFILLING]
        counts = share(self._budget(decoding), [len(j.tokens) - j.computed for j in prefilling])
        pieces = [(job, count) for job, count in zip(prefilling, counts, strict=True) if count]
        work = [(j, 1) for j in decoding] + [p for p in pieces if p[1] == 1] + [p for p in pieces if p[1] > 1]
        if not work:
            return None
        plan = self._builder.drained(work, flush, copies)
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
            if any(job.needs_history and job.sampled > job.generated for job in self._rows.jobs):
                return None  # the sampler must know the tokens in flight
            self._open_window()
        window = self._window
        todo = {i: lane.job for i, lane in enumerate(window.lanes) if lane.live and lane.job.unfinished}
        if not todo:
            return None
        committed = all(job.sampled == job.generated for job in todo.values())
        plan = self._builder.decode(window, todo, committed, flush)
        self._planned(plan, [(job, 1) for job in todo.values()])
        window.column += 1
        return plan

    def _planned(self, plan: StepPlan, work: Sequence[tuple[Job, int]]) -> None:
        """Advance the jobs of a step by what it computes."""
        for job, count in work:
            job.computed += count
            self.cache.append(job.id, count)
            if plan.kind is StepKind.DRAINED:
                self._rows.store(job, job.computed)
            if job.computed < len(job.tokens):
                self._admission.stored(job)
            else:
                if job.state is RequestState.PREFILLING:
                    self._admission.unclaim(job)
                job.state = RequestState.DECODING
                job.sampled += 1

    # -- decode windows -----------------------------------------------------------------------------------------------

    def _open_window(self) -> None:
        """The decoding rows become the lanes of a new window, each with room for the tokens it may get there."""
        for job in self._rows.in_order:
            if job.unfinished:
                self._reserve(job, job.computed + min(TAIL_COLUMNS, job.limit - job.sampled))
        ready = [j for j in self._rows.jobs if j.unfinished]
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
            self._rows.store(window.lanes[i].job, end)
        for lane in self._leaving:
            self._rows.retire(lane.job)
        self._leaving.clear()
        return flush

    # -- rows under pressure ------------------------------------------------------------------------------------------

    def _reserve(self, job: Job, tokens: int) -> None:
        """Room for `tokens` tokens of a running job: drop headroom, then preempt the youngest, lowest-priority row.

        One job alone always fits: its limit keeps it within the cache.
        """
        while job.running and not self._rows.reserve(job, tokens):
            self._preempt(self._rows.in_order[-1])

    def _preempt(self, job: Job) -> None:
        """Take a job's row and blocks. What it stored stays cached, so that resuming is a prefix hit while memory
        allows.
        """
        self._rows.leave(job)
        self._admission.unclaim(job)
        self._rows.retire(job)
        job.keys = self._rows.keys(job.tokens, job.salt)
        job.state = RequestState.PREEMPTED
        job.generation += 1
        job.preemptions += 1
        job.computed = job.stored = 0
        job.sampled = job.generated
        self.preemptions += 1
        self._admission.enqueue(job)

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
