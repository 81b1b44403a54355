"""StepBuilder: turns the scheduler's decisions into a StepPlan with the arrays that the runner needs. Without mlx."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

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
from cortexmlx.types.arrays import IntArray, TokenList
from cortexmlx.types.images import FeaturePiece

ScheduledTokens = Sequence[tuple[Job, int]]
"""The jobs of a step with how many tokens each gets, single tokens first."""

EMPTY_INDICES = np.zeros(0, np.int32)

ORIGIN_UNIT = 512
"""In a windowed group, a row's tokens are counted from a multiple of this number, at or before the oldest token that is
seen. The kernels cut a row at multiples of a part of this number, so they cut it where they would if it began at 0.
"""


def make_group_steps(
    cache: KVCache, scheduled_tokens: ScheduledTokens, *, writes_to_arena: bool
) -> tuple[GroupStep, ...]:
    """Return where every layer group finds the keys and values of a step. `writes_to_arena` says that the step's own
    tokens are written to the arena and read from there.
    """
    return tuple(
        _make_group_step(cache, group, scheduled_tokens, writes_to_arena) for group in range(len(cache.groups))
    )


def make_arena_writes(cache: KVCache, scheduled_tokens: ScheduledTokens) -> tuple[ArenaWrite, ...]:
    """Return the arena slots that the step's own tokens go to, for every layer group."""
    return tuple(_make_arena_write(cache, group, scheduled_tokens) for group in range(len(cache.groups)))


def make_flush(cache: KVCache, lanes: Sequence[Lane], columns: int, end_by_lane: Mapping[int, int]) -> Flush:
    """Return the flush of a window's columns to the arena. The columns of lane i go to the slots of its tokens
    `base .. end_by_lane[i]`. All other columns go to the scratch slot.
    """
    writes = []
    for group in range(len(cache.groups)):
        slots = np.full((len(lanes), columns), SCRATCH_SLOT, np.int32)
        zeros = [EMPTY_INDICES]
        for i, end in end_by_lane.items():
            lane = lanes[i]
            slots[i, : end - lane.base] = cache.tables.slots(lane.job.id, group, lane.base, end - lane.base)
            zeros.append(_slots_to_zero(cache, lane.job, group, lane.base, end))
        writes.append(ArenaWrite(slots.reshape(-1), np.concatenate(zeros)))
    return Flush(columns, tuple(writes))


def _make_group_step(cache: KVCache, group: int, scheduled_tokens: ScheduledTokens, writes_to_arena: bool) -> GroupStep:
    """Return where one layer group finds the keys and values of a step."""
    attention_window = cache.groups[group].spec.attention_window
    unit = math.lcm(ORIGIN_UNIT, cache.block_size, (attention_window.tokens or 1) if attention_window.chunked else 1)

    def first_listed_token(job: Job) -> int:
        """Return the position of the first token whose block is in the job's row of the step's block tables."""
        return (
            0
            if attention_window.tokens is None
            else attention_window.oldest_visible(job.num_computed_tokens) // unit * unit
        )

    single_token_jobs = [job for job, count in scheduled_tokens if count == 1]
    origins = [first_listed_token(job) for job in single_token_jobs]
    lengths = np.array(
        [j.num_computed_tokens + writes_to_arena - o for j, o in zip(single_token_jobs, origins, strict=True)], np.int32
    )
    width = max((cache.tables.blocks_for(int(n)) for n in lengths), default=0)
    tables = np.full((len(single_token_jobs), width), cache.pools.null_block(group), np.int32)
    runs = []
    for row, (job, begin, length) in enumerate(zip(single_token_jobs, origins, lengths.tolist(), strict=True)):
        tables[row, : cache.tables.blocks_for(length)] = cache.tables.table_row(job.id, group, begin + length, begin)
        runs.append(cache.tables.find_run(job.id, group, begin + length, begin))
    prefill_pieces = []
    flat_offset = len(single_token_jobs)
    for job, count in scheduled_tokens:
        if count > 1:
            begin, first, images = first_listed_token(job), job.num_computed_tokens, job.request.images
            parts: Iterable[tuple[int, int, bool]] = [(first, first + count, False)]
            if images is not None:
                parts = images.attention_pieces(first, count, attention_window.tokens is not None)
            for start, end, bidirectional in parts:
                run = cache.tables.find_run(job.id, group, end, begin)
                slots = None if run is not None else cache.tables.slots(job.id, group, begin, end - begin)
                flat = flat_offset + start - first, flat_offset + end - first
                prefill_pieces.append(PrefillPiece(*flat, start - begin, run, slots, bidirectional))
            flat_offset += count
    return GroupStep(tables, lengths, tuple(runs), tuple(prefill_pieces), attention_window)


def _make_arena_write(cache: KVCache, group: int, scheduled_tokens: ScheduledTokens) -> ArenaWrite:
    """Return the arena slots that the step's own tokens go to, for one layer group."""
    slots = [cache.tables.slots(job.id, group, job.num_computed_tokens, count) for job, count in scheduled_tokens]
    zeros = [
        _slots_to_zero(cache, job, group, job.num_computed_tokens, job.num_computed_tokens + count)
        for job, count in scheduled_tokens
    ]
    return ArenaWrite(np.concatenate(slots), np.concatenate(zeros))


