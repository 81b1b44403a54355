"""StepBuilder: turns the scheduler's decisions into a StepPlan with the arrays that the runner needs. Without mlx."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.snapshots import NO_STATE_OPS, RowSnapshot
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.scheduling.job import Job, JobId, Lane
from cortexmlx.scheduling.plan import (
    SCRATCH_SLOT,
    ArenaWrite,
    Flush,
    Pooling,
    SamplingRow,
    Scoring,
    Segment,
    StepKind,
    StepPlan,
)
from cortexmlx.types.arrays import IntArray

ScheduledTokens = Sequence[tuple[Job, int]]
"""The jobs of a step with how many tokens each gets, single tokens first."""

EMPTY_INDICES = np.zeros(0, np.int32)

ORIGIN_UNIT = 512
"""In a windowed group, a row's tokens are counted from a multiple of this number, at or before the oldest token that is
seen. The kernels cut a row at multiples of a part of this number, so they cut it where they would if it began at 0.
"""


def make_group_steps(cache: KVCache, scheduled: ScheduledTokens, *, written: bool) -> tuple[GroupStep, ...]:
    """Return where every layer group finds the keys and values of a step. `written` says that the step's own tokens
    are written to the arena and read from there.
    """
    return tuple(_make_group_step(cache, group, scheduled, written) for group in range(len(cache.groups)))


def make_arena_writes(cache: KVCache, scheduled: ScheduledTokens) -> tuple[ArenaWrite, ...]:
    """Return the arena slots that the step's own tokens go to, for every layer group."""
    return tuple(_make_arena_write(cache, group, scheduled) for group in range(len(cache.groups)))


def make_flush(cache: KVCache, lanes: Sequence[Lane], columns: int, ends: Mapping[int, int]) -> Flush:
    """Return the flush of a window's columns to the arena: those of lane i go to its slots from its base up to
    `ends[i]`, all others to scratch.
    """
    writes = []
    for group in range(len(cache.groups)):
        slots = np.full((len(lanes), columns), SCRATCH_SLOT, np.int32)
        zeros = [EMPTY_INDICES]
        for i, end in ends.items():
            lane = lanes[i]
            slots[i, : end - lane.base] = cache.tables.slots(lane.job.id, group, lane.base, end - lane.base)
            zeros.append(_unwritten_slots(cache, lane.job, group, lane.base, end))
        writes.append(ArenaWrite(slots.reshape(-1), np.concatenate(zeros)))
    return Flush(columns, tuple(writes))


def _make_group_step(cache: KVCache, group: int, scheduled: ScheduledTokens, written: bool) -> GroupStep:
    """Return where one layer group finds the keys and values of a step."""
    attention_window = cache.groups[group].spec.attention_window
    unit = math.lcm(ORIGIN_UNIT, cache.block_size, (attention_window.tokens or 1) if attention_window.chunked else 1)

    def origin(job: Job) -> int:
        return (
            0
            if attention_window.tokens is None
            else attention_window.oldest_visible(job.num_computed_tokens) // unit * unit
        )

    singles = [job for job, count in scheduled if count == 1]
    origins = [origin(job) for job in singles]
    lengths = np.array([j.num_computed_tokens + written - o for j, o in zip(singles, origins, strict=True)], np.int32)
    width = max((cache.tables.blocks_for(int(n)) for n in lengths), default=0)
    tables = np.full((len(singles), width), cache.pools.null_block(group), np.int32)
    runs = []
    for row, (job, begin, length) in enumerate(zip(singles, origins, lengths.tolist(), strict=True)):
        tables[row, : cache.tables.blocks_for(length)] = cache.tables.table_row(job.id, group, begin + length, begin)
        runs.append(cache.tables.find_run(job.id, group, begin + length, begin))
    pieces = []
    flat = len(singles)
    for job, count in scheduled:
        if count > 1:
            begin, end = origin(job), job.num_computed_tokens + count
            run = cache.tables.find_run(job.id, group, end, begin)
            slots = None if run is not None else cache.tables.slots(job.id, group, begin, end - begin)
            pieces.append(PrefillPiece(flat, flat + count, job.num_computed_tokens - begin, run, slots))
            flat += count
    return GroupStep(tables, lengths, tuple(runs), tuple(pieces), attention_window)


def _make_arena_write(cache: KVCache, group: int, scheduled: ScheduledTokens) -> ArenaWrite:
    """Return the arena slots that the step's own tokens go to, for one layer group."""
    slots = [cache.tables.slots(job.id, group, job.num_computed_tokens, count) for job, count in scheduled]
    zeros = [
        _unwritten_slots(cache, job, group, job.num_computed_tokens, job.num_computed_tokens + count)
        for job, count in scheduled
    ]
    return ArenaWrite(np.concatenate(slots), np.concatenate(zeros))


