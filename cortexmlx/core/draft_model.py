"""DraftModel: a smaller model that drafts the next tokens of an engine's rows, on the engine's thread."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.engine_model import EngineModel
from cortexmlx.core.in_process_model import InProcessModel
from cortexmlx.errors import CortexError, ModelUnsupported
from cortexmlx.execution.boundary import Refusal
from cortexmlx.kv.snapshots import NO_STATE_OPS
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.speculation.draft_rows import MAX_ROUND_TOKENS, DraftScheduler
from cortexmlx.speculation.drafter import GuessTimes, TokenDraft

log = logging.getLogger("cortexmlx")

PAUSE = 10.0
"""For how many seconds nothing is guessed after the system has refused memory; twice as long after a refusal that comes
sooner after a pause than the pause was long.
"""

MAX_PAUSE = 256 * PAUSE
"""The longest pause."""


def open_draft(config: EngineConfig, has_waiters: Callable[[], bool] = lambda: False) -> InProcessModel:
    """Open the draft model of an engine. Its keys and values are not kept on disk. `has_waiters`: see `InProcessModel`.

    Raises what `InProcessModel` raises, with a message that names the draft model, and ModelUnsupported if the model's
    sequences cannot be cut back.
    """
    assert config.active_draft is not None
    draft_config = replace(
        config,
        model=config.active_draft,
        draft=None,
        adapter=None,
        adapters=None,
        kv_memory=None,
        kv_store=None,
        keep_first=None,
        keep_last=None,
        speculate=False,
    )
    with name_draft_in_errors(config):
        draft_model = InProcessModel(draft_config, lambda call: None, has_waiters)
    if not draft_model.can_cut_back:
        draft_model.release()
        raise ModelUnsupported(
            f"the draft model {config.draft} has recurrent layers, or runs on mlx-lm's own caches, and cannot "
            "take back a wrong token: choose one whose layers keep keys and values (--draft)"
        )
    return draft_model


@contextmanager
def name_draft_in_errors(config: EngineConfig) -> Iterator[None]:
    """Context that puts the draft model's name before the message of a CortexError raised within it."""
    try:
        yield
    except CortexError as error:
        error.args = (f"the draft model {config.draft}: {error}", *error.args[1:])
        raise


