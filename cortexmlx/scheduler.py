"""The scheduler: who runs, and what the next step computes. Pure Python and NumPy; it never sees mlx.

Life of a request: waiting -> prefilling -> decoding -> finished; a request that loses its blocks is preempted and
waits again. Requests join and leave between steps.

A step is planned before the one in flight is known, so a job counts what is *planned* (`computed` tokens, `sampled`
tokens) and what is *committed* (its `tokens`). Decode steps run in a *window*: a fixed set of lanes and up to
TAIL_COLUMNS steps, whose new keys and values live in the tail. Everything that writes the arena (prefill, the flush
at a window's end) happens drained: `plan` returns None until the engine has collected and committed what is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cortexmlx.errors import KVCacheFull, PromptTooLong
from cortexmlx.kv.cache import IntArray, KVCache
from cortexmlx.plan import (
    TAIL_COLUMNS,
    ArenaWrite,
    Flush,
    GroupPlan,
    PiecePlace,
    Segment,
    StepKind,
    StepPlan,
)
from cortexmlx.request import FinishReason, RequestState, SamplingParams

_EMPTY = np.zeros(0, np.int32)


@dataclass(eq=False)
class Job:
    """One sequence on its way through the scheduler. `tokens` is the prompt and every committed token."""

    id: int
    prompt_length: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    limit: int
    arrival: int
    state: RequestState = RequestState.WAITING
    generation: int = 0
    computed: int = 0
    sampled: int = 0
    reserved: int = 0
    finish_reason: FinishReason | None = None
    preemptions: int = 0

    @property
    def output(self) -> list[int]:
        """The generated tokens so far."""
        return self.tokens[self.prompt_length :]

    @property
    def generated(self) -> int:
        """How many tokens were generated and committed."""
        return len(self.tokens) - self.prompt_length

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: higher priority, then earlier arrival."""
        return (-self.params.priority, self.arrival)

    @property
    def running(self) -> bool:
        """It has blocks and a row."""
        return self.state in (RequestState.PREFILLING, RequestState.DECODING)

    @property
    def needs_history(self) -> bool:
        """Its sampling looks at the tokens so far."""
        p = self.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


@dataclass(frozen=True)
class Committed:
    """One token that a step brought to a request; `finish_reason` is set if it was the last one."""

    job: Job
    token: int
    place: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class _Lane:
    """A job's place in a decode window: its generation then, and the tokens it had in the arena."""

    job: Job
    generation: int
    base: int

    @property
    def live(self) -> bool:
        return self.job.generation == self.generation and self.job.state is RequestState.DECODING


@dataclass
class _Window:
    """A decode window: its lanes, and the next tail column (0: not opened)."""

    lanes: tuple[_Lane, ...] = ()
    column: int = 0


