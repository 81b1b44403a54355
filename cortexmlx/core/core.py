"""EngineCore: one step after the other of an engine's work, on the thread that owns mlx. Start at `EngineCore.step`."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TypeVar

from cortexmlx.core.adapter_registry import AdapterRegistry
from cortexmlx.core.config import EngineConfig
from cortexmlx.core.draft_model import DraftModel, name_draft_in_errors, open_draft
from cortexmlx.core.engine_model import Call, EngineModel
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.in_process_model import InProcessModel
from cortexmlx.core.meter import Measurements
from cortexmlx.core.open_requests import OpenRequests
from cortexmlx.core.text import StopConditions
from cortexmlx.errors import CortexError, HostLost, OutOfMemory
from cortexmlx.execution.boundary import Refusal, Runner
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pinned_prefixes import PinnedPrefixes
from cortexmlx.kv.sizing import PREFILL_BUDGET
from cortexmlx.kv.spec import GroupCounts
from cortexmlx.models.load import find_head_folder
from cortexmlx.models.resolve import resolve_model
from cortexmlx.scheduling.decode_window import RAN_AHEAD
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import StepKind, StepPlan
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.scheduling.shortage import largest_job, out_of_memory_error
from cortexmlx.speculation.drafter import Drafter, ForcedDrafter, HeadDrafter, SlowDrafter
from cortexmlx.speculation.speculation import Speculation
from cortexmlx.speculation.suffix import SuffixDrafter
from cortexmlx.stats import CommandBuffers, DraftStats, EngineStats, RequestStats, SpeculationStats, UsageSample
from cortexmlx.structured.matcher import Grammar
from cortexmlx.system.machine import is_memory_refusal
from cortexmlx.types.request import QueuedRequest, RequestId

_T = TypeVar("_T")

log = logging.getLogger("cortexmlx")

_FRAGMENTED = 0.5
"""Fragmentation above which an idle engine compacts its arena."""

_BLOCKS_AT_ONCE = 256
"""How many blocks compaction copies at a time. It bounds its memory."""


class EngineCore:
    """Runs a model's steps on the engine's thread: the scheduler plans, the runner computes, requests get results."""

    def __init__(
        self,
        config: EngineConfig,
        wake: Callable[[Call], None] = lambda call: None,
        has_waiters: Callable[[], bool] = lambda: False,
    ) -> None:
        """`wake(call)` has the engine's thread run a call between two steps; the store's threads use it.
        `has_waiters()` says whether a caller already waits while the engine opens.
        """
        self.config = config
        self._wake = wake
        self._job_numbers = itertools.count()
        self._in_flight: deque[StepPlan] = deque()
        self._at_work, self._step_seconds = False, 0.0
        self._refused_image: bytes | None = None
        self._last_collect_time: float | None = None
        try:
            self.model = model = open_model(config, wake, has_waiters)
            self.loaded, self.info = model.loaded, model.info
            self.runner, self.backend, self.disk = model.runner, model.backend, model.disk
            self.adapters = AdapterRegistry(config.adapter_limits, model.adapter_set)
            self.draft = None if model.draft is None else self._make_draft_model(model.draft)
            self._make_empty_state(model.blocks)
            self.pins = PinnedPrefixes(self.cache)
            if config.keep is not None:
                config.keep.check(self.loaded.context_length, self.cache.tables.configured_tokens)
            model.start_store()
        except BaseException:
            self.release()
            raise

    def _make_draft_model(self, engine_model: EngineModel) -> DraftModel:
        rows, budget = self.config.max_rows, self.config.prefill_budget or PREFILL_BUDGET
        return DraftModel(engine_model, rows, budget, self.info.vocab_size, self.config.prefix_cache)

    def _make_empty_state(self, blocks: GroupCounts, from_scratch: bool = False) -> None:
        """Make an empty cache of at most `blocks` blocks per group, a scheduler without requests, and new counters."""
        self.cache = self.model.make_cache(blocks, from_scratch)
        self.scheduler = self.model.make_scheduler(self.cache)
        if self.model.sight is not None:
            self.scheduler.set_request_features(self.model.sight.request_features)
        self.measurements = Measurements()
        self.speculation = make_speculation(
            self.config, self.scheduler, self.draft, self.model.make_head_drafter(self.scheduler)
        )
        self.requests = OpenRequests(
            self.scheduler,
            self.measurements,
            self.runner.processors,
            self.loaded.tokenizer,
            self._job_numbers,
            self.speculation,
            self.adapters,
        )
        self.recovery = Recovery(self, self._wake)

    # -- the loop's body ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Plan and start the next step, then collect the results of the one before it."""
        try:
            with self.measurements.busy_timer:
                if self.has_image_to_encode:
                    self.drain()  # the image delays no token that is there
                    self._encode_image()
                self.requests.fail_timed_out(time.perf_counter())
                if self.recovery.open or self.recovery.ensure_workers():
                    self._prepare_planning()
                    if self.speculation is not None:
                        self.speculation.draft()
                    plan = self._plan()
                    to_choose = self._dispatch(plan)
                    self._collect_due(plan)
                    if to_choose is not None:
                        self._choose_tokens(to_choose)
        except HostLost as lost:
            self.recovery.recover(lost)
        self._sample_usage(at_work=True)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until the next call, or until a request times out."""
        waits = self.recovery.is_starting or (self.scheduler.is_idle and not self._in_flight)
        return waits and not self.has_image_to_encode and self.requests.seconds_to_deadline != 0

    @property
    def has_image_to_encode(self) -> bool:
        """Whether the vision tower has an image to encode, for which requests wait."""
        return self.model.sight is not None and self.model.sight.current_image is not None

    @property
    def seconds_to_deadline(self) -> float | None:
        """Seconds until the first request times out, 0 if one is late; None if no request has a timeout."""
        return self.requests.seconds_to_deadline

    def add(
        self, request: QueuedRequest, handle: RequestHandle, stops: StopConditions, grammar: Grammar | None = None
    ) -> None:
        """Queue a request, whose answers end at `stops` and follow `grammar`. If it can never run, it fails at once."""
        self.pins.remove_expired()
        self.pins.pin_recomputed_states()
        try:
            self.scheduler.limits.check_request(request, self.cache.tables.configured_tokens)
            request = self.adapters.resolve(request)
        except CortexError as error:
            handle.fail(error)
            return
        self.requests.add(request, handle, stops, grammar)

    def _encode_image(self) -> None:
        """Encode a part of an image. Requests that wait for it fail if this fails, or is refused memory twice."""
        sight, waiting = self.model.sight, self.scheduler.jobs_awaiting_images
        assert sight is not None and sight.current_image is not None
        if not waiting:  # they have ended
            sight.forget()
            return
        image = sight.current_image
        try:
            sight.advance(None if self.config.token_target is None else self.config.token_target / 2)
        except Exception as error:  # MLX raises anything without memory
            log.warning("an image could not be looked at: %s", error)
            if is_memory_refusal(error) and self._refused_image != image.key:
                self._refused_image = image.key  # it is tried once more, without what is cached
                sight.request_features([image])
                self.relieve(True)
                return
            kind = OutOfMemory if is_memory_refusal(error) else CortexError
            failed = kind(f"an image could not be looked at: {error}")
            for job in waiting:
                answer, images = self.requests.answers.get(job.id), job.request.images
                if answer is not None and images is not None and images.shows(image):
                    self.requests.fail(answer.group, failed)
        if sight.current_image is not image:
            self._refused_image = None
            self.scheduler.note_image_encoded(image)

    def cancel(self, request: RequestId) -> None:
        """End a request with the text it has. Does nothing if it has ended."""
        self.requests.cancel(request)

    def pin(
        self, tokens: Sequence[int], client: str | None, adapter: str | None = None, seconds: float | None = None
    ) -> tuple[int, int]:
        """Pin a prompt's full blocks. Return the pin's number and token count. Raises InvalidRequest or PinRefused."""
        self.model.check_pins()
        client = None if self.scheduler.config.share_between_clients else client
        return self.pins.add(tokens, self.adapters.cache_salt(adapter, client), seconds)

    def fail_all(self, error: CortexError) -> None:
        """Fail every request. Drop everything in flight, and the arena, which a step may have half changed."""
        self.backend.reconsider()
        self._in_flight.clear()
        with suppress(HostLost):  # the next step begins the runner again
            self.runner.forget()
        self.scheduler.fail_all()
        self.cache.states.take_ops()
        self._release_arena()
        self.requests.fail_all(error)
        if self.model.sight is not None:
            self.model.sight.forget()
        if self.speculation is not None:
            self.speculation.forget()

    def reset(self) -> None:
        """Drop all requests, the arena and what refers to its blocks, and set all counters to zero. An exception may
        have landed between any two statements, so only the model is trusted.

        The caller fails the handles. If memory is short now, the next step has the arena made.
        """
        self._in_flight.clear()
        self.requests.forget()
        if self.model.sight is not None:
            self.model.sight.forget()
        self.model.restart_workers()
        self.model.reset()
        self.runner = self.model.runner
        if self.draft is not None:
            self.draft.reset()
        self._make_empty_state(self.cache.pools.configured_blocks, from_scratch=True)
        self.pins.move_to_cache(self.cache)

    def drop_in_flight(self) -> None:
        """Drop the steps that are in flight in lost workers: see `Recovery`."""
        self._in_flight.clear()
        self._last_collect_time = None

    def begin_on_new_workers(self) -> None:
        """Begin on the restarted workers, with an empty arena: see `Recovery`."""
        self.model.reset()
        self.runner = self.model.runner
        self.cache.states.take_ops()
        self.cache.pools.shrink_to_minimum()
        self.runner.begin(self.cache.pools.blocks)

    def relieve(self, critical: bool) -> None:
        """Under memory pressure, evict half of the unused cached blocks; if `critical`, all, and shrink the arena."""
        with self._memory_change():
            if self.scheduler.is_idle:
                self.drain()
            self.scheduler.relieve_memory(critical)
            if self.draft is not None:
                self.draft.relieve(critical)
        self.tidy()
        self.runner.trim()

    def compact(self) -> int:
        """If idle, move cached blocks together, so that free blocks are contiguous. Return how many blocks moved."""
        with self._memory_change():
            return self._restart_if_refused(self._compact_blocks()) or 0 if self.idle and self.recovery.open else 0
        return 0

    def tidy(self) -> bool:
        """Tidy up while idle: drop the memory of the last step, compact a badly fragmented arena, shrink it
        once if `relieve` asked for it, and copy some blocks to the store. Return whether there are more to copy.
        """
        if not (self.idle and self.recovery.open):
            return False
        self._last_collect_time = None
        with self.recovery, self._memory_change():
            self._tidy_arena()
            if self._at_work:
                self._sample_usage(at_work=False)
            return self.disk is not None and bool(self._restart_if_refused(self.disk.copy_while_idle()))
        return False

    def check_invariants(self) -> None:
        """Raise AssertionError if jobs, rows, sequences and blocks are inconsistent: for tests and debug runs."""
        self.scheduler.check_invariants()
        if self.draft is not None:
            self.draft.rows.check_invariants()

    @property
    def kv_bytes_in_use(self) -> int:
        """Bytes of the blocks and tails that hold the tokens of running requests."""
        return self.cache.pools.bytes_in_use + (self.runner.bytes.tail if self.scheduler.rows_running else 0)

    def release(self) -> None:
        """Free all memory. The core cannot be used afterwards. Safe to call again."""
        parts = vars(self)
        self._in_flight.clear()
        if "requests" in parts:
            self.requests.forget()
        try:
            if "model" in parts:
                self.model.release()
        finally:
            self.disk = None
            for name in ("runner", "loaded", "draft", "speculation"):
                parts.pop(name, None)

    def drain(self) -> None:
        """Collect the results of all steps in flight."""
        while self._in_flight:
            self._collect()

    def _sample_usage(self, at_work: bool) -> None:
        """Record how full the engine is: at intervals while it works, and when it stops."""
        seconds = time.perf_counter() - self.measurements.start_time
        self._at_work = at_work
        if at_work and not self.measurements.timeline.is_due(seconds):
            return
        used_blocks, cached_blocks, free_blocks = self.cache.pools.block_counts
        rows_running, rows_waiting = self.scheduler.rows_running, self.scheduler.rows_waiting
        self.measurements.timeline.add(
            UsageSample(seconds, used_blocks, cached_blocks, free_blocks, rows_running, rows_waiting)
        )

    # -- inside a step ------------------------------------------------------------------------------------------------

    def _prepare_planning(self) -> None:
        """Before planning, collect a step whose results are needed first, and copy blocks to the store."""
        newest_plan = self._in_flight[-1] if self._in_flight else None
        if newest_plan is not None and newest_plan.kind is StepKind.MIXED and self.runner.computes_at_dispatch:
            # A step that computed prompts is done, or nearly so (`cpu/feed.py`). If the next one began before its
            # results are read, those who wait for their first token would wait for all of that, too.
            self._collect()
        if self._in_flight and self.speculation is not None and self.speculation.needs_drained_pipeline:
            self._collect()
        if self.disk is not None and not self._in_flight:
            self._restart_if_refused(self.disk.copy_between_steps(self._step_seconds))

    def _plan(self) -> StepPlan | None:
        """Plan the next step. Notify the answers that begin in it, and end those that get no memory."""
        with self.measurements.plan_timer:
            plan = self.scheduler.plan(len(self._in_flight))
        if self.scheduler.ended_jobs:
            self.requests.end_jobs_without_memory()
        if plan is not None and plan.groups is not None:
            self.requests.begin_step(plan, time.perf_counter())
        return plan

    def _dispatch(self, plan: StepPlan | None) -> StepPlan | None:
        """Start a step. If rows need masks, start only its forward pass and return the plan for `_choose_tokens`."""
        if plan is None:
            return None
        masked = self.requests.needs_mask(plan)
        refusal = self.runner.forward(plan) if masked else self.runner.dispatch(plan)
        if refusal is not None:
            self._restart_with_less(plan, refusal)
            return None
        self._in_flight.append(plan)
        return plan if masked else None

    def _collect_due(self, plan: StepPlan | None) -> None:
        """Collect the step before `plan`; if `plan` is None, the step in flight. At most one step runs ahead."""
        if self._in_flight and (plan is None or len(self._in_flight) > 1):
            self._collect()
        elif plan is None and not self.scheduler.is_idle:
            raise RuntimeError("the scheduler has requests but nothing to compute")

    def _choose_tokens(self, plan: StepPlan) -> None:
        """Make a step's masks during its forward pass, and start its token choice. Older steps have been collected."""
        if not self._in_flight or self._in_flight[-1] is not plan:
            return  # memory was refused since, and all rows begin again
        with self.measurements.mask_timer:
            mask = self.requests.make_token_mask(plan)
        refusal = self.runner.choose(mask)
        if refusal is not None:
            self._in_flight.pop()
            self._restart_with_less(plan, refusal)

    def _collect(self) -> None:
        """Wait for the oldest step in flight, and process its results."""
        plan = self._in_flight.popleft()
        result = self._restart_if_refused(self.runner.collect(), plan)
        if result is not None:
            with self.measurements.commit_timer:
                self._step_seconds = result.seconds
                verified_drafts = self.requests.commit(plan, result)
            if verified_drafts:
                self.measurements.count_drafts(verified_drafts)
            seconds = self._measure_step(result.seconds)
            if self.speculation is not None:
                self.speculation.learn(plan, seconds, verified_drafts)
        if plan.kind is StepKind.MIXED:  # no further piece of a prompt begins whose caller has cancelled it
            self.requests.apply_cancellations(plan)

    def _measure_step(self, standalone_seconds: float) -> float:
        """Return the last step's seconds, since the previous one was collected; after a pause, `standalone_seconds`."""
        now, previous_time = time.perf_counter(), self._last_collect_time
        self._last_collect_time = now
        return standalone_seconds if previous_time is None else now - previous_time

    def _restart_if_refused(self, answer: _T | Refusal, plan: StepPlan | None = None) -> _T | None:
        """Return the runner's or the disk's `answer`. If memory was refused, restart with less and return None."""
        if not isinstance(answer, Refusal):
            return answer
        self._restart_with_less(plan, answer)
        return None

    def _restart_with_less(self, plan: StepPlan | None, refusal: Refusal) -> None:
        """Restart all rows after memory was refused, with fewer at once.

        What the steps in flight write is not trusted. So the cached blocks are dropped, and the arena too, unless only
        the arena's growth was refused. A request that gets no farther alone fails.
        """
        log.warning("memory was refused, and requests begin again with less: %s", refusal.why)
        arena_stays = refusal.is_resize and min(self.runner.blocks) > 0 and not self.cache.pools.is_growing_back
        rows_running = self.scheduler.rows_running
        is_no_jobs_fault = arena_stays or self.scheduler.has_large_piece
        job = None if is_no_jobs_fault else largest_job(plan, self.scheduler.jobs)
        if job is not None:
            job.note_refusal()
        if self.draft is not None:
            self.draft.pause()
        self._restart_rows(rows=1 if job is not None and job.refusals else rows_running // 2)
        if arena_stays:
            self.cache.pools.cap_at(self.runner.blocks)
            self.scheduler.end_stuck_jobs()
            self.requests.end_jobs_without_memory()
        else:
            self._release_arena()
        self.runner.trim()
        if job is not None and job.refusals > 1 and rows_running == 1:
            self.requests.fail(self.requests.answers[job.id].group, out_of_memory_error(job, refusal.why))

    def _restart_rows(self, rows: int | None) -> None:
        """Have all rows compute their tokens again, at most `rows` at once. Nothing computed before is trusted."""
        self._in_flight.clear()
        self.runner.forget()
        self.scheduler.restart_rows(rows)
        self.cache.states.take_ops()

    def _release_arena(self) -> None:
        """Release the arena with its content. No sequence may have blocks. The next step makes a new arena."""
        self.runner.release()
        self.cache.pools.shrink_to_minimum()

    # -- the arena between two requests -------------------------------------------------------------------------------

    @contextmanager
    def _memory_change(self) -> Iterator[None]:
        """Context for a change of memory between two steps. If it raises, log the exception, make the arena anew and
        restart all rows, since nobody knows what was changed.
        """
        try:
            yield
        except HostLost:
            raise
        except Exception:
            log.exception("a change of memory failed: the arena is made anew, and requests begin again")
            self._restart_rows(None)
            self._release_arena()

    def _tidy_arena(self) -> None:
        """Drop the last step's memory, compact a fragmented arena, and shrink the arena if that was asked for."""
        self._restart_if_refused(self.runner.settle(self.cache.states.take_ops()))
        if self.draft is not None:
            self.draft.tidy()
        if self.cache.pools.fragmentation > _FRAGMENTED:
            self._restart_if_refused(self._compact_blocks())
        self.scheduler.shrink_arena()
        if any(count < have for count, have in zip(self.cache.pools.blocks, self.runner.blocks, strict=True)):
            self._restart_if_refused(self._shrink_arena())

    def _compact_blocks(self) -> int | Refusal:
        """Move cached blocks together, so that the free blocks are contiguous. Return how many moved."""
        copies = self.cache.compact()
        for start in range(0, len(copies), _BLOCKS_AT_ONCE):
            if refusal := self.runner.copy(copies[start : start + _BLOCKS_AT_ONCE]):
                return refusal
        return len(copies)

    def _shrink_arena(self) -> Refusal | None:
        """Shrink the arena to the cache's size. If the system refuses the smaller arena, keep the old one."""
        refusal = self.runner.resize(self.cache.pools.blocks)
        self.runner.trim()
        if refusal is None or not refusal.is_resize or not min(self.runner.blocks):
            return refusal
        self.cache.pools.grow(self.runner.blocks)
        return None

    def stats(self) -> EngineStats:
        """Return the engine's statistics."""
        self.pins.remove_expired()
        return engine_stats(self)


def open_model(config: EngineConfig, wake: Callable[[Call], None], has_waiters: Callable[[], bool]) -> EngineModel:
    """Open a model, in this process or on hosts. `wake`, `has_waiters`: see `EngineCore`. Raises what `Engine` does."""
    if config.hosts is not None:
        from cortexmlx.distributed.hosted_model import HostedModel

        return HostedModel(config, wake)
    if config.active_draft is None:
        return InProcessModel(config, wake, has_waiters)
    resolve_model(config.model)  # its error comes first, and is not the draft's
    with name_draft_in_errors(config):
        head_folder = find_head_folder(config.active_draft, config.model, config.on_progress or (lambda progress: None))
    draft = None if head_folder is not None else open_draft(config, has_waiters)
    return InProcessModel(config, wake, has_waiters, draft, head_folder)


def make_speculation(
    config: EngineConfig, scheduler: Scheduler, draft: DraftModel | None, head: HeadDrafter | None
) -> Speculation | None:
    """Return the Speculation that drafts tokens for the rows of `scheduler`; None if there is no drafter. `head` uses
    the model's own draft head, or its assistant.

    Verified tokens are computed in other ways than decoded ones, and how many there are depends on the time that steps
    take, so a `reproducible` engine drafts none.
    """
    drafters: list[Drafter] = []
    if config.forced_tokens and not config.reproducible:
        drafters.append(ForcedDrafter())
    if config.speculate and not config.reproducible:
        drafters.append(SuffixDrafter(config.prefix_cache))
    if not drafters and draft is None and head is None:
        return None
    slow_drafters: list[SlowDrafter] = [drafter for drafter in (head, draft) if drafter is not None]
    return Speculation(scheduler, drafters, slow_drafters)


# The statistics of this moment.


def engine_stats(core: EngineCore) -> EngineStats:
    """Return the counters and gauges of a core. Only the engine's thread may call it."""
    measurements, scheduler, runner = core.measurements, core.scheduler, core.runner
    cache, memory_bytes = core.cache.stats(), runner.bytes
    busy, keep = measurements.busy_timer.seconds, core.config.keep
    return EngineStats(
        rows_running=scheduler.rows_running,
        rows_waiting=scheduler.rows_waiting,
        max_rows=scheduler.config.max_rows,
        block_size=core.cache.block_size,
        kv_bits=core.config.kv_bits,
        kv_group_size=next((g.spec.kv_group_size for g in core.cache.groups if g.spec.kv_bits), None),
        total_blocks=cache.total_blocks,
        free_blocks=cache.free_blocks,
        used_blocks=cache.used_blocks,
        shared_blocks=cache.shared_blocks,
        cached_blocks=cache.cached_blocks,
        fragmentation=cache.fragmentation,
        single_run_share=cache.single_run_sequences / cache.sequences if cache.sequences else 1.0,
        kv_bytes=memory_bytes.arena,
        kv_bytes_limit=core.cache.bytes_limit,
        kv_bytes_in_use=core.kv_bytes_in_use,
        state_bytes=memory_bytes.states,
        state_snapshots=len(core.cache.states.snapshots or ()),
        adapters=core.adapters.loaded_count,
        adapter_bytes=core.adapters.nbytes,
        adapter_bytes_limit=core.adapters.limits.bytes,
        pins=len(core.pins),
        pinned_blocks=core.pins.blocks,
        steps=scheduler.planned_steps,
        steps_by_reason={RAN_AHEAD if r is None else r.value: n for r, n in scheduler.pipeline_gate.steps.items() if n},
        speculation=_speculation_stats(core),
        prompt_tokens=scheduler.prompt_tokens,
        generated_tokens=measurements.generated_tokens,
        requests_finished=measurements.requests_finished,
        cached_tokens=scheduler.cached_tokens,
        prefilled_tokens=measurements.prefilled_tokens,
        preemptions=scheduler.preemptions,
        restarts=scheduler.restarts,
        keep_first=None if keep is None else keep.first,
        keep_last=None if keep is None else keep.last,
        dropped_tokens=scheduler.dropped_tokens,
        queued=measurements.queue_time.summary(),
        time_to_first_token=measurements.first_token.summary(),
        inter_token=measurements.inter_token.summary(),
        tokens_per_second=measurements.generated_tokens / busy if busy else 0.0,
        plan_seconds=measurements.plan_timer.seconds,
        build_seconds=runner.build_seconds,
        wait_seconds=runner.wait_seconds,
        commit_seconds=measurements.commit_timer.seconds,
        mask_seconds=measurements.mask_timer.seconds,
        attention_backend=core.backend.describe(),
        attention_notes=core.backend.notes(),
        active_memory=memory_bytes.active,
        peak_memory=memory_bytes.peak,
        arena_writes=memory_bytes.writes,
        command_buffers=_command_buffers(runner),
        kv_store=None if core.disk is None else core.disk.stats(),
        timeline=measurements.timeline.samples(),
        sequences=tuple(_describe_job(job, core.cache) for job in scheduler.jobs),
        requests=tuple(map(_request_stats, scheduler.jobs)),
        choices=core.model.choices,
        hosts=core.model.hosts,
        host_losses=core.recovery.losses,
        recomputed_tokens=dict(measurements.recomputed_tokens),
        draft_kv_bytes=0 if core.draft is None else core.draft.kv_bytes,
    )


def _command_buffers(runner: Runner) -> CommandBuffers | None:
    """Return the runner's command-buffer counts; None if a host is lost, which the next step handles."""
    try:
        return runner.command_buffers
    except HostLost:
        return None


def _speculation_stats(core: EngineCore) -> SpeculationStats:
    """Return how many tokens were drafted and accepted, by source."""
    measurements = core.measurements
    counts = {} if core.speculation is None else core.speculation.counts
    sources = {
        name: DraftStats(draft_counts.drafted, draft_counts.accepted)
        for name, draft_counts in counts.items()
        if draft_counts.drafted
    }
    return SpeculationStats(
        measurements.drafted_tokens, measurements.accepted_tokens, measurements.verified_rows, sources
    )


def _request_stats(job: Job) -> RequestStats:
    """Return a job's state and token counts."""
    return RequestStats(
        state=job.state,
        prompt_tokens=job.prompt_length,
        cached_tokens=job.cached,
        computed_tokens=job.num_computed_tokens,
        generated_tokens=job.num_generated,
        max_tokens=job.max_new_tokens,
        preemptions=job.preemptions,
    )


def _describe_job(job: Job, cache: KVCache) -> str:
    """Return a line about a job: its state, tokens and blocks."""
    blocks_text = f", blocks {cache.tables.describe(job.id)}" if job.is_running else ""
    max_tokens = job.prompt_length + job.max_new_tokens
    counts = f"{job.prompt_length} + {job.num_generated} of at most {max_tokens} tokens, {job.cached} cached"
    counts += f", {len(job.dropped_tokens)} dropped" if job.dropped_tokens else ""
    preempted_text = f", preempted {job.preemptions} times" if job.preemptions else ""
    return f"{job.state.value}: {counts}{preempted_text}{blocks_text}"


LOSSES = 3
"""How often in a row, without an answer in between, workers may be lost and running requests begin again. A request
that ends its worker would do so for ever.
"""


class Recovery:
    """Restarts the workers of a model on hosts after HostLost. As a context manager, it handles a HostLost
    raised within. Running requests fail, or begin again if `resume_lost`. Waiting ones wait for the new workers.

    A start takes seconds to minutes. So another thread waits for the workers, and the engine's thread ends requests
    that are late or cancelled, and takes new ones. A model in this process never raises HostLost.
    """

    def __init__(self, core: EngineCore, wake: Callable[[Call], None]) -> None:
        """`wake(call)` has the engine's thread run a call between two steps."""
        self._core = core
        self._wake = wake
        self.losses = 0
        """How often the workers were lost."""
        self._consecutive_losses = 0
        self._last_finished_count = 0
        self.open = True
        """Whether there are workers. If not, the next request has them started."""
        self._start_thread: threading.Thread | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, HostLost):
            return False
        self.recover(error)
        return True

    def recover(self, loss: HostLost) -> None:
        """Fail or restart the running requests, and start new workers. If that fails, all requests fail."""
        core, finished = self._core, self._core.measurements.requests_finished
        self._consecutive_losses = 1 if finished != self._last_finished_count else self._consecutive_losses + 1
        self._last_finished_count = finished
        self.losses += 1
        resume = core.config.resume_lost and self._consecutive_losses <= LOSSES
        log.warning("running requests %s: %s", "begin again" if resume else "fail", loss)
        if not resume:
            self._fail_running(loss)
        core.scheduler.restart_rows()
        self._start_workers()

    @property
    def is_starting(self) -> bool:
        """Whether the workers are being started now."""
        return self._start_thread is not None

    def ensure_workers(self) -> bool:
        """Start the workers if there are none. Return whether a step may begin now."""
        if not (self.open or self.is_starting):
            self._start_workers()
        return self.open

    def _start_workers(self) -> None:
        """Drop what is in flight, and start the workers on another thread."""
        self.open = False
        self._core.drop_in_flight()
        self._start_thread = thread = threading.Thread(
            target=self._restart_workers, name="cortexmlx starts workers", daemon=True
        )
        try:
            thread.start()
        except Exception as error:  # the system has no thread, or no memory for one
            self.finish_start(thread, error)

    def _restart_workers(self) -> None:
        """Start the workers and wait for them. A thread of its own runs this."""
        this_thread, start_error = threading.current_thread(), None
        try:
            self._core.model.restart_workers()
        except BaseException as error:
            start_error = error
        self._wake(lambda core: core.recovery.finish_start(this_thread, start_error))

    def finish_start(self, thread: threading.Thread, start_error: BaseException | None) -> None:
        """Resume after `thread` started the workers, or failed with `start_error`. A no-op if the engine was reset."""
        if thread is not self._start_thread:
            return
        self._start_thread = None
        try:
            if start_error is not None:
                raise start_error
            self._core.begin_on_new_workers()
            self.open = True
        except Exception as error:
            log.error("the workers cannot be started again: %s", error)
            failure = error if isinstance(error, CortexError) else HostLost(f"the workers cannot be started: {error!r}")
            self._core.fail_all(failure)

    def _fail_running(self, loss: HostLost) -> None:
        """Fail the requests whose jobs are running."""
        answers = self._core.requests.answers
        for job in [job for job in self._core.scheduler.jobs if job.is_running]:
            if job.id in answers:  # it may have failed with another answer of its request
                self._core.requests.fail(answers[job.id].group, loss)
