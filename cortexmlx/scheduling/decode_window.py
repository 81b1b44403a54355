"""Decode windows: a fixed set of rows, and a number of steps with one token each. Their keys and values are in the tail
until they are flushed to the arena. Without mlx.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.spec import LONG_TAIL_COLUMNS, TAIL_COLUMNS
from cortexmlx.scheduling.admission import Admission
from cortexmlx.scheduling.builder import StepBuilder, make_flush
from cortexmlx.scheduling.job import Job, Lane, adapter_order
from cortexmlx.scheduling.plan import Flush, StepPlan
from cortexmlx.scheduling.running import RunningSet
from cortexmlx.types.request import RequestState

_COLUMNS_WITHOUT_TAIL = 64
"""Steps of a window if a token takes no memory, so that there is nothing to flush. The window must end all the same:
then ended jobs are stored, and new ones find their blocks.
"""


class DecodeWindow:
    """A fixed set of decoding rows, the `lanes`, and the steps until their next flush. The next step writes `column`
    of the tail's `columns`; `column` is 0 if no window is open. A window of up to
    `long_tail_rows` lanes may have `LONG_TAIL_COLUMNS` columns.

    A job whose newest tokens are in the tail, and are to be cached when it ends (`RunningSet.should_cache_newest`), is
    *awaiting the flush* then. It has lost its row, but keeps its blocks until these tokens are in the arena, so that
    other jobs can begin with them.
    """

    def __init__(self, cache: KVCache, running_set: RunningSet, long_tail_rows: int = 0) -> None:
        self.lanes: tuple[Lane, ...] = ()
        self.column = 0
        self.columns = TAIL_COLUMNS
        self._long_tail_rows = long_tail_rows
        self._cache = cache
        self._running_set = running_set
        self._awaiting_flush: list[Lane] = []

    @property
    def jobs_awaiting_flush(self) -> list[Job]:
        """The jobs that have ended, but keep their blocks until the flush."""
        return [lane.job for lane in self._awaiting_flush]

    @property
    def next_jobs(self) -> dict[int, Job]:
        """The jobs that get a token in the next step, by lane number."""
        todo = {}
        for i, lane in enumerate(self.lanes):
            job = lane.job
            if job.generation == lane.generation and job.can_decode:
                todo[i] = job
        return todo

    @property
    def needs_flush(self) -> bool:
        """Whether no column is left, or a flush costs less than more steps with dead lanes.

        A dead lane is computed in each of the remaining steps, and its tokens are ignored. A flush empties the
        pipeline, which costs about one step of all lanes.
        """
        remaining_columns = self.columns - self.column
        num_dead_lanes = sum([lane.job.generation != lane.generation for lane in self.lanes])
        return not remaining_columns or bool(num_dead_lanes and num_dead_lanes * remaining_columns >= len(self.lanes))

    def plan_step(
        self, builder: StepBuilder, make_room: Callable[[Job, int], None], flush: Flush | None = None
    ) -> tuple[StepPlan, Sequence[Job]] | None:
        """Open a window if none is open. Return its next step and the jobs that get a token; None if no job does."""
        if self.column == 0:
            self.open(make_room)
        jobs_by_lane = self.next_jobs
        if not jobs_by_lane:
            return None
        first = next(iter(jobs_by_lane.values()))  # all rows get their tokens in the same steps
        all_committed = first.num_planned_outputs == first.num_generated
        plan = builder.build_decode(self.lanes, self.column, self.columns, jobs_by_lane, all_committed, flush)
        self.column += 1
        return plan, list(jobs_by_lane.values())

    def open(self, make_room: Callable[[Job, int], None]) -> None:
        """Open a window whose lanes are the decoding rows. `make_room(job, tokens)` makes room for the tokens that a
        job may get in the window, and may preempt other jobs for it.
        """
        self.columns = self._choose_columns([job for job in self._running_set.jobs if job.can_decode])
        for job in self._running_set.jobs_by_start:
            if job.can_decode:
                outputs = min(self.columns, job.num_plannable)
                make_room(job, job.num_computed_tokens + outputs)
        decoding_jobs = sorted([job for job in self._running_set.jobs if job.can_decode], key=adapter_order)
        self.lanes = tuple(Lane(job, job.generation, job.num_computed_tokens) for job in decoding_jobs)

    def _choose_columns(self, jobs: Sequence[Job]) -> int:
        """Return how many tail columns a window of these jobs gets. No job gives up blocks for a long tail."""
        if not self._cache.uses_token_memory:
            return _COLUMNS_WITHOUT_TAIL
        if len(jobs) > self._long_tail_rows:
            return TAIL_COLUMNS
        tokens_to_add = sum(min(LONG_TAIL_COLUMNS, job.num_plannable) + self._cache.pools.block_size for job in jobs)
        all_fit = all(
            job.num_computed_tokens + tokens_to_add <= self._cache.max_tokens_without_preemption(job.id) for job in jobs
        )
        return LONG_TAIL_COLUMNS if all_fit else TAIL_COLUMNS

    def find_lane(self, job: Job) -> Lane | None:
        """Return the live lane of a job; None if it has none."""
        return next((lane for lane in self.lanes if lane.job is job and lane.is_live), None)

    def await_flush(self, lane: Lane) -> None:
        """Keep the blocks of a lane's job, which has finished or was cancelled, until the flush."""
        self._awaiting_flush.append(lane)

    def close(self) -> Flush | None:
        """Close the window. Return the flush of its tail; None if nothing is to be written.

        Everything is committed, so a live lane has all its columns. A lane whose job has ended has those that were
        planned for the job.
        """
        end_by_lane = {}
        for i, lane in enumerate(self.lanes):
            if lane.is_live or lane in self._awaiting_flush:
                end_by_lane[i] = min(lane.job.num_computed_tokens, len(lane.job.tokens))
        flush = make_flush(self._cache, self.lanes, self.column, end_by_lane) if end_by_lane and self.column else None
        for i, end in end_by_lane.items():
            self._running_set.note_stored(self.lanes[i].job, end)
        for job in self.jobs_awaiting_flush:
            self._running_set.release_blocks(job)
        self.forget()
        return flush

    def forget(self) -> None:
        """Drop the window, without a flush of its tail."""
        self.lanes, self.column = (), 0
        self._awaiting_flush.clear()