class Scheduler:
    """Plans steps over the requests it was given, within `max_rows` rows, the cache's blocks and a step's
    `prefill_budget` tokens.

    `null_block` pads block tables; `scratch_slot` takes the writes of unused tail columns.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_rows: int,
        prefill_budget: int,
        context_length: int,
        null_block: int,
        scratch_slot: int,
        pipeline: bool = True,
        headroom: int = 128,
    ) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.prefill_budget = prefill_budget
        self.context_length = context_length
        self.pipeline = pipeline
        self.headroom = headroom
        self.steps = 0
        self.preemptions = 0
        self._null_block = null_block
        self._scratch_slot = scratch_slot
        self._jobs: dict[int, Job] = {}
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._window = _Window()
        self._result_of: dict[tuple[int, int], int] = {}
        self._arrivals = 0

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

    def add(
        self, request: int, prompt: Sequence[int], params: SamplingParams, seed: int, stop_ids: frozenset[int]
    ) -> Job:
        """Queue a request. Raises PromptTooLong if it can never fit."""
        self.check_prompt(len(prompt))
        room = min(self.context_length, self.cache.capacity_tokens + 1) - len(prompt)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self._arrivals += 1
        job = Job(request, len(prompt), list(prompt), params, seed, stop_ids, limit, self._arrivals)
        self._jobs[request] = job
        self._enqueue(job)
        return job

    def finish(self, request: int, reason: FinishReason, state: RequestState = RequestState.FINISHED) -> None:
        """End a request now, whatever it is doing; its blocks and its row are free at once. Unknown requests are
        ignored.
        """
        job = self._jobs.pop(request, None)
        if job is None:
            return
        if job.running:
            self.cache.free(job.id)
            self._running.remove(job)
        else:
            self._waiting.remove(job)
        job.state, job.finish_reason = state, reason
        job.generation += 1

    @property
    def idle(self) -> bool:
        """Nothing is waiting or running."""
        return not self._jobs

    @property
    def rows_running(self) -> int:
        return len(self._running)

    @property
    def rows_waiting(self) -> int:
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
        if self._can_admit() or any(j.state is RequestState.PREFILLING for j in self._running):
            return True
        dead = sum(not lane.live for lane in window.lanes)
        return window.column == TAIL_COLUMNS or bool(
            dead and dead * (TAIL_COLUMNS - window.column) >= len(window.lanes)
        )

    def _can_admit(self) -> bool:
        if not self._waiting or len(self._running) >= self.max_rows:
            return False
        need = self.cache.blocks_for(len(self._waiting[0].tokens)) + len(self._running)
        return need <= self.cache.free_blocks or not self._running

    def _plan_drained(self) -> StepPlan | None:
        """Nothing is in flight: flush the tail, admit who fits, then prefill with everybody's decode, or open a
        decode window.
        """
        flush = self._close_window()
        self._admit()
        if any(j.state is RequestState.PREFILLING for j in self._running):
            return self._plan_mixed(flush)
        return self._plan_decode(flush)

    def _admit(self) -> None:
        while self._can_admit():
            job = self._waiting[0]
            try:
                self.cache.allocate_for(job.id, len(job.tokens), min(self.headroom, max(0, job.limit - job.generated)))
            except KVCacheFull:
                return
            self._waiting.pop(0)
            self._running.append(job)
            job.state = RequestState.PREFILLING
            job.computed, job.sampled, job.reserved = 0, job.generated, len(job.tokens)

    def _plan_mixed(self, flush: Flush | None) -> StepPlan | None:
        """One token for every decoding row and prefill pieces within the budget, all written straight to the arena."""
        for job in sorted(self._running, key=lambda j: j.order):
            if job.state is RequestState.DECODING:
                self._reserve(job, job.computed + 1)
        decoding = [j for j in self._running if j.state is RequestState.DECODING and j.sampled < j.limit]
        budget = max(1, self.prefill_budget - len(decoding))
        pieces: list[tuple[Job, int]] = []
        for job in sorted(self._running, key=lambda j: j.order):
            if job.state is RequestState.PREFILLING and budget:
                count = min(budget, len(job.tokens) - job.computed)
                pieces.append((job, count))
                budget -= count
        if not decoding and not pieces:
            return self._plan_decode(flush)
        work = [(j, 1) for j in decoding] + [p for p in pieces if p[1] == 1] + [p for p in pieces if p[1] > 1]
        segments, tokens, positions = [], [], []
        for job, count in work:
            end = job.computed + count
            segments.append(Segment(job.id, job.generation, job.computed, count, needs_logits=end == len(job.tokens)))
            tokens.append(np.array(job.tokens[job.computed : end], np.int32))
            positions.append(np.arange(job.computed, end, dtype=np.int32))
        plan = StepPlan(
            number=self._next_step(),
            kind=StepKind.DRAINED,
            segments=tuple(segments),
            tokens=np.concatenate(tokens),
            source=None,
            positions=np.concatenate(positions),
            places=np.array([j.sampled for (j, _), s in zip(work, segments, strict=True) if s.needs_logits], np.int32),
            groups=tuple(self._group_plan(g, work, write=True) for g in range(len(self.cache.groups))),
            column=0,
            flush=flush,
        )
        self._planned(plan, work)
        return plan

    def _plan_decode(self, flush: Flush | None) -> StepPlan | None:
        """One token for every lane of the window; opens a window if none is."""
        opening = self._window.column == 0
        if opening:
            self._open_window()
        window = self._window
        todo = {i: lane.job for i, lane in enumerate(window.lanes) if lane.live and lane.job.sampled < lane.job.limit}
        if not todo:
            return None
        committed = all(job.sampled == job.generated for job in todo.values())
        if opening and not committed and any(job.needs_history for job in todo.values()):
            window.lanes = ()
            return None
        tokens, positions, places, source = (np.zeros(len(window.lanes), np.int32) for _ in range(4))
        segments = []
        for i, lane in enumerate(window.lanes):
            if i in todo:
                positions[i], places[i] = lane.job.computed, lane.job.sampled
                tokens[i] = lane.job.tokens[lane.job.computed] if committed else 0
            segments.append(Segment(lane.job.id, lane.generation, int(positions[i]), 1, True, live=i in todo))
            source[i] = self._result_of.get((lane.job.id, lane.generation), 0)
        work = [(lane.job, 1) for lane in window.lanes]
        groups = None
        if opening:
            groups = tuple(self._group_plan(g, work, write=False) for g in range(len(self.cache.groups)))
        in_place = len(source) == len(self._result_of) and bool((source == np.arange(len(source))).all())
        plan = StepPlan(
            number=self._next_step(),
            kind=StepKind.DECODE,
            segments=tuple(segments),
            tokens=tokens if committed else None,
            source=None if committed or in_place else source,
            positions=positions,
            places=places,
            groups=groups,
            column=window.column,
            flush=flush,
        )
        self._planned(plan, [(job, 1) for job in todo.values()])
        window.column += 1
        return plan

    def _planned(self, plan: StepPlan, work: list[tuple[Job, int]]) -> None:
        """Advance the jobs of a step by what it computes, and remember where its results will be."""
        self._result_of = {(s.request, s.generation): i for i, s in enumerate(plan.sampled)}
        for job, count in work:
            job.computed += count
            self.cache.append(job.id, count)
            if job.computed >= len(job.tokens):
                job.state = RequestState.DECODING
                job.sampled += 1

    def _next_step(self) -> int:
        self.steps += 1
        return self.steps

    def _open_window(self) -> None:
        """The decoding rows become the lanes of a new window, each with room for the tokens it may get there."""
        for job in sorted(self._running, key=lambda j: j.order):
            if job.state is RequestState.DECODING:
                self._reserve(job, job.computed + min(TAIL_COLUMNS, job.limit - job.sampled))
        ready = [j for j in self._running if j.state is RequestState.DECODING and j.sampled < j.limit]
        self._window = _Window(tuple(_Lane(job, job.generation, job.computed) for job in ready))

    def _close_window(self) -> Flush | None:
        """Where the tail's columns go. Everything is committed, so a live lane has all its columns."""
        window, self._window = self._window, _Window()
        live = [(i, lane) for i, lane in enumerate(window.lanes) if lane.live]
        if not window.column or not live:
            return None
        writes = []
        for group in range(len(self.cache.groups)):
            slots = np.full((len(window.lanes), window.column), self._scratch_slot, np.int32)
            zeros = []
            for i, lane in live:
                count = lane.job.computed - lane.base
                slots[i, :count] = self.cache.slots(lane.job.id, group, lane.base, count)
                zeros.append(self._opened_rest(lane.job, group, lane.base, lane.job.computed))
            writes.append(ArenaWrite(slots.reshape(-1), np.concatenate(zeros)))
        return Flush(window.column, tuple(writes))

    # -- pieces of a plan ---------------------------------------------------------------------------------------------

    def _group_plan(self, group: int, work: list[tuple[Job, int]], *, write: bool) -> GroupPlan:
        singles = [job for job, count in work if count == 1]
        extra = 1 if write else 0
        lengths = np.array([job.computed + extra for job in singles], np.int32)
        width = max((self.cache.blocks_for(int(n)) for n in lengths), default=0)
        tables = np.full((len(singles), width), self._null_block, np.int32)
        runs = []
        for row, (job, length) in enumerate(zip(singles, lengths.tolist(), strict=True)):
            used = self.cache.blocks_for(length)
            tables[row, :used] = self.cache.block_table(job.id, group)[:used]
            runs.append(self.cache.run(job.id, group, length))
        places = []
        for job, count in work:
            if count > 1:
                end = job.computed + count
                run = self.cache.run(job.id, group, end)
                places.append(PiecePlace(run, None if run is not None else self.cache.slots(job.id, group, 0, end)))
        return GroupPlan(tables, lengths, tuple(runs), tuple(places), self._write(group, work) if write else None)

    def _write(self, group: int, work: list[tuple[Job, int]]) -> ArenaWrite:
        slots = [self.cache.slots(job.id, group, job.computed, count) for job, count in work]
        zeros = [self._opened_rest(job, group, job.computed, job.computed + count) for job, count in work]
        return ArenaWrite(np.concatenate(slots), np.concatenate(zeros))

    def _opened_rest(self, job: Job, group: int, begin: int, end: int) -> IntArray:
        """The slots behind `end` of a block that writing `begin .. end` opens: they are zeroed, since whole blocks
        are read.
        """
        size = self.cache.block_size
        rest = -end % size
        opened = begin <= end - end % size
        return self.cache.slots(job.id, group, end, rest) if rest and opened else _EMPTY

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
                if sum(self.cache.give_back(j.id, j.reserved) for j in self._running):
                    continue
                if len(self._running) == 1:
                    raise
                self._preempt(max(self._running, key=lambda j: j.order))

    def _preempt(self, job: Job) -> None:
        self.cache.free(job.id)
        self._running.remove(job)
        job.state = RequestState.PREEMPTED
        job.generation += 1
        job.preemptions += 1
        job.computed, job.sampled = 0, job.generated
        self.preemptions += 1
        self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        """Into the queue behind everyone who comes first."""
        place = next((i for i, other in enumerate(self._waiting) if job.order < other.order), len(self._waiting))
        self._waiting.insert(place, job)

    # -- results ------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: Sequence[int]) -> list[Committed]:
        """Take a step's tokens. Results of rows that changed their tenant in the meantime are dropped."""
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
