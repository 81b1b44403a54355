"""Predicts the memory of a run's largest steps: the scheduler plans them, and a traced graph is replayed.

A long run has a few largest steps: the last piece of a long prompt beside rows that decode, or that verify drafts; a
larger piece while no row decodes; all rows that verify drafts; and a decode step of rows of that length. The tokens of
all rows are chosen by a mask and with biases, as any request may ask. Beyond some length the steps grow in proportion
to the rows' tokens. So very long rows are extrapolated from two shorter lengths.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from cortexmlx.attention.paged import Attend
from cortexmlx.execution.boundary import TokenMask
from cortexmlx.execution.graph_memory import peak_bytes, trace_graph
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.kv.arena import KVArena, Slab
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.sizing import ArenaDemand
from cortexmlx.kv.spec import TAIL_COLUMNS, GroupCounts, LayerGroup, paged_groups
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.latency import LONE_SCORES, MIN_PIECE
from cortexmlx.scheduling.plan import StepKind, StepPlan
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.speculation.speculation import MAX_STEP_DRAFTS
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams

_TRACED_LENGTHS = (4096, 8192)
"""Tokens of the rows whose steps are traced. Longer rows are extrapolated from these."""


@dataclass(frozen=True)
class StepBytes:
    """Peak bytes of the largest steps, not counting weights, arena, tail and states."""

    prefill: int
    """A step with a piece of a prompt."""

    verify: int
    """A step in which rows verify drafts, all of them or beside a piece of a prompt; 0 if nothing is drafted."""

    decode: int
    """A step of a decode window, with its new tail and new states."""


def predict_step_bytes(
    model: nn.Module,
    groups: tuple[LayerGroup, ...],
    attend: Attend,
    vocab_size: int,
    load: ArenaDemand,
    tokens: int,
    step_drafts: int = MAX_STEP_DRAFTS,
) -> StepBytes:
    """Return the peak bytes of the largest steps, without running them, for `load.rows` rows of `tokens` tokens each.
    In the largest step with drafts, rows verify `step_drafts` drafted tokens.

    `groups` are the layer groups that the probe found. Nothing is computed, and the model stays as it was.
    """
    groups = paged_groups(groups)

    def trace_steps(tokens: int) -> StepBytes:
        def trace_peak_bytes(plan: StepPlan) -> int:
            runner = _OutlineRunner(model, groups, plan.blocks, load.block_size, vocab_size, attend)
            return runner.predict_peak_bytes(plan)

        prefill, decode = plan_largest_steps(groups, load, tokens)
        verify_plans = plan_largest_steps(groups, load, tokens, step_drafts) if step_drafts else ()
        decode = replace(decode, column=decode.columns - 1)
        verify = max(map(trace_peak_bytes, verify_plans), default=0)
        return StepBytes(trace_peak_bytes(prefill), verify, trace_peak_bytes(decode))

    lone = 0
    if load.lone_prefill_budget > load.prefill_budget:
        plan = plan_lone_step(groups, load, tokens)
        runner = _OutlineRunner(model, groups, plan.blocks, load.block_size, vocab_size, attend)
        lone = runner.predict_peak_bytes(plan)
    if tokens <= _TRACED_LENGTHS[1]:
        step_bytes = trace_steps(tokens)
        return replace(step_bytes, prefill=max(step_bytes.prefill, lone))
    short_bytes, long_bytes = map(trace_steps, _TRACED_LENGTHS)
    extrapolation = (tokens - _TRACED_LENGTHS[1]) / (_TRACED_LENGTHS[1] - _TRACED_LENGTHS[0])
    pairs = zip(astuple(short_bytes), astuple(long_bytes), strict=True)
    prefill, *others = (round(large + extrapolation * (large - small)) for small, large in pairs)
    return StepBytes(max(prefill, lone), *others)


def plan_largest_steps(
    groups: tuple[LayerGroup, ...], load: ArenaDemand, tokens: int, step_drafts: int = 0
) -> tuple[StepPlan, StepPlan]:
    """Plan the two largest steps of a run: the last piece of the last prompt while all other rows decode, and the
    first step of the decode window after it. With `step_drafts`, the decoding rows verify so many drafted tokens in
    both steps.

    Short prompts are computed together. No answer ends before. No two blocks of a row are neighbours, as in an arena
    that has been in use for a while.
    """
    answer_length = load.rows + TAIL_COLUMNS + 1 + (TAIL_COLUMNS if step_drafts else 0)
    prompt_length = max(1, tokens - answer_length)
    tokens = prompt_length + answer_length  # also where `tokens` is too small for such an answer
    cache = _make_scattered_cache(groups, load.rows * (-(-tokens // load.block_size) + 2), load.block_size)
    config = SchedulerConfig(
        max_rows=load.rows, prefill_budget=load.prefill_budget, context_length=tokens + 1, share_prefixes=False
    )
    scheduler = Scheduler(cache, config)
    params = SamplingParams(max_tokens=answer_length, ignore_eos=True, logit_bias={0: 1.0})
    request = QueuedRequest((0,) * prompt_length, params)
    joint_rows = min(load.rows, -(-load.prefill_budget // prompt_length))
    earlier_rows = load.rows - joint_rows
    piece_tokens = min(prompt_length, max(min(MIN_PIECE, load.prefill_budget), load.prefill_budget - earlier_rows))
    for row in range(load.rows):
        scheduler.add(JobId(row), request, frozenset())
        if row < earlier_rows:
            scheduler.backoff.tokens = prompt_length + row
            _plan_and_commit(scheduler)
    if joint_rows == 1 and prompt_length > piece_tokens:
        scheduler.backoff.tokens = prompt_length - piece_tokens + earlier_rows
        _plan_and_commit(scheduler)
    scheduler.backoff.tokens = load.prefill_budget
    _add_drafts(scheduler, step_drafts)
    plan = _plan_and_commit(scheduler)
    scheduler.backoff.tokens = load.rows * prompt_length
    while scheduler.is_prefilling:
        _plan_and_commit(scheduler)
    _add_drafts(scheduler, step_drafts)
    next_plan = _plan_and_commit(scheduler)
    while not step_drafts and next_plan.kind is not StepKind.DECODE:
        next_plan = _plan_and_commit(scheduler)
    return plan, next_plan


def plan_lone_step(groups: tuple[LayerGroup, ...], load: ArenaDemand, tokens: int) -> StepPlan:
    """Plan the largest step in which no row decodes, for a prompt of up to `tokens` tokens."""
    end = max(1, min(tokens, LONE_SCORES // load.lone_prefill_budget))
    config = SchedulerConfig(
        max_rows=1,
        prefill_budget=load.prefill_budget,
        lone_prefill_budget=load.lone_prefill_budget,
        context_length=end + 1,
        share_prefixes=False,
    )
    scheduler = Scheduler(_make_scattered_cache(groups, -(-end // load.block_size) + 2, load.block_size), config)
    scheduler.add(JobId(0), QueuedRequest((0,) * end, SamplingParams(max_tokens=1, logit_bias={0: 1.0})), frozenset())
    if end > load.lone_prefill_budget:
        scheduler.backoff.tokens = end - load.lone_prefill_budget
        _plan_and_commit(scheduler)
        scheduler.backoff.tokens = load.prefill_budget
    scheduler.cost_model.observe(1, 1e-9)  # as fast as can be
    return _plan_and_commit(scheduler)


def _add_drafts(scheduler: Scheduler, count: int) -> None:
    """Draft `count` tokens in total for the decoding rows. All of them will be rejected."""
    jobs = scheduler.draftable_jobs
    for index, job in enumerate(jobs):
        scheduler.set_drafts(job.id, (1,) * (count // len(jobs) + (index < count % len(jobs))))


def _make_scattered_cache(groups: tuple[LayerGroup, ...], blocks: int, block_size: int) -> KVCache:
    """Return a cache with `blocks` free blocks, no two of which are neighbours."""
    cache = KVCache(BlockPools(groups, 2 * blocks, block_size))
    for block in range(2 * blocks):
        cache.allocate_for(-1 - block, block_size)
    for block in range(0, 2 * blocks, 2):
        cache.free(-1 - block)
    return cache


def _plan_and_commit(scheduler: Scheduler) -> StepPlan:
    """Plan the next step and commit its tokens at once."""
    plan = scheduler.plan(0)
    assert plan is not None
    scheduler.commit(plan, [0] * len(plan.logit_rows))
    return plan


class _OutlineRunner(ModelRunner):
    """A runner whose arena of `blocks` blocks takes no memory, so that its steps can be traced."""

    def __init__(
        self,
        model: nn.Module,
        groups: tuple[LayerGroup, ...],
        blocks: GroupCounts,
        block_size: int,
        vocab_size: int,
        attend: Attend,
    ) -> None:
        super().__init__(model, groups, block_size, vocab_size, attend)
        self.memory.arena = self._outline_arena = _OutlineArena(groups, 0, block_size)
        self._outline_arena.set_blocks(blocks)

    def predict_peak_bytes(self, plan: StepPlan) -> int:
        """Return the peak bytes that a step adds to what is in memory when it begins."""
        writes_arena = plan.kind is StepKind.MIXED
        slabs = tree_flatten(self._outline_arena.slabs())
        tail_arrays = tree_flatten({} if writes_arena else self._outline_arena.make_tail(len(plan.segments)))
        weights = tree_flatten(self.model.parameters())
        shapes = self._outline_arena.slabs()
        states = self._outline_states(plan) if len(plan.logit_rows) > len(plan.logit_segments) else []

        def build_step(*inputs: mx.array) -> list[mx.array]:
            arrays = iter(inputs)
            self.model.update(tree_unflatten([(name, next(arrays)) for name, _ in weights]))
            self._outline_arena.set_slabs({layer: tuple(next(arrays) for _ in slab) for layer, slab in shapes.items()})
            self.memory.tail = {
                layer: tuple(next(arrays) for _ in slab) for layer, slab in shapes.items() if not writes_arena
            }
            if states:
                self.states.begin_rows(plan.segments, [next(arrays) for _ in states])
            results = self.build_pass(plan)
            results += self.states.recorded_arrays()
            mask_words = np.full((len(plan.logit_rows), -(-self._vocab_size // 32)), 2**32 - 1, np.uint32)
            sampled_tokens = self.build_choice(TokenMask(np.arange(len(mask_words), dtype=np.int32), mask_words))
            return results + ([] if sampled_tokens is None else sampled_tokens.arrays())

        early_arrays: list[tuple[mx.array, ...]] = []
        self._feed.hand_over = early_arrays.append
        try:
            arguments = [array for _, array in (*weights, *slabs, *tail_arrays)]
            graph = trace_graph(build_step, *arguments, *states, computed_first=early_arrays)
        finally:
            self.model.update(tree_unflatten(weights))
            self._outline_arena.set_slabs(shapes)
            self.reset()
        slab_arguments = graph.arguments[len(weights) : len(weights) + len(slabs)]
        return peak_bytes(graph, [array.name for array in slab_arguments])

    def _outline_states(self, plan: StepPlan) -> list[mx.array]:
        """Return arrays for the recurrent states of a plan's rows, of the shapes that a pass leaves."""
        if not self.states.leaves:
            return []
        self.build_pass(plan)
        arrays = self.states.outline_rows(plan.segments)
        self.reset()
        return arrays


class _OutlineArena(KVArena):
    """An arena that has shapes and takes no memory."""

    def set_blocks(self, blocks: GroupCounts) -> None:
        """Set the number of blocks, without memory for them."""
        self.blocks = blocks
        for layer, slab in self._slabs.items():
            slots = self.slots_per_slab(self.group_of[layer])
            self._slabs[layer] = tuple(mx.zeros((a.shape[0], slots, a.shape[2]), a.dtype) for a in slab)

    def slabs(self) -> dict[int, Slab]:
        """Return all slabs by layer."""
        return dict(self._slabs)

    def set_slabs(self, slabs: dict[int, Slab]) -> None:
        """Replace all slabs, by layer."""
        self._slabs = dict(slabs)

    def make_tail(self, rows: int) -> dict[int, Slab]:
        """Return a tail of `rows` rows."""
        return {
            layer: tuple(mx.zeros((rows, a.shape[0], TAIL_COLUMNS, a.shape[2]), a.dtype) for a in slab)
            for layer, slab in self._slabs.items()
        }