# The pipeline gate: may the next step run ahead of the one in flight, and if not, why?


RAN_AHEAD = "ahead"
"""The name in `stats()` of steps that ran ahead."""


class DrainReason(Enum):
    """Why a step can be planned only after all steps in flight are committed."""

    PROMPT = "prompt"
    """It computes a piece of a prompt, which is written to the arena."""
    DROP = "drop"
    """A row begins again without some of its tokens."""
    FLUSH = "flush"
    """The decode window is full, or too many of its lanes have ended: its tail goes to the arena."""
    ADMISSION = "admission"
    """A request begins."""
    MEMORY = "memory"
    """Requests wait, and blocks of ended rows are free only after a flush."""
    VERIFY = "verify"
    """It verifies drafted tokens. How far the row gets is known when it is done."""
    CONTRADICTED = "contradicted"
    """The tokens that were awaited have left none of the drafts, so there is nothing to verify."""
    HISTORY = "history"
    """A row's sampling looks at tokens that are in flight."""
    UNPIPELINED = "unpipelined"
    """The model, or the engine's configuration, lets no step run ahead."""

    @property
    def ends_window(self) -> bool:
        """Whether a step with this reason writes the arena, so that the decode window ends before it."""
        return self not in (DrainReason.CONTRADICTED, DrainReason.HISTORY, DrainReason.UNPIPELINED)


class PipelineGate:
    """Decides if a step may run ahead of the one in flight. `steps` counts steps by drain reason (None: no drain)."""

    def __init__(self, running_set: RunningSet, window: DecodeWindow, admission: Admission, pipeline: bool) -> None:
        self.steps: Counter[DrainReason | None] = Counter()
        self._running_set = running_set
        self._window = window
        self._admission = admission
        self._pipeline = pipeline
        self._waiting_for: DrainReason | None = None

    def drain_reason(self, in_flight: int) -> DrainReason | None:
        """Return why nothing may be in flight when the next step is planned; None if it may run ahead. A reason that
        ends the window stays until nothing is in flight, except VERIFY, which the awaited tokens may contradict.
        """
        reason: DrainReason | None = (
            DrainReason.CONTRADICTED if self._waiting_for is DrainReason.VERIFY else self._waiting_for
        )
        if reason is None or not reason.ends_window:
            current_reason = self._find_reason()
            reason = current_reason if in_flight else current_reason or reason
        self._waiting_for = reason if in_flight else None
        return reason

    def reset(self) -> None:
        """Forget the pending reason, because nothing is in flight any more and rows begin again."""
        self._waiting_for = None

    def _find_reason(self) -> DrainReason | None:
        """Return the reason to drain that holds now, if any. MLX writes the arena in place only when nothing else is
        in flight (`KVArena`).
        """
        jobs, window, admission = self._running_set.jobs, self._window, self._admission
        prefills = drops = verifies = False
        for job in jobs:
            prefills = prefills or job.state is RequestState.PREFILLING
            drops = drops or (job.keep is not None and job.must_drop_tokens)
            verifies = verifies or job.drafts_in_flight != () or (job.drafts != () and job.can_decode)
        if prefills:
            return DrainReason.PROMPT
        if drops:
            return DrainReason.DROP
        if window.needs_flush:
            return DrainReason.FLUSH
        if admission.count and admission.can_admit():
            return DrainReason.ADMISSION
        if admission.count and window.jobs_awaiting_flush:
            return DrainReason.MEMORY
        if verifies:
            return DrainReason.VERIFY
        if not self._pipeline:
            return DrainReason.UNPIPELINED
        opens = window.column == 0
        if opens and any(job.needs_history and job.num_planned_outputs > job.num_generated for job in jobs):
            return DrainReason.HISTORY
        return None
