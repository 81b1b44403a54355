"""DraftModel: a second, smaller model that guesses the next tokens of an engine's rows, on the engine's thread."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.in_process_model import InProcessModel
from cortexmlx.core.served_model import ServedModel
from cortexmlx.errors import CortexError, ModelUnsupported
from cortexmlx.execution.boundary import Refused
from cortexmlx.kv.snapshots import NOTHING
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.speculation.draft_rows import MOST_AT_ONCE, DraftRows
from cortexmlx.speculation.drafter import Draft

log = logging.getLogger("cortexmlx")

PAUSE = 10.0
"""For how many seconds nothing is guessed after the system has refused memory; twice as long after a refusal that comes
sooner after a pause than the pause was long.
"""

MOST_PAUSE = 256 * PAUSE
"""The longest pause."""

_FORGETTING = 0.2
"""Weight of the newest round in the running means of its times."""


def open_draft(config: EngineConfig, waiting: Callable[[], bool] = lambda: False) -> InProcessModel:
    """Open the draft model of an engine with this configuration. Its keys and values are not kept on disk.
    `waiting`: see `InProcessModel`.

    Raises what `InProcessModel` raises, with a message that names the draft model, and ModelUnsupported if the model's
    sequences cannot be cut back.
    """
    assert config.used_draft is not None
    own = replace(
        config,
        model=config.used_draft,
        draft=None,
        adapter=None,
        adapters=None,
        kv_memory=None,
        kv_store=None,
        keep_first=None,
        keep_last=None,
    )
    try:
        opened = InProcessModel(own, lambda call: None, waiting)
    except CortexError as error:
        error.args = (f"the draft model {config.draft}: {error}", *error.args[1:])
        raise
    if not opened.can_cut_back:
        opened.release()
        raise ModelUnsupported(
            f"the draft model {config.draft} has recurrent layers, or runs on mlx-lm's own caches, and cannot "
            "take back a wrong token: choose one whose layers keep keys and values (--draft)"
        )
    return opened


class DraftModel:
    """Guesses the likeliest next tokens of rows with a model of its own, which has its own arena. See `Drafter`.

    Nothing that happens here changes an answer or ends it: if memory is refused, the model pauses.
    """

    name = "model"

    def __init__(
        self,
        opened: ServedModel,
        max_rows: int,
        prefill_budget: int,
        vocabulary: int,
        share_prefixes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`vocabulary` is how many tokens the other model knows. With `share_prefixes`, rows begin with what others
        have computed. `clock` returns seconds. Raises MemoryRefused.
        """
        self.opened = opened
        self.runner = opened.runner
        self.refusals = 0
        """How often the system has refused it memory, or asked it for all of it."""
        self.failed = False
        self._bounds = max_rows, prefill_budget
        self._share_prefixes = share_prefixes
        self._clock = clock
        self._vocabulary = vocabulary
        self._in_flight: deque[StepPlan] = deque()
        self._paused_until, self._pause = -math.inf, 0.0
        self._first: dict[int, float] = {}
        self._further: dict[int, float] = {}
        self.rows = self._make_rows(anew=False)

    def _make_rows(self, anew: bool) -> DraftRows:
        max_rows, budget = self._bounds
        cache = self.opened.begin_cache(self.opened.blocks, anew)
        context, vocabulary = self.opened.loaded.context_length, self.opened.info.vocab_size
        return DraftRows(cache, max_rows, budget, context, vocabulary, self._share_prefixes)

    # -- what `Speculation` calls -------------------------------------------------------------------------------------

    @property
    def wants_drained(self) -> bool:
        """Whether `propose` must know the newest token of each row, so that nothing may be in flight before it."""
        return not self.failed and self._clock() >= self._paused_until

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[Draft | None]:
        """See `Drafter`. Nothing may be in flight, in the other model either."""
        if not self.wants_drained:
            return [None] * len(jobs)
        try:
            self._guess(jobs, budget)
            return [self.rows.guess(job, budget, self._vocabulary) for job in jobs]
        except Exception:  # an answer needs no guesses
            log.exception("the draft model failed, and guesses nothing from now on")
            self._fail()
            return [None] * len(jobs)

    def seconds_for(self, rows: int, tokens: int) -> float | None:
        """Return about how long it takes to guess `tokens` tokens for each of `rows` rows whose texts are computed;
        None if that is not known yet.
        """
        further = _nearest(self._further, rows.bit_length())
        first = _nearest(self._first, rows.bit_length()) or further
        return None if first is None else first + (tokens - 1) * (further or first)

    def end(self, job: Job) -> None:
        """See `Drafter`."""
        self.rows.end(job.id)

    def forget(self) -> None:
        """See `Drafter`."""
        self._in_flight.clear()
        self.runner.forget()
        self.rows.forget()

    # -- what the engine's core calls ---------------------------------------------------------------------------------

    @property
    def kv_bytes(self) -> int:
        """Bytes of its arena now."""
        return self.runner.bytes.arena

    def begin_anew(self) -> None:
        """Begin with an empty arena. Whatever was in the old one is not trusted."""
        self._in_flight.clear()
        self.runner.forget()
        self.rows = self._make_rows(anew=True)

    def relieve(self, critical: bool) -> None:
        """Give memory back: half of the unused cached blocks, or, if `critical`, the whole arena, whose texts are then
        computed again.
        """
        pools = self.rows.cache.pools
        if critical:
            self._give_all_back()
        else:
            pools.drop_cached((pools.unused_entries + 1) // 2)
        self.runner.trim()

    def pause(self) -> None:
        """Give the arena back and guess nothing for a while, because memory is short."""
        now = self._clock()
        long_ago = now - self._paused_until >= self._pause
        self._pause = PAUSE if long_ago else min(2 * self._pause, MOST_PAUSE)
        self.refusals += 1
        self._paused_until = now + self._pause
        self._give_all_back()
        self.runner.trim()

    def tidy(self) -> None:
        """Drop the tail and the memory of the last step, because none follows soon."""
        self.rows.leave_tail()
        self.runner.settle(NOTHING)

    def release(self) -> None:
        """Free all memory. Safe to call again."""
        self._in_flight.clear()
        self.opened.release()
        vars(self).pop("runner", None)

    # -- a round ------------------------------------------------------------------------------------------------------

    def _guess(self, jobs: Sequence[Job], count: int) -> None:
        """Guess the next tokens of the jobs. At most one step runs ahead. If memory is refused, pause."""
        self.rows.cache.pools.ask_again()
        began = time.perf_counter()
        plan = self.rows.begin(jobs, count)
        if plan is None:
            return
        new, collected = plan, None
        if not self._step(plan):
            return
        if self.runner.computes_at_dispatch:  # it is done: what comes now is the time of the other steps
            if not self._collect():
                return
            collected = time.perf_counter()
        while (plan := self.rows.decode()) is not None or self._in_flight:
            if plan is not None and not self._step(plan):
                return
            if plan is None or len(self._in_flight) > 1:
                if not self._collect():
                    return
                collected = collected or time.perf_counter()
        self._note(new, collected or began, began, count)

    def _step(self, plan: StepPlan) -> bool:
        refused = self.runner.dispatch(plan)
        if refused is not None:
            self._refused(refused)
            return False
        self._in_flight.append(plan)
        return True

    def _collect(self) -> bool:
        plan, result = self._in_flight.popleft(), self.runner.collect()
        if isinstance(result, Refused):
            self._refused(result)
            return False
        self.rows.take(plan, result.tokens)
        return True

    def _refused(self, refused: Refused) -> None:
        log.warning("memory was refused to the draft model, which pauses: %s", refused.why)
        self.pause()

    def _fail(self) -> None:
        """Guess nothing from now on. The books may be half changed, so empty ones take their place. The arena is given
        back.
        """
        self.failed = True
        self.begin_anew()
        self._give_all_back()

    def _give_all_back(self) -> None:
        self.forget()
        self.runner.release()
        self.rows.cache.pools.give_all_back()

    def _note(self, plan: StepPlan, first: float, began: float, count: int) -> None:
        """Note how long the steps of a round took. It began with a step at `began`, which was collected at `first`, and
        which does not count if it computed prompts.
        """
        rows, end = sum(bool(segment.logits) for segment in plan.segments), time.perf_counter()
        if not rows:
            return
        if all(segment.count <= MOST_AT_ONCE for segment in plan.segments):
            _mean(self._first, rows.bit_length(), first - began)
        if count > 1:
            _mean(self._further, rows.bit_length(), (end - first) / (count - 1))


def _nearest(means: dict[int, float], size: int) -> float | None:
    """Return the mean of the size, or else of the nearest one."""
    return means[min(means, key=lambda known: abs(known - size))] if means else None


def _mean(means: dict[int, float], size: int, seconds: float) -> None:
    known = means.get(size)
    means[size] = seconds if known is None else known + _FORGETTING * (seconds - known)