def _slots_to_zero(cache: KVCache, job: Job, group: int, begin: int, end: int) -> IntArray:
    """Return the slots to be zeroed after tokens `begin .. end`: the rest of their last block, if they begin it."""
    num_unwritten = -end % cache.block_size
    starts_block = begin <= end - end % cache.block_size
    return cache.tables.slots(job.id, group, end, num_unwritten) if num_unwritten and starts_block else EMPTY_INDICES


class StepBuilder:
    """Builds and numbers the `StepPlan`s of a scheduler. `count` says how many were built.

    It remembers where each row's token will be in the result of the newest MIXED step, because the step after it is
    built before that result is read.
    """

    def __init__(self, cache: KVCache, has_draft_head: bool = False) -> None:
        """`has_draft_head` says whether the model has a draft head. It runs in steps with prompts or drafts, and in
        windows that begin while `is_head_awake`.
        """
        self.cache = cache
        self._has_draft_head = self.is_head_awake = self._window_runs_head = has_draft_head
        self.count = 0
        self._result_of: dict[tuple[JobId, int], int] = {}

    def build_mixed(
        self,
        scheduled_tokens: ScheduledTokens,
        flush: Flush | None,
        snapshots: tuple[RowSnapshot, ...] = (),
    ) -> StepPlan:
        """Build a step that writes tail columns (`flush`) and then the scheduled tokens to the arena."""
        segments, tokens, positions, token_index, sampling_rows = [], [], [], [], []
        features, num_tokens = list[FeaturePiece](), 0
        for job, count in scheduled_tokens:
            first = job.num_computed_tokens
            end = first + count
            num_known_tokens = len(job.tokens)
            logits = range(0) if job.is_pooling else range(num_known_tokens - 1, end)
            text = job.tokens if end <= num_known_tokens else [*job.tokens, *job.drafts]
            scored_range = job.positions_to_score(first, end)
            pooled_range = job.positions_to_pool(first, end)
            segments.append(
                Segment(job.id, job.generation, first, count, logits, scored=scored_range, pooled=pooled_range)
            )
            tokens.append(np.array(text[first:end], np.int32))
            if job.request.images is None:
                positions.append(np.arange(first, end, dtype=np.int32))
            else:
                positions.append(job.request.images.positions_of(first, count))
                features += job.request.images.feature_pieces(first, count, num_tokens)
            num_tokens += count
            for num_drafts in range(len(logits)):
                token_index.append(job.num_planned_outputs + num_drafts)
                sampling_rows.append(_make_sampling_row(job, num_drafts))
        axes = None
        if features:  # elsewhere the three are the same
            axes = np.concatenate([np.broadcast_to(each, (3, each.shape[-1])) for each in positions], axis=1)
        plan = self._make_plan(
            StepKind.MIXED,
            segments,
            tokens=np.concatenate(tokens),
            positions=np.concatenate([each if each.ndim == 1 else each[0] for each in positions]),
            axes=axes,
            features=tuple(features),
            token_index=np.array(token_index, np.int32),
            sampling=tuple(sampling_rows),
            groups=make_group_steps(self.cache, scheduled_tokens, writes_to_arena=True),
            writes=make_arena_writes(self.cache, scheduled_tokens),
            flush=flush,
            snapshots=snapshots,
            scoring=make_scoring(scheduled_tokens, segments),
            pooling=make_pooling(scheduled_tokens, segments),
            adapters=_adapter_numbers([job.adapter for job, _ in scheduled_tokens]),
            runs_head=self._has_draft_head,
            following=_following_tokens(scheduled_tokens) if self._has_draft_head else None,
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
        jobs_by_lane: Mapping[int, Job],
        all_committed: bool,
        flush: Flush | None,
    ) -> StepPlan:
        """Build a window's decode step, which writes `column` of its `columns`: one token for every lane. Lanes that
        are not in `jobs_by_lane` are computed and ignored. Unless `all_committed`, the step's input is the
        result of the step before.
        """
        tokens, positions, token_index = np.zeros((3, len(lanes)), np.int32)
        segments = []
        for i, lane in enumerate(lanes):
            job, position = jobs_by_lane.get(i), 0
            if job is not None:
                position, images = job.num_computed_tokens, job.request.images
                positions[i] = position if images is None else images.positions_of(position, 1)[0, 0]
                token_index[i] = job.num_planned_outputs
                tokens[i] = job.tokens[position] if all_committed else 0
            segments.append(
                Segment(lane.job.id, lane.generation, position, 1, range(position, position + 1), live=job is not None)
            )
        opens_window = column == 0
        if opens_window:  # the head's tail begins with the window's
            self._window_runs_head = self._has_draft_head and self.is_head_awake
        return self._make_plan(
            StepKind.DECODE,
            segments,
            tokens=tokens if all_committed else None,
            source=self._lane_sources(lanes) if opens_window and not all_committed else None,
            positions=positions,
            token_index=token_index,
            sampling=tuple(_make_sampling_row(lane.job) for lane in lanes) if opens_window else None,
            groups=make_group_steps(self.cache, [(lane.job, 1) for lane in lanes], writes_to_arena=False)
            if opens_window
            else None,
            column=column,
            columns=columns,
            flush=flush,
            adapters=_adapter_numbers([lane.job.adapter if i in jobs_by_lane else 0 for i, lane in enumerate(lanes)]),
            runs_head=self._window_runs_head,
        )

    def _lane_sources(self, lanes: Sequence[Lane]) -> IntArray | None:
        """Return where each lane's token is in the result of the MIXED step in flight. None if the lanes are its rows,
        in order. No other step is in flight when a window opens.
        """
        source = np.array([self._result_of.get((lane.job.id, lane.generation), 0) for lane in lanes], np.int32)
        in_place = len(source) == len(self._result_of) and bool((source == np.arange(len(source))).all())
        return None if in_place else source

    def build_flush(self, flush: Flush | None) -> StepPlan:
        """Build a step without tokens that does only memory operations, among them `flush` unless it is None."""
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
        snapshots: tuple[RowSnapshot, ...] = (),
        scoring: Scoring | None = None,
        pooling: Pooling | None = None,
        adapters: tuple[int, ...] | None = None,
        runs_head: bool = False,
        following: IntArray | None = None,
        axes: IntArray | None = None,
        features: tuple[FeaturePiece, ...] = (),
    ) -> StepPlan:
        """Return a plan with the next number, the arena's size and the planned operations on recurrent states."""
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
            states=NO_STATE_OPS if self.cache.states.snapshots is None else self.cache.states.take_ops(snapshots),
            scoring=scoring,
            pooling=pooling,
            adapters=adapters,
            runs_head=runs_head,
            following=following,
            axes=axes,
            features=features,
        )


