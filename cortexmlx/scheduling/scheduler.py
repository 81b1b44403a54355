"""The scheduler: what the next step computes, and what happens with its result. Pure Python, and it never sees mlx.

Life of a job: waiting -> prefilling -> decoding -> finished. A job that loses its blocks is preempted and waits again.
Jobs join and leave between steps.

A step is planned before the result of the one in flight is known, so a job counts what is *planned* and what is
*committed*. Decode steps run in a `DecodeWindow`. Steps that write the arena (prefill, and the flush at a window's end)
run drained: `plan` returns None until the engine has collected and committed what is in flight.

`Admission` decides which job begins, the `RunningSet` has the rows and their blocks, and the `StepBuilder` makes
arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.step import GroupStep
from cortexmlx.scheduling import drafts
from cortexmlx.scheduling.admission import WORTH_WAITING, Admission
from cortexmlx.scheduling.builder import ScheduledTokens, StepBuilder, make_group_steps
from cortexmlx.scheduling.decode_window import DecodeWindow, PipelineGate
from cortexmlx.scheduling.job import Job, JobId, RowTokens, adapter_order
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.scheduling.latency import CostModel, share_budget
from cortexmlx.scheduling.plan import Flush, Segment, StepKind, StepPlan
from cortexmlx.scheduling.running import RunningSet
from cortexmlx.scheduling.shortage import Backoff, LengthLimits, RefusalRetry, limit_stuck_jobs
from cortexmlx.types.images import PreparedImage
from cortexmlx.types.request import FinishReason, QueuedRequest, RequestState
from cortexmlx.types.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The limits and rules of a scheduler."""

    max_rows: int
    """Jobs that run at once."""

    prefill_budget: int
    """Prompt tokens that a step computes at most."""

    lone_prefill_budget: int = 0
    """Prompt tokens that a step may compute while no row decodes, if it takes about `LONE_SECONDS`. Less than
    `prefill_budget`: that is the bound.
    """

    context_length: int
    """Tokens that the model can attend to."""

    vocab_size: int = 2**31
    """Tokens of the model's vocabulary. No others are drafted."""

    max_request_tokens: int | None = None
    """Bound of the prompt and answer of one request. None: the context is the only bound."""

    client_tokens: int | None = None
    """Bound of the tokens of all running jobs of one named client. None: no bound."""

    token_target: float | None = None
    """Seconds that a step should take at most while rows decode: it computes fewer prompt tokens, but 16 at least.
    None: no target.
    """

    keep: KeepPolicy | None = None
    """Which tokens a row keeps when its text gets longer than the context. None: all, so the context is a bound."""

    pipeline: bool = True
    """Plan a decode step before the result of the last one is known. False: only when nothing is in flight."""

    has_draft_head: bool = False
    """Whether the model's own draft head runs in its steps."""

    long_tail_rows: int = 0
    """Up to this many rows, a decode window has `LONG_TAIL_COLUMNS` columns: see `long_tail_rows` of kv/sizing.py."""

    headroom: int = 128
    """Tokens allocated beyond a prompt, so that its answer stays in one run of blocks."""

    share_prefixes: bool = True
    """A prompt uses the cached blocks of its beginning. False computes every prompt anew."""

    share_between_clients: bool = False
    """All clients share cached blocks. False: a named client shares only with itself."""

    worth_waiting: int = WORTH_WAITING
    """Tokens of a prefix in flight for which a job waits instead of computing them itself."""

    @property
    def max_prefill_budget(self) -> int:
        """The most prompt tokens of any step."""
        return max(self.prefill_budget, self.lone_prefill_budget)