def _unwritten_slots(cache: KVCache, job: Job, group: int, begin: int, end: int) -> IntArray:
    """Return the slots after `end` of a block that is first written by `begin .. end`. They get zeros, since whole
    blocks are read.
    """
    rest = -end % cache.block_size
    opened = begin <= end - end % cache.block_size
    return cache.tables.slots(job.id, group, end, rest) if rest and opened else EMPTY_INDICES


class StepBuilder:
    """Builds the `StepPlan`s of a scheduler, and numbers them; `count` were built.

    It remembers where each row's token will be in the result of the newest MIXED step, because the step after it is
    built before that result is read.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.count = 0
        self._result_of: dict[tuple[JobId, int], int] = {}

    def build_mixed(
        self,
        scheduled: ScheduledTokens,
        flush: Flush | None,
        cuts: tuple[RowSnapshot, ...] = (),
    ) -> StepPlan:
        """Build a step that computes the scheduled tokens and writes them to the arena. `cuts` are the states to
        keep.
        """
        segments, tokens, positions, token_index, sampling = [], [], [], [], []
        for job, count in scheduled:
            first = job.num_computed_tokens
            end = first + count
            known = len(job.tokens)
            logits = range(0) if job.is_pooling else range(known - 1, end)
            text = job.tokens if end <= known else [*job.tokens, *job.drafts]
            scored = job.positions_to_score(first, end)
            pooled = job.positions_to_pool(first, end)
            segments.append(Segment(job.id, job.generation, first, count, logits, scored=scored, pooled=pooled))
            tokens.append(np.array(text[first:end], np.int32))
            positions.append(np.arange(first, end, dtype=np.int32))
            for place in range(len(logits)):
                token_index.append(job.num_planned_outputs + place)
                sampling.append(_make_sampling_row(job, place))
        plan = self._make_plan(
            StepKind.MIXED,
            segments,
            tokens=np.concatenate(tokens),
            positions=np.concatenate(positions),
            token_index=np.array(token_index, np.int32),
            sampling=tuple(sampling),
            groups=make_group_steps(self.cache, scheduled, written=True),
            writes=make_arena_writes(self.cache, scheduled),
            flush=flush,
            cuts=cuts,
            scoring=make_scoring(scheduled, segments),
            pooling=make_pooling(scheduled, segments),
            adapters=_adapter_numbers([job.adapter for job, _ in scheduled]),
        )
        self._result_of, end = {}, 0
        for segment in plan.logit_segments:
            end += len(segment.logits)
            self._result_of[segment.job, segment.generation] = end - 1
        return plan

    def build_decode(
        self,
        lanes: Sequence[Lane],
        column: int,
        columns: int,
        todo: Mapping[int, Job],
        committed: bool,
        flush: Flush | None,
    ) -> StepPlan:
        """Build the decode step of a window's `column`, of `columns`: one token for every lane. Lanes that are not in
        `todo` are computed and ignored. Unless everything is `committed`, the step's input is the result of the
        step before.
        """
        tokens, positions, token_index = np.zeros((3, len(lanes)), np.int32)
        segments = []
        for i, lane in enumerate(lanes):
            job, at = todo.get(i), 0
            if job is not None:
                at = job.num_computed_tokens
                positions[i], token_index[i] = at, job.num_planned_outputs
                tokens[i] = job.tokens[at] if committed else 0
            segments.append(Segment(lane.job.id, lane.generation, at, 1, range(at, at + 1), live=job is not None))
        opens = column == 0
        return self._make_plan(
            StepKind.DECODE,
            segments,
            tokens=tokens if committed else None,
            source=self._lane_sources(lanes) if opens and not committed else None,
            positions=positions,
            token_index=token_index,
            sampling=tuple(_make_sampling_row(lane.job) for lane in lanes) if opens else None,
            groups=make_group_steps(self.cache, [(lane.job, 1) for lane in lanes], written=False) if opens else None,
            column=column,
            columns=columns,
            flush=flush,
            adapters=_adapter_numbers([lane.job.adapter if i in todo else 0 for i, lane in enumerate(lanes)]),
        )

    def _lane_sources(self, lanes: Sequence[Lane]) -> IntArray | None:
        """Return where each lane's token is in the result of the MIXED step in flight. None if the lanes are its rows,
        in order. No other step is in flight when a window opens.
        """
        source = np.array([self._result_of.get((lane.job.id, lane.generation), 0) for lane in lanes], np.int32)
        in_place = len(source) == len(self._result_of) and bool((source == np.arange(len(source))).all())
        return None if in_place else source

    def build_flush(self, flush: Flush | None) -> StepPlan:
        """Build a step that computes no token, and only carries out memory operations, such as `flush`; None: no tail
        is written.
        """
        return self._make_plan(StepKind.FLUSH, [], flush=flush)

    def forget_results(self) -> None:
        """Forget where the tokens of the newest result are, because that result is lost."""
        self._result_of.clear()

    def _make_plan(
        self,
        kind: StepKind,
        segments: Sequence[Segment],
        *,
        tokens: IntArray | None = EMPTY_INDICES,
        source: IntArray | None = None,
        positions: IntArray = EMPTY_INDICES,
        token_index: IntArray = EMPTY_INDICES,
        sampling: tuple[SamplingRow, ...] | None = None,
        groups: tuple[GroupStep, ...] | None = None,
        writes: tuple[ArenaWrite, ...] = (),
        column: int = 0,
        columns: int = 0,
        flush: Flush | None = None,
        cuts: tuple[RowSnapshot, ...] = (),
        scoring: Scoring | None = None,
        pooling: Pooling | None = None,
        adapters: tuple[int, ...] | None = None,
    ) -> StepPlan:
        """Return the next numbered plan, with the arena's size and the planned operations on states."""
        self.count += 1
        return StepPlan(
            number=self.count,
            kind=kind,
            segments=tuple(segments),
            tokens=tokens,
            source=source,
            positions=positions,
            logit_rows=find_logit_rows(segments),
            logit_segments=tuple([segment for segment in segments if segment.logits]),
            token_index=token_index,
            sampling=sampling,
            groups=groups,
            writes=writes,
            column=column,
            columns=columns,
            blocks=self.cache.pools.blocks,
            flush=flush,
            states=NO_STATE_OPS if self.cache.states.snapshots is None else self.cache.states.take_ops(cuts),
            scoring=scoring,
            pooling=pooling,
            adapters=adapters,
        )