def _following_tokens(scheduled_tokens: ScheduledTokens) -> IntArray:
    """Return the token after each job's scheduled tokens; 0 where it is not known yet."""
    ends = [(job.tokens, job.num_computed_tokens + count) for job, count in scheduled_tokens]
    return np.array([tokens[end] if end < len(tokens) else 0 for tokens, end in ends], np.int32)


def find_logit_rows(segments: Sequence[Segment]) -> IntArray:
    """Return the flat indices of the tokens that need logits."""
    rows: list[int] = []
    flat_offset = 0
    for segment in segments:
        rows.extend(
            range(flat_offset + segment.logits.start - segment.first, flat_offset + segment.logits.stop - segment.first)
        )
        flat_offset += segment.count
    return np.array(rows, np.int32)


def _adapter_numbers(numbers: Sequence[int]) -> tuple[int, ...] | None:
    """Return the segments' adapter numbers, or None if no segment has an adapter. The base model's number is 0."""
    return tuple(numbers) if any(numbers) else None


def _make_sampling_row(job: Job, num_drafts: int = 0) -> SamplingRow:
    """Return how to sample the token after the first `num_drafts` drafts of a job."""
    output = [*job.output, *job.drafts[:num_drafts]] if num_drafts else job.output
    prompt: TokenList = job.request.prompt
    if job.request.images is not None:
        prompt = job.request.images.replace_virtual_tokens(prompt)
    return SamplingRow(job.params, job.seed, prompt, output, job.id if job.has_logits_processors else None)


def make_scoring(scheduled_tokens: ScheduledTokens, segments: Sequence[Segment]) -> Scoring | None:
    """Return the prompt tokens whose log-probabilities a step's `segments` compute; None if there are none."""
    rows, tokens, top, flat_offset = [], [], 0, 0
    for (job, count), segment in zip(scheduled_tokens, segments, strict=True):
        scored_range = segment.scored
        if scored_range:
            rows.append(
                np.arange(scored_range.start, scored_range.stop, dtype=np.int32) - 1 - segment.first + flat_offset
            )
            tokens.append(np.array(job.request.scored_tokens[scored_range.start : scored_range.stop], np.int32))
            top = max(top, job.params.prompt_logprobs or 0)
        flat_offset += count
    return Scoring(np.concatenate(rows), np.concatenate(tokens), top) if rows else None


def make_pooling(scheduled_tokens: ScheduledTokens, segments: Sequence[Segment]) -> Pooling | None:
    """Return the prompt tokens whose hidden states a step's `segments` sum up; None if there are none."""
    rows, weights, counts, logits, flat_offset = [], [], [], [], 0
    for (job, count), segment in zip(scheduled_tokens, segments, strict=True):
        pooled_range, pooling_spec = segment.pooled, job.request.pooling
        if pooled_range and pooling_spec is not None:
            positions = np.arange(pooled_range.start, pooled_range.stop, dtype=np.int32)
            rows.append(positions - segment.first + flat_offset)
            weights.append(
                (positions + 1 if pooling_spec.position_weighted else np.ones(len(pooled_range))).astype(np.float32)
            )
            counts.append(len(pooled_range))
            logits.append(pooling_spec.logits)
        flat_offset += count
    if not rows:
        return None
    return Pooling(np.concatenate(rows), np.concatenate(weights), np.array(counts, np.int32), tuple(logits))