class Scheduler:
    """Plans which jobs and tokens each step computes, and gives the results to the jobs. It stays within the rows of
    `config` and the blocks of the cache.

    `clock` returns seconds; jobs are ordered by their arrival. Call `accept_load` with the pieces of a disk load. The
    caller of `plan` must empty `ended_jobs`: jobs that ended without a new token, because the system refused the cache
    memory. The caller of `commit` ends the jobs whose tokens or text have come to an end.
    """

    def __init__(self, cache: KVCache, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.cache = cache
        self.config = config
        self.backoff = Backoff(config.max_rows, config.prefill_budget)
        self._growth = RefusalRetry()
        self.limits = LengthLimits(config.context_length, config.max_request_tokens, config.keep)
        self.cost_model = CostModel()
        self.preemptions = self.restarts = self.dropped_tokens = 0
        self.ended_jobs: list[Job] = []
        self._clock = clock
        self._running_set = RunningSet(cache, self.backoff, config.headroom, config.share_prefixes)
        self._admission = Admission(self._running_set, config.client_tokens, config.worth_waiting, self.cost_model)
        self.accept_load = self._admission.accept_load
        self._builder = StepBuilder(cache, config.has_draft_head)
        self._jobs: dict[JobId, Job] = {}
        self._window = DecodeWindow(cache, self._running_set, config.long_tail_rows)
        self._arrivals = 0
        self.pipeline_gate = PipelineGate(self._running_set, self._window, self._admission, config.pipeline)
        self._shrink_requested = False
        self._large_pieces = RefusalRetry()
        self._halted_jobs: list[Job] = []
        self.has_large_piece = False
        """Whether the newest step, in which no row decodes, has more prompt tokens than one beside such rows may."""

    # -- requests come and go -----------------------------------------------------------------------------------------

    def check_prompt(self, prompt_tokens: int, params: SamplingParams, at_least: bool = False) -> None:
        """Raise PromptTooLong if a prompt of `prompt_tokens` tokens (or more, if `at_least`) can never fit."""
        self.limits.check_prompt(prompt_tokens, self.cache.tables.configured_tokens, params, at_least)

    def add(self, job_id: JobId, request: QueuedRequest, stop_ids: frozenset[int], fork_of: Job | None = None) -> Job:
        """Queue a job, and return it. If `fork_of`, it is another answer to that job's prompt. Raises PromptTooLong."""
        self.limits.check_request(request, self.cache.tables.configured_tokens)
        if not self._jobs:  # a refusal costs nobody anything
            self._allow_growth()
        salt = None if self.config.share_between_clients else request.client
        self._arrivals += 1
        job = Job(
            id=job_id,
            request=request,
            stop_ids=stop_ids,
            max_new_tokens=self.limits.max_new_tokens(request, self.cache.tables.configured_tokens),
            arrival=self._clock() if fork_of is None else fork_of.arrival,
            number=self._arrivals,
            keys=[],
            fork_of=fork_of,
            keep=self.limits.keep,
            salt=salt if fork_of is None else fork_of.salt,
        )
        job.keys = self._running_set.initial_keys(job)
        self.dropped_tokens += len(job.dropped_tokens)
        self._jobs[job_id] = job
        self._admission.enqueue(job)
        return job

    def finish(
        self, job_id: JobId, reason: FinishReason, state: RequestState = RequestState.FINISHED, surplus: int = 0
    ) -> None:
        """End a job in whatever state it is. Unknown jobs are ignored. The last `surplus` tokens come after the end of
        the text, and are no part of the answer; what was computed for them may stay cached.

        Its row is free at once. So are its blocks; those in the prefix cache stay there until they are evicted. If its
        newest tokens are worth caching, the job keeps all its blocks until the flush.
        """
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        lane, was_running = self._window.find_lane(job), job.is_running
        job.state, job.finish_reason = state, reason
        job.generation += 1
        if not was_running:
            self._admission.remove(job)
        else:
            self._running_set.release_row(job)
            self._admission.end_running_job(job)
            if lane is not None and self._running_set.should_cache_newest(job):
                self._window.await_flush(lane)
            else:
                self._running_set.release_blocks(job)
        if surplus:
            del job.tokens[-surplus:]

    def fail_all(self) -> None:
        """End all jobs as failed, after a step that failed."""
        self.restart_rows()
        for job in self._jobs.values():
            job.state, job.finish_reason = RequestState.FAILED, FinishReason.ERROR
            job.generation += 1
        self._jobs.clear()
        self._admission.clear()

    def restart_rows(self, rows: int | None = None) -> None:
        """Requeue all running jobs with nothing but their tokens, after a step that failed. All cached blocks are
        dropped, since they cannot be trusted. If the step was refused memory, at most `rows` rows run from now on; but
        if it had a larger piece of a prompt than usual, pieces are only limited to the usual size for a while.
        """
        if rows is not None:
            if self.has_large_piece:  # the usual pieces may be possible
                self._large_pieces.note_refusal()
            else:
                self.backoff.tighten(rows)
            self.restarts += self.rows_running
        for job in self._window.jobs_awaiting_flush:
            self.cache.free(job.id)
        self._window.forget()
        for job in self._running_set.jobs_by_start:
            self._requeue(job, is_trusted=False)
        for seq in list(self.cache.tables.sequences):  # whoever was to begin in the step that failed
            self.cache.free(seq)
        self.pipeline_gate.reset()
        self._builder.forget_results()
        self._running_set.take_loads()
        self.cache.release_copy_sources()
        self.cache.pools.drop_cached()

    def set_drafts(self, job_id: JobId, tokens: Sequence[int]) -> None:
        """Set drafts of a job's next tokens: see `drafts.set_drafts`. Unknown jobs are ignored."""
        if job_id in self._jobs:
            drafts.set_drafts(self._jobs[job_id], tokens, self.cache, self.config.vocab_size)

    def set_head_awake(self, is_awake: bool) -> None:
        """Set whether the model's draft head runs in decode steps. Tokens that it misses only make its drafts worse."""
        self._builder.is_head_awake = is_awake

    def locate_rows(self, jobs: Sequence[Job]) -> tuple[GroupStep, ...] | None:
        """Return where the keys and values of decoding jobs are, up to their newest token; None while some of them
        are in the tail. Nothing may be in flight.
        """
        if self._window.column:
            return None
        return make_group_steps(self.cache, [(job, 1) for job in jobs], writes_to_arena=False)

    @property
    def draftable_jobs(self) -> list[Job]:
        """The running jobs that pass `drafts.can_draft`; none while steps are kept small after a refusal of memory."""
        rows = () if self.backoff.holds_back else self._running_set.jobs
        return [job for job in rows if drafts.can_draft(job, self.cache)]

    @property
    def is_prefilling(self) -> bool:
        """Whether some row's prompt is not fully computed yet."""
        return self._running_set.is_prefilling

    def relieve_memory(self, critical: bool) -> None:
        """Evict half of the unused cached blocks; if `critical`, all, and then shrink the arena at the next drain."""
        unused = self.cache.pools.unused_entries
        self.cache.pools.drop_cached(None if critical else (unused + 1) // 2)
        if not critical:
            return
        self.cache.pools.record_release()
        self._running_set.drop_headroom()
        self._shrink_requested = True
        if self.is_idle:
            self.shrink_arena()

    def shrink_arena(self) -> None:
        """Free the end of the arena that is unused now, if `relieve_memory` asked for it. Nothing may be in flight."""
        if self._shrink_requested:
            self._shrink_requested = False
            self.cache.pools.shrink(1)

    def set_request_features(self, request_features: Callable[[Sequence[PreparedImage]], PreparedImage | None]) -> None:
        """Set the function that asks for features of images: see `Admission.request_features`."""
        self._admission.request_features = request_features

    @property
    def jobs_awaiting_images(self) -> list[Job]:
        """The jobs that wait for the features of their images."""
        return [*self._admission.jobs_awaiting_images, *self._halted_jobs]

    def note_image_encoded(self, image: PreparedImage) -> None:
        """Wake the jobs that wait for the features of an image."""
        self._admission.note_image_encoded(image)
        self._halted_jobs = []

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to plan: no job waits, runs or awaits a flush, or all wait for disk or images."""
        running = self._running_set.jobs
        waits = all(job in self._halted_jobs for job in running) if running else self._admission.is_stalled
        nothing = not self._jobs or waits
        return nothing and not self._window.jobs_awaiting_flush

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs that have not ended: the running ones, then the waiting ones in order."""
        return (*self._running_set.jobs, *self._admission.waiting_jobs)

    def check_invariants(self) -> None:
        """Raise AssertionError if jobs, rows, sequences and blocks contradict each other."""
        running_jobs, flushing_jobs = self._running_set.jobs, self._window.jobs_awaiting_flush
        assert self._running_set.rows <= self.config.max_rows and all(job.is_running for job in running_jobs)
        assert set(self.jobs) == set(self._jobs.values()), "a job is in no queue, or in one after its end"
        with_blocks = {job.id for job in (*running_jobs, *flushing_jobs)}
        assert self.cache.tables.sequences.keys() == with_blocks, "blocks of nobody, or nobody's blocks"
        for job in running_jobs:
            job.check_invariants(self.cache.tables.length(job.id))
        self._admission.check_invariants()
        self._running_set.check_invariants()
        self.cache.check_invariants()

    @property
    def rows_running(self) -> int:
        """How many jobs run, pooling ones included."""
        return len(self._running_set.jobs)

    @property
    def rows_waiting(self) -> int:
        """How many jobs wait, parked ones included."""
        return self._admission.count

    @property
    def planned_steps(self) -> int:
        """How many steps were planned so far."""
        return self._builder.count

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompts that began have."""
        return self._admission.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """How many prompt tokens were found in the prefix cache, or on disk, so far."""
        return self._admission.cached_tokens

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, in_flight: int) -> StepPlan | None:
        """Plan the next step; None if nothing can be computed, or not before the `in_flight` steps are committed."""
        pools = self.cache.pools
        limit = pools.max_blocks
        plan = self._plan_step(in_flight)
        if plan is None and not in_flight and self._jobs and (limit != pools.configured_blocks or self.ended_jobs):
            self._allow_growth()  # nobody runs, and whoever waits does not fit into what the system allowed
            limit = pools.max_blocks
            plan = self._plan_step(in_flight)
        if pools.max_blocks != limit or self._running_set.has_outgrown_cache:
            self.end_stuck_jobs()
            plan = plan or self._plan_step(in_flight)
            if plan is None and not in_flight and not self.is_idle:  # who ran has ended, and who waits does not fit
                self.end_stuck_jobs()
                plan = self._plan_step(in_flight)
        return plan

    def _allow_growth(self) -> None:
        """Allow growth of the cache again after a refusal, and look at the queue again."""
        self.cache.pools.reset_limits()
        self._admission.recheck_queue()

    def end_stuck_jobs(self) -> None:
        """End the running jobs that are stuck because the cache may not grow now; if none runs, the waiting ones."""
        self._growth.note_refusal()
        self._running_set.has_outgrown_cache = False
        jobs = self._running_set.jobs or self._jobs.values()
        for job in limit_stuck_jobs(list(jobs), self.cache.tables.capacity_tokens):
            self._end_stuck_job(job)
        self._admission.recheck_queue()

    def _end_stuck_job(self, job: Job) -> None:
        if job.num_generated:
            self.finish(job.id, FinishReason.LENGTH)
        else:
            self.finish(job.id, FinishReason.ERROR, RequestState.FAILED)
        self.ended_jobs.append(job)

    def _plan_step(self, in_flight: int) -> StepPlan | None:
        """Plan the next step if nothing must be waited for, and count it by its drain reason (None: it ran ahead)."""
        reason = self.pipeline_gate.drain_reason(in_flight)
        if reason is not None and in_flight:
            return None
        plan = self._plan_drained() if reason is not None and reason.ends_window else self._plan_decode(flush=None)
        self.pipeline_gate.steps[reason] += plan is not None
        return plan

    def _plan_drained(self) -> StepPlan | None:
        """Plan a step with nothing in flight: flush the tail, admit jobs, then plan a MIXED step or open a window."""
        flush = self._window.close()
        self.shrink_arena()
        for job in self._running_set.jobs_to_shorten:
            if job.has_outgrown_row:  # it may have no other end, so those of its client that wait go first
                job.reset_arrival(self._clock())
            self._requeue(job)
        copies = self._admission.admit()
        is_mixed = self._running_set.is_prefilling or self._running_set.has_drafts
        plan = (self._plan_mixed(flush) if is_mixed else None) or self._plan_decode(flush)
        loads = self._running_set.take_loads()
        if plan is None and (flush is not None or loads or copies):
            plan = self._builder.build_flush(flush)
        return replace(plan, loads=loads, copies=copies) if plan is not None and (loads or copies) else plan

    def _plan_mixed(self, flush: Flush | None) -> StepPlan | None:
        """Plan a MIXED step: one token and its drafts for every decoding row, and pieces of prompts within the budget.
        All of it is written straight to the arena.
        """
        for job in self._running_set.jobs_by_start:
            if job.can_decode:
                self._reserve(job, job.num_computed_tokens + 1)
        for job in self._running_set.jobs:
            drafts.fit_drafts(job, self.cache)
        decoding = [j for j in self._running_set.jobs if j.can_decode]
        prefilling = [j for j in self._running_set.jobs_by_start if j.state is RequestState.PREFILLING]
        self._halted_jobs = [j for j in prefilling if not self._count_before_missing_image(j, 1)]
        prefilling = [j for j in prefilling if j not in self._halted_jobs]
        target = self.config.token_target if any(not job.request.background for job in decoding) else None
        self.has_large_piece = False
        if decoding or self.backoff.holds_back:
            budget = self.cost_model.prompt_budget(target, self.backoff.tokens, len(decoding))
        else:
            longest = max((j.num_computed_tokens for j in prefilling), default=0)
            most_tokens = 0 if self._large_pieces.must_wait else self.config.lone_prefill_budget
            budget = self.cost_model.lone_budget(self.backoff.tokens, most_tokens, longest)
        counts = share_budget(budget, [len(j.tokens) - j.num_computed_tokens for j in prefilling])
        prefill_counts: list[tuple[Job, int]] = []
        for job, count in zip(prefilling, counts, strict=True):
            count = min(count, budget)  # less than its share if an image before it took more
            if count > 0 and job.is_running:
                count = self._count_without_preemption(job, count)
                if job.request.images is not None:
                    count = job.request.images.fit_to_whole_images(job.num_computed_tokens, count)
                    count = self._count_before_missing_image(job, count)
                if count > budget and prefill_counts:
                    continue  # the next step has room for the image, or begins with it
                try:
                    self._make_room(job, job.num_computed_tokens + count)
                except KVCacheFull:  # the system refuses what the cache was to grow by
                    count = count if job.request.images is not None else self._count_without_preemption(job, count)
                    self._reserve(job, job.num_computed_tokens + count)
                prefill_counts.append((job, count))
                budget -= count
        decoding = [j for j in decoding if j.is_running]
        prefill_counts = [(job, count) for job, count in prefill_counts if job.is_running]
        job_counts = [(j, 1 + len(j.drafts)) for j in decoding] + prefill_counts
        scheduled_tokens = sorted(job_counts, key=lambda each: (each[1] > 1, adapter_order(each[0])))
        if not scheduled_tokens:
            return None
        plan = self._builder.build_mixed(scheduled_tokens, flush, self._running_set.plan_snapshots(scheduled_tokens))
        self._advance_jobs(plan, scheduled_tokens)
        self.has_large_piece = sum(count for _, count in prefill_counts) > self.backoff.tokens
        return plan

    def _count_without_preemption(self, job: Job, count: int) -> int:
        """Return how many of a job's next `count` tokens fit without preempting another row; at least one."""
        return max(1, min(count, self.cache.max_tokens_without_preemption(job.id) - job.num_computed_tokens))

    def _count_before_missing_image(self, job: Job, count: int) -> int:
        """Return how many of a job's next `count` tokens come before an image without features, and ask for these
        features. They may be missing because a prompt has more images than are kept.
        """
        images, request_features = job.request.images, self._admission.request_features
        if images is None:
            return count
        return images.tokens_before_missing_image(
            job.num_computed_tokens, count, lambda image: request_features([image]) is None
        )

    def _plan_decode(self, flush: Flush | None) -> StepPlan | None:
        """Plan a DECODE step: one token for every lane of the window. Open a window if none is open."""
        planned_step = self._window.plan_step(self._builder, self._reserve, flush)
        if planned_step is None:
            return None
        plan, jobs = planned_step
        self.has_large_piece = False
        self._advance_jobs(plan, [(job, 1) for job in jobs])
        return plan

    def _advance_jobs(self, plan: StepPlan, scheduled_tokens: ScheduledTokens) -> None:
        """Advance the jobs of a planned step by the tokens that it computes."""
        is_mixed = plan.kind is StepKind.MIXED
        for job, count in scheduled_tokens:
            job.num_computed_tokens += count
            job.state_at = job.num_computed_tokens
            self.cache.append(job.id, count)
            if is_mixed:
                self._running_set.note_stored(job, job.num_computed_tokens)
            if job.num_computed_tokens < len(job.tokens):
                self._admission.release_stored_claims(job)
            else:
                if job.state is RequestState.PREFILLING:
                    self._admission.release_claims(job)
                job.state = RequestState.DECODING
                if is_mixed:
                    job.drafts_in_flight, job.drafts = job.drafts, ()
                job.num_planned_outputs += 0 if is_mixed and job.is_pooling else 1 + len(job.drafts_in_flight)

    # -- rows under pressure ------------------------------------------------------------------------------------------

    def _reserve(self, job: Job, tokens: int) -> None:
        """Make room for `tokens` tokens of a running job, or end the job if there is no room even for it alone."""
        try:
            self._make_room(job, tokens)
        except KVCacheFull:
            self._end_stuck_job(job)

    def _make_room(self, job: Job, tokens: int) -> None:
        """Make room for `tokens` tokens of a running job: drop headroom, then preempt victims. Raises KVCacheFull."""
        while job.is_running and not self._running_set.reserve(job, tokens):
            self._preempt(self._running_set.victim)

    def _preempt(self, job: Job) -> None:
        """Take a job's row and blocks for other jobs, and queue it again."""
        job.preemptions += 1
        self.preemptions += 1
        self._requeue(job)

    def _requeue(self, job: Job, is_trusted: bool = True) -> None:
        """Queue a running job again, with the tokens that it keeps. What it stored stays cached if `is_trusted`."""
        self._running_set.release_row(job)
        self._admission.release_claims(job)
        self._running_set.release_blocks(job) if is_trusted else self.cache.free(job.id)
        self.dropped_tokens += job.lose_row()
        job.keys = self._running_set.compute_job_keys(job)
        self._admission.enqueue(job)

    # -- results ------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: Sequence[int], seconds: float | None = None) -> list[RowTokens]:
        """Append the tokens of a finished step, which took `seconds`, to their jobs, and return them row by row. Tokens
        of a job that has lost its row since are dropped. A job with a finish reason runs until `finish` is
        called.
        """
        if seconds is not None and plan.kind is StepKind.MIXED:
            self.cost_model.learn(plan, seconds)
        rows: list[RowTokens] = []
        for segment in plan.segments if plan.kind is StepKind.MIXED and plan.has_prompt_results else ():
            job = self._find_job(segment)
            if job is not None and job.note_prompt_results(segment.scored, segment.pooled):
                rows.append(RowTokens(job, (), 0, FinishReason.STOP))
        if self._growth.wait and self._growth.note_good_step():
            self._allow_growth()
        if self._large_pieces.wait:
            self._large_pieces.note_good_step()
        if self.backoff.holds_back and self.backoff.relax():
            self._admission.recheck_queue()
        end = 0
        for segment in plan.logit_segments:
            first, end = end, end + len(segment.logits)
            if not segment.live or (job := self._find_job(segment)) is None:
                continue
            if not job.drafts_in_flight:
                token = tokens[first]
                rows.append(RowTokens(job, (token,), first, job.append_token(token)))
                continue
            rows.append(drafts.accept_drafts(job, tokens[first:end], first, self._running_set))
            if job.is_spoiled and rows[-1].finish_reason is None:
                self._requeue(job, is_trusted=False)
        return rows

    def _find_job(self, segment: Segment) -> Job | None:
        """Return the job of a segment; None if it has lost the row that it had when the step was planned."""
        job = self._jobs.get(segment.job)
        return job if job is not None and job.generation == segment.generation else None