class DraftModel:
    """Drafts the next tokens of rows with a smaller model, which has its own arena. It is a `SlowDrafter`.

    Nothing that happens here changes an answer or ends it: if memory is refused, the model pauses.
    """

    name = "model"
    max_tokens = MAX_ROUND_TOKENS

    def __init__(
        self,
        engine_model: EngineModel,
        max_rows: int,
        prefill_budget: int,
        vocabulary: int,
        share_prefixes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`vocabulary` is the size of the target model's vocabulary. With `share_prefixes`, rows reuse cached prefixes.
        `clock` returns seconds. Raises MemoryRefused.
        """
        self.engine_model = engine_model
        self.runner = engine_model.runner
        self.refusals = 0
        """How often the system has refused it memory, or asked it for all of it."""
        self.has_failed = False
        self._bounds = max_rows, prefill_budget
        self._share_prefixes = share_prefixes
        self._clock = clock
        self._vocabulary = vocabulary
        self._in_flight: deque[StepPlan] = deque()
        self._paused_until, self._pause = -math.inf, 0.0
        self._times = GuessTimes()
        self.rows = self._make_draft_scheduler(from_scratch=False)

    def _make_draft_scheduler(self, from_scratch: bool) -> DraftScheduler:
        """Return a draft scheduler without rows, with a new cache."""
        max_rows, budget = self._bounds
        cache = self.engine_model.make_cache(self.engine_model.blocks, from_scratch)
        context, vocabulary = self.engine_model.loaded.context_length, self.engine_model.info.vocab_size
        return DraftScheduler(cache, max_rows, budget, context, vocabulary, self._share_prefixes)

    # -- what `Speculation` calls -------------------------------------------------------------------------------------

    @property
    def needs_drained_pipeline(self) -> bool:
        """Whether `propose` needs all steps collected, for each row's newest token. False if paused or failed."""
        return not self.has_failed and self._clock() >= self._paused_until

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[TokenDraft | None]:
        """Return a draft of up to `budget` tokens, or None, per job. No step of either model may be in flight."""
        if not self.needs_drained_pipeline:
            return [None] * len(jobs)
        try:
            self._draft_tokens(jobs, budget)
            return [self.rows.get_draft(job, budget, self._vocabulary) for job in jobs]
        except Exception:  # an answer needs no guesses
            log.exception("the draft model failed, and guesses nothing from now on")
            self._fail()
            return [None] * len(jobs)

    def estimate_seconds(self, rows: int, tokens: int) -> float | None:
        """Return about how long it takes to draft `tokens` tokens for each of `rows` rows; None if not known yet."""
        return self._times.estimate(rows, tokens)

    def end(self, job: Job) -> None:
        """Drop the row of a job that has ended."""
        self.rows.end_job(job.id)

    def forget(self) -> None:
        """Drop all rows and the steps in flight."""
        self._in_flight.clear()
        self.runner.forget()
        self.rows.forget()

    # -- what the engine's core calls ---------------------------------------------------------------------------------

    @property
    def kv_bytes(self) -> int:
        """Bytes of the draft model's KV arena now."""
        return self.runner.bytes.arena

    def reset(self) -> None:
        """Start anew with no rows and an empty arena, because the old ones are not trusted."""
        self._in_flight.clear()
        self.runner.forget()
        self.rows = self._make_draft_scheduler(from_scratch=True)

    def relieve(self, critical: bool) -> None:
        """Evict half of the unused cached blocks; if `critical`, release the arena, so that rows are computed again."""
        pools = self.rows.cache.pools
        if critical:
            self._release_arena()
        else:
            pools.drop_cached((pools.unused_entries + 1) // 2)
        self.runner.trim()

    def pause(self) -> None:
        """Release the arena and draft nothing for a while, because memory is short."""
        now = self._clock()
        long_ago = now - self._paused_until >= self._pause
        self._pause = PAUSE if long_ago else min(2 * self._pause, MAX_PAUSE)
        self.refusals += 1
        self._paused_until = now + self._pause
        self._release_arena()
        self.runner.trim()

    def tidy(self) -> None:
        """Free the tail and the last step's memory, because no step follows soon."""
        self.rows.drop_tail()
        self.runner.settle(NO_STATE_OPS)

    def release(self) -> None:
        """Free all memory. Safe to call again."""
        self._in_flight.clear()
        self.engine_model.release()
        vars(self).pop("runner", None)

    # -- a round ------------------------------------------------------------------------------------------------------

    def _draft_tokens(self, jobs: Sequence[Job], count: int) -> None:
        """Draft the next tokens of the jobs, step by step. At most one step runs ahead. If memory is refused, pause."""
        self.rows.cache.pools.reset_limits()
        start_time = time.perf_counter()
        plan = self.rows.begin_round(jobs, count)
        if plan is None:
            return
        first_plan, collect_time = plan, None
        if not self._dispatch(plan):
            return
        if self.runner.computes_at_dispatch:  # it is done: what comes now is the time of the other steps
            if not self._collect():
                return
            collect_time = time.perf_counter()
        while (plan := self.rows.plan_decode()) is not None or self._in_flight:
            if plan is not None and not self._dispatch(plan):
                return
            if plan is None or len(self._in_flight) > 1:
                if not self._collect():
                    return
                collect_time = collect_time or time.perf_counter()
        self._record_times(first_plan, collect_time or start_time, start_time, count)

    def _dispatch(self, plan: StepPlan) -> bool:
        """Start a step. If memory is refused, pause and return False."""
        refusal = self.runner.dispatch(plan)
        if refusal is not None:
            self._pause_after_refusal(refusal)
            return False
        self._in_flight.append(plan)
        return True

    def _collect(self) -> bool:
        """Take the tokens of the oldest step in flight. If memory is refused, pause and return False."""
        plan, result = self._in_flight.popleft(), self.runner.collect()
        if isinstance(result, Refusal):
            self._pause_after_refusal(result)
            return False
        self.rows.append_guesses(plan, result.tokens)
        return True

    def _pause_after_refusal(self, refusal: Refusal) -> None:
        """Log that memory was refused, and pause."""
        log.warning("memory was refused to the draft model, which pauses: %s", refusal.why)
        self.pause()

    def _fail(self) -> None:
        """After an exception, draft no more: empty the rows, which may be half changed, and release the arena."""
        self.has_failed = True
        self.reset()
        self._release_arena()

    def _release_arena(self) -> None:
        """Drop all rows and release the arena."""
        self.forget()
        self.runner.release()
        self.rows.cache.pools.shrink_to_minimum()

    def _record_times(self, plan: StepPlan, first_collect_time: float, start_time: float, count: int) -> None:
        """Record how long the steps of a round took. The first one began at `start_time` and was collected at
        `first_collect_time`; it does not count if it computed prompts.
        """
        rows, end = sum(bool(segment.logits) for segment in plan.segments), time.perf_counter()
        if not rows:
            return
        if all(segment.count <= MAX_ROUND_TOKENS for segment in plan.segments):
            self._times.first.add(rows, first_collect_time - start_time)
        if count > 1:
            self._times.further.add(rows, (end - first_collect_time) / (count - 1))
