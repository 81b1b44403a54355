"""Steps as arrays: what is computed, and where in the result before a step finds its tokens."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.metal.prefill import PrefillVariant
from cortexmlx.metal.shape import PARTITION
from cortexmlx.scheduling.builder import ORIGIN_UNIT, StepBuilder, find_logit_rows
from cortexmlx.scheduling.job import Job, JobId, Lane
from cortexmlx.scheduling.plan import Flush, Segment, StepKind, StepPlan
from support.scheduling.requests import job_of


def prefilled(prompts: list[list[int]], counts: list[int]) -> tuple[StepBuilder, list[Job], StepPlan]:
    """Jobs whose first step computes so many tokens of each."""
    cache = KVCache(BlockPools([LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))], 64, 4))
    jobs = [job_of(i, prompt) for i, prompt in enumerate(prompts)]
    for job in jobs:
        cache.allocate_for(job.id, len(job.tokens) + 4)
    builder = StepBuilder(cache)
    scheduled = sorted(zip(jobs, counts, strict=True), key=lambda s: s[1] > 1)
    plan = builder.build_mixed(scheduled, None)
    for job, count in scheduled:
        cache.append(job.id, count)
        job.num_computed_tokens += count
        job.num_planned_outputs += job.num_computed_tokens == len(job.tokens)
    return builder, jobs, plan


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6))
def test_a_mixed_step_has_the_tokens_of_its_pieces_in_their_order(shape: list[tuple[int, int]]) -> None:
    prompts = [[10 * i + p for p in range(length)] for i, (length, _) in enumerate(shape)]
    _, _, plan = prefilled(prompts, [min(length, count) for length, count in shape])
    assert plan.kind is StepKind.MIXED and plan.tokens is not None and plan.source is None
    assert plan.copies == plan.loads == () and plan.blocks == (64,)
    flat = [(s.job, p) for s in plan.segments for p in range(s.first, s.first + s.count)]
    assert plan.tokens.tolist() == [10 * job + p for job, p in flat]
    assert plan.positions.tolist() == [p for _, p in flat]
    whole = {job for job, (length, count) in enumerate(shape) if count >= length}
    assert {s.job for s in plan.segments if s.logits} == whole, "who has no token left to compute gets one"
    assert [flat[row] for row in plan.logit_rows] == [(s.job, len(prompts[s.job]) - 1) for s in plan.logit_segments]
    assert plan.sampling is not None and [row.prompt for row in plan.sampling] == [
        tuple(prompts[segment.job]) for segment in plan.logit_segments
    ]
    assert plan.token_index.tolist() == [0] * len(whole)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 90)), max_size=8))
def test_logit_rows_are_the_flat_places_of_the_tokens_that_need_logits(shape: list[tuple[int, int, int]]) -> None:
    """Any number of a segment's last tokens may need logits, from none to all."""
    segments, flat = [], []
    for job, (count, wanted, first) in enumerate(shape):
        end = first + count
        segments.append(Segment(JobId(job), 0, first, count, range(max(first, end - wanted), end)))
        flat += [(job, position) for position in range(first, end)]
    rows = find_logit_rows(segments)
    assert [flat[row] for row in rows] == [(s.job, position) for s in segments for position in s.logits]
    assert rows.dtype == np.int32


SOME = st.sets(st.integers(0, 4))


@given(st.permutations(range(5)), SOME, SOME)
def test_a_step_before_the_results_are_read_picks_each_lanes_token_from_them(
    order: list[int], done: set[int], ended: set[int]
) -> None:
    """`done` have computed their prompts in the step before, and those that have not ended are the lanes of a window,
    in any order.
    """
    done.add(order[0])
    ended.discard(order[0])
    prompts = [[7] * (1 + i % 3 if i in done else 9) for i in range(5)]
    builder, jobs, mixed = prefilled(prompts, [min(len(p), 4) for p in prompts])
    lanes = [Lane(jobs[i], jobs[i].generation, jobs[i].num_computed_tokens) for i in order if i in done - ended]
    plan = builder.build_decode(lanes, 0, 16, dict(enumerate(lane.job for lane in lanes)), False, None)
    where = [s.job for s in mixed.logit_segments]
    source = list(range(len(where))) if plan.source is None else plan.source.tolist()  # None: all, as they are
    assert plan.tokens is None and [where[i] for i in source] == [lane.job.id for lane in lanes]
    assert plan.positions.tolist() == [len(lane.job.tokens) for lane in lanes]
    assert plan.token_index.tolist() == [1] * len(lanes)
    assert (plan.number, plan.kind, builder.count) == (2, StepKind.DECODE, 2)
    assert plan.groups is not None and builder.build_decode(lanes, 1, 16, {}, False, None).groups is None


def test_committed_tokens_are_said_and_a_lane_that_is_done_is_computed_in_vain() -> None:
    builder, jobs, _ = prefilled([[1, 2], [3, 4, 5]], [2, 3])
    for job, token in zip(jobs, (8, 9), strict=True):
        job.tokens.append(token)
    lanes = [Lane(job, job.generation, job.num_computed_tokens) for job in jobs]
    plan = builder.build_decode(lanes, 0, 16, {1: jobs[1]}, True, None)
    assert plan.tokens is not None and plan.tokens.tolist() == [0, 9]
    assert [s.live for s in plan.segments] == [False, True] and plan.source is None
    assert all(len(s.logits) == 1 for s in plan.segments), "a dead lane has its row in the result"


def test_a_flush_computes_nothing() -> None:
    builder, _, _ = prefilled([[1, 2]], [2])
    flush = Flush(3, ())
    plan = builder.build_flush(flush)
    assert (plan.kind, plan.flush, plan.segments) == (StepKind.FLUSH, flush, ())
    assert plan.tokens is not None and plan.tokens.size == plan.positions.size == plan.logit_rows.size == 0


def test_a_result_that_is_lost_is_looked_into_by_nobody() -> None:
    builder, jobs, _ = prefilled([[1], [2]], [1, 1])
    lanes = [Lane(job, job.generation, 1) for job in reversed(jobs)]
    builder.forget_results()
    plan = builder.build_decode(lanes, 0, 16, {}, False, None)
    assert plan.source is not None and np.array_equal(plan.source, [0, 0])


def test_rows_of_windows_are_cut_where_the_kernels_cut_whole_rows() -> None:
    """What a kernel adds up in one go must not depend on how much of a row is gone."""
    assert ORIGIN_UNIT % (2 * PARTITION) == 0, "the longest partition"
    for group in (1, 2, 3, 4, 8, 16):
        for dim in (64, 128, 256):
            variant = PrefillVariant("float16", "float16", dim, dim, 32, group)
            assert ORIGIN_UNIT % variant.tile == 0