def find_logit_rows(segments: Sequence[Segment]) -> IntArray:
    """Return the flat indices of the tokens that need logits."""
    rows: list[int] = []
    begin = 0
    for segment in segments:
        rows.extend(range(begin + segment.logits.start - segment.first, begin + segment.logits.stop - segment.first))
        begin += segment.count
    return np.array(rows, np.int32)


def _adapter_numbers(numbers: Sequence[int]) -> tuple[int, ...] | None:
    """Return the adapter number of each segment of a step; None if no segment has an adapter. Those of dead lanes are
    not named: they may be gone.
    """
    return tuple(numbers) if any(numbers) else None


def _make_sampling_row(job: Job, drafted: int = 0) -> SamplingRow:
    """Return how to choose the token after the first `drafted` drafts of a job."""
    output = [*job.output, *job.drafts[:drafted]] if drafted else job.output
    return SamplingRow(job.params, job.seed, job.request.prompt, output, job.id if job.processed else None)


def make_scoring(scheduled: ScheduledTokens, segments: Sequence[Segment]) -> Scoring | None:
    """Return which log-probabilities of prompts the `segments` of a step compute; None if there are none."""
    rows, tokens, top, flat = [], [], 0, 0
    for (job, count), segment in zip(scheduled, segments, strict=True):
        where = segment.scored
        if where:
            rows.append(np.arange(where.start, where.stop, dtype=np.int32) - 1 - segment.first + flat)
            tokens.append(np.array(job.request.scored[where.start : where.stop], np.int32))
            top = max(top, job.params.prompt_logprobs or 0)
        flat += count
    return Scoring(np.concatenate(rows), np.concatenate(tokens), top) if rows else None


def make_pooling(scheduled: ScheduledTokens, segments: Sequence[Segment]) -> Pooling | None:
    """Return which states of prompts the `segments` of a step sum up; None if there are none."""
    rows, weights, counts, logits, flat = [], [], [], [], 0
    for (job, count), segment in zip(scheduled, segments, strict=True):
        where, asked = segment.pooled, job.request.pooled
        if where and asked is not None:
            positions = np.arange(where.start, where.stop, dtype=np.int32)
            rows.append(positions - segment.first + flat)
            weights.append((positions + 1 if asked.weighted else np.ones(len(where))).astype(np.float32))
            counts.append(len(where))
            logits.append(asked.logits)
        flat += count
    if not rows:
        return None
    return Pooling(np.concatenate(rows), np.concatenate(weights), np.array(counts, np.int32), tuple(logits))
