"""ModelRunner: runs a StepPlan with mlx. Only the engine's thread may call it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from cortexmlx.attention.mlx_lm_hook import LayerCache, group_by_layer, make_mlx_lm_caches, take_pending_sends
from cortexmlx.attention.paged import Attend, PagedKV, StepDerivedData
from cortexmlx.attention.probe import build_lazy_logits
from cortexmlx.attention.recurrent import is_recurrent_cache
from cortexmlx.attention.tail_write import TailWriter, WrittenTail
from cortexmlx.cpu import swiglu
from cortexmlx.cpu.feed import EarlyEvaluator
from cortexmlx.cpu.rotary import share_angles
from cortexmlx.execution.adapters import ServedAdapters
from cortexmlx.execution.boundary import Arrays, MemoryInUse, Shapes, StepResult, TokenMask, return_refusals
from cortexmlx.execution.command_buffers import command_buffer_limits, count_bound_elements, count_command_buffers
from cortexmlx.execution.head_pass import AssistantDrafts, HeadDrafts, RowKeys, StateDrafts
from cortexmlx.execution.output_projection import OutputProjection
from cortexmlx.execution.paged_memory import ArenaWriteIndex, PagedMemory
from cortexmlx.execution.prompt_scores import KeptStates, find_kept_rows
from cortexmlx.execution.sampling import BatchSampler, MakeSampler, PendingStep, SampledTokens, Sampler, read_result
from cortexmlx.execution.states import StateStore
from cortexmlx.kv.arena import KVArena, Slab
from cortexmlx.kv.snapshots import StateOps
from cortexmlx.kv.spec import TAIL_COLUMNS, GroupCounts, LayerGroup
from cortexmlx.kv.step import BlockCopy, GroupStep
from cortexmlx.matmul.served import QuantizedMatmuls
from cortexmlx.models.assistant import Assistant
from cortexmlx.models.draft_head import DraftHead
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import StepKind, StepPlan, prepare_memory
from cortexmlx.speculation.drafter import HeadQuery
from cortexmlx.stats import CommandBuffers
from cortexmlx.types.sampling_params import LogitsProcessor
from cortexmlx.vision.sight import Sight


class ModelRunner:
    """Runs planned steps of a paged model: writes the arena and the tail, computes the forward pass, and samples.
    `attend` computes attention. A `writer` writes the tail where it can, and `matmuls` computes the quantized
    matmuls that it serves. `make_sampler` replaces `BatchSampler`. `head` is a draft head, whose layer comes after the
    model's own, or an assistant. `sight` computes the embeddings of a step's images. The arena has no blocks before
    `begin`. `Runner` documents the methods.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[LayerGroup],
        block_size: int,
        vocab_size: int,
        attend: Attend,
        writer: TailWriter | None = None,
        matmuls: QuantizedMatmuls | None = None,
        make_sampler: MakeSampler | None = None,
        head: DraftHead | Assistant | None = None,
        sight: Sight | None = None,
    ) -> None:
        self.model = model
        self.computes_at_dispatch = mx.default_device() == mx.cpu
        self.build_seconds = 0.0
        self.wait_seconds = 0.0
        self.processors: MutableMapping[JobId, Sequence[LogitsProcessor]] = {}
        self._vocab_size = vocab_size
        self._attend = attend
        mlx_lm_caches = make_mlx_lm_caches(model)
        self._caches = {
            leaf: LayerCache(leaf, self._update_and_fetch)
            for leaf, c in enumerate(mlx_lm_caches)
            if not is_recurrent_cache(c)
        }
        self._head: StateDrafts | None = None
        if isinstance(head, Assistant):
            self._head = AssistantDrafts(head)
        elif head is not None:
            leaf = len(mlx_lm_caches)
            self._caches[leaf] = LayerCache(leaf, self._update_and_fetch)
            self._head = HeadDrafts(head, leaf, self._caches[leaf])
        self._head_inputs: tuple[mx.array, mx.array, mx.array | None] | None = None
        self._feed = EarlyEvaluator()
        self.states = StateStore(
            {leaf: len(c.cache) for leaf, c in enumerate(mlx_lm_caches) if is_recurrent_cache(c)}, self._feed
        )
        self.memory = PagedMemory(groups, block_size, self.states)
        arena = self.memory.arena
        self._forms = {layer: arena.quantization(layer) for layer in arena.group_of}
        leaf_caches: dict[int, Any] = {**self._caches, **self.states.leaves}
        self._layer_caches = group_by_layer(model, [leaf_caches[leaf] for leaf in range(len(mlx_lm_caches))])
        self._senders = [leaf for leaf in leaf_caches.values() if leaf.sends]
        self._output_projection = OutputProjection(model, build_lazy_logits)
        self._writer = writer
        if writer is not None:
            writer.track_model(model)
        self._angles = share_angles(model)
        self.sight = sight
        if sight is not None:
            sight.install([] if head is None or isinstance(head, Assistant) else head.layers)
        swiglu.install()
        self.matmuls = matmuls
        if matmuls is not None:
            matmuls.install(model)
        self.adapters = ServedAdapters(model, self._output_projection.build_lazy_pass)
        self._tail_tokens = 0
        self._plan: StepPlan | None = None
        self._prepared_plan: StepPlan | None = None
        self._groups: tuple[GroupStep, ...] = ()
        self._derived_data: tuple[StepDerivedData, ...] = ()
        self._writes: list[ArenaWriteIndex] = []
        self._make_sampler = make_sampler
        self._sampler: Sampler | None = None
        self._started = 0.0
        self._logits: mx.array | None = None
        self._kept_states: KeptStates | None = None
        self._in_flight: deque[PendingStep] = deque()
        self._last_sampled: SampledTokens | None = None
        self._command_buffers: tuple[GroupCounts, CommandBuffers] | None = None

    def close(self) -> None:
        """Free the model and all memory. The runner cannot be used afterwards. Safe to call again."""
        if vars(self):
            memory = self.memory
            if self.matmuls is not None:
                self.matmuls.remove()
            self.adapters.close()
            vars(self).clear()
            memory.close()

    def has_hidden_states(self) -> bool:
        """Return whether the model's last hidden states can be had: see `OutputProjection.has_hidden_states`."""
        return self._output_projection.has_hidden_states()

    def set_attention(self, attend: Attend) -> None:
        """Compute attention by another function from now on. Nothing may be in flight."""
        self._attend = attend

    # -- one step -----------------------------------------------------------------------------------------------------

    @return_refusals
    def dispatch(self, plan: StepPlan) -> None:
        """Build and start one step: its forward pass and the choice of its tokens.

        A plan with `flush`, `loads`, `copies` or kind MIXED writes the arena: everything dispatched before must have
        been collected. Raises KVBlockError if it would read or write outside the arena.
        """
        started, feed_wait = time.perf_counter(), self._feed.wait_seconds
        self._start_evaluation(self._begin_pass(plan) + self._begin_choice(None), started, feed_wait)

    @return_refusals
    def prepare(self, plan: StepPlan) -> None:
        """Carry out the memory operations of a step (`prepare_memory`) in advance. The next call must be `dispatch` or
        `forward` with this plan object, which then leaves them out. Nothing may be in flight. It is a call of its own
        so that no rank waits in a collective for one that was refused memory.
        """
        self._prepare_memory(plan)
        self._prepared_plan = plan

    @return_refusals
    def forward(self, plan: StepPlan) -> None:
        """Build and start the forward pass of a step: see `dispatch`."""
        started, feed_wait = time.perf_counter(), self._feed.wait_seconds
        results = self._begin_pass(plan)
        self._start_evaluation(results if self._logits is None else [*results, self._logits], started, feed_wait)

    @return_refusals
    def choose(self, mask: TokenMask | None = None) -> None:
        """Build the graph that samples the step's tokens, allowed by `mask`, and start to compute it."""
        started, feed_wait = time.perf_counter(), self._feed.wait_seconds
        self._start_evaluation(self._begin_choice(mask), started, feed_wait)

    def _start_evaluation(self, results: list[mx.array], started: float, feed_wait: float) -> None:
        """Start to compute `results`. Add the time since `started` to `build_seconds`, but not what the feed waited."""
        built = time.perf_counter()
        mx.async_eval(results)  # type: ignore[no-untyped-call]
        results.clear()  # an app may keep an error of its own, and with it this step's frames: they keep no arena then
        feed_wait = self._feed.wait_seconds - feed_wait
        self.build_seconds += built - started - feed_wait
        self.wait_seconds += time.perf_counter() - built + feed_wait  # handing over blocks while too much is queued

    def _begin_pass(self, plan: StepPlan) -> list[mx.array]:
        """Carry out a step's memory operations, and build its forward pass as a graph. Return the arrays to compute."""
        self._started = time.perf_counter()
        if plan.kind is StepKind.DECODE and plan.groups is None:  # within a window the arena stays as it is
            return self.build_pass(plan)
        if plan is not self._prepared_plan:
            self._prepare_memory(plan)
        self._prepared_plan = None
        if plan.kind is not StepKind.FLUSH:
            return self.build_pass(plan)
        self.states.carry_out(plan.states)
        self._plan, self._logits, self._kept_states, self._head_inputs = plan, None, None, None
        return []

    def _prepare_memory(self, plan: StepPlan) -> None:
        """Carry out the memory operations of a step, after all work in flight if they write the arena."""
        if plan.kind is StepKind.MIXED or plan.flush is not None or plan.copies or plan.loads:
            mx.synchronize()
            if plan.flush is None:
                self.memory.watch.measure_scratch_write(self.arena)
        prepare_memory(plan, self.memory)

    def build_pass(self, plan: StepPlan) -> list[mx.array]:
        """Build a forward pass as a graph, and return the arrays to compute. Nothing is computed yet, except what the
        `EarlyEvaluator` may begin with.
        """
        self._plan, self._head_inputs = plan, None
        if not plan.column:  # what is left is of a window that nobody flushed: a head asleep would leave its share
            self.memory.tail.clear()
        if plan.groups is not None:
            self.memory.check_blocks(plan.groups)
            self._groups = plan.groups
            self._derived_data = tuple(StepDerivedData() for _ in plan.groups)
            arena = self.memory.arena
            self._writes = [ArenaWriteIndex(write, arena, group) for group, write in enumerate(plan.writes)]
        self._tail_tokens = plan.column + 1 if plan.kind is StepKind.DECODE else 0
        positions = mx.array(plan.positions)
        for cache in self._caches.values():
            cache.begin(positions)
        self._angles.begin(positions)
        if self.sight is not None:
            self.sight.begin_step(positions, plan.axes)
        if self._writer is not None:
            if plan.kind is StepKind.DECODE:
                self._writer.begin(positions, plan.positions, plan.columns, plan.column)
            else:
                self._writer.end()
        if self.states.leaves:
            self.states.begin_step(plan)
        logits, kept_states = self._forward(plan)
        self._logits = logits if len(plan.logit_rows) else None
        self._kept_states = (
            None if kept_states is None else KeptStates(kept_states, plan, self._output_projection, self._vocab_size)
        )
        results = self.states.end_step() if self.states.leaves else []
        results += self.arena.arrays() if plan.kind is StepKind.MIXED else []
        results += [] if kept_states is None else [kept_states]
        return results + take_pending_sends(self._senders) if self._senders else results

    def _begin_choice(self, mask: TokenMask | None) -> list[mx.array]:
        """Build the graph that samples tokens. Return the arrays to compute. The step is in flight from now on."""
        sampled_tokens = self.build_choice(mask)
        self._in_flight.append(
            PendingStep(
                sampled_tokens, self._started, None if self._kept_states is None else self._kept_states.compute_results
            )
        )
        self._kept_states = None  # it holds arrays as large as a prompt
        results = [] if sampled_tokens is None else sampled_tokens.arrays()
        if self._head is not None and self._head_inputs is not None:
            assert self._plan is not None
            hidden, tokens, embeddings = self._head_inputs
            chosen = None if not results else results[0]
            results += self._head.run(self._plan, hidden, tokens, chosen, embeddings)
            results += self.arena.arrays() if self._plan.kind is StepKind.MIXED else []
            self._head_inputs = None
        elif self._head is not None and sampled_tokens is not None:  # rows have gone on without it
            self._head.forget()
        return results

    def propose(self, query: HeadQuery) -> list[tuple[int, ...]]:
        """Return the tokens that the draft head or the assistant drafts after each row's newest token. Nothing may be
        in flight. Raises KVBlockError if it would read outside the arena, and what MLX raises without memory.
        """
        plan, keys = self._plan, None
        if self._head is None or plan is None:
            return [()] * len(query.rows)
        if query.groups is not None:
            self.memory.check_blocks(query.groups)
            derived = tuple(StepDerivedData() for _ in query.groups)
            keys = RowKeys(self.memory, self._attend, query.groups, derived, {}, 0, TAIL_COLUMNS)
        elif plan.kind is StepKind.DECODE:
            places = self._groups, self._derived_data, self.memory.tail
            keys = RowKeys(self.memory, self._attend, *places, plan.column + 1, plan.columns)
        return self._head.propose(query.rows, query.tokens, keys)

    def build_choice(self, mask: TokenMask | None = None) -> SampledTokens | None:
        """Build the graph that samples the step's tokens; None if the step has no logits."""
        plan, logits = self._plan, self._logits
        assert plan is not None
        self._last_sampled = self._logits = None
        if logits is None:
            return None
        if plan.sampling is not None:
            make = self._make_sampler or BatchSampler
            self._sampler = make(plan.sampling, self._vocab_size, self.processors)
        assert self._sampler is not None
        live_flags = None  # only functions of callers ask
        if self.processors:
            live_flags = [segment.live for segment in plan.logit_segments for _ in segment.logits]
        self._last_sampled = self._sampler(logits, plan.token_index, live_flags, mask)
        return self._last_sampled

    @return_refusals
    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and bring its results to the host."""
        started, pending = time.perf_counter(), self._in_flight.popleft()
        if pending.sampled_tokens is None:
            mx.eval(self.arena.arrays() + self.states.arrays())
        result = read_result(pending)
        self.wait_seconds += time.perf_counter() - started
        return result

    def reset(self) -> None:
        """Drop the tail and all data of the last step, when there is nothing left to do or a step has failed."""
        self.memory.tail.clear()
        self._last_sampled = self._sampler = self._plan = self._prepared_plan = self._logits = self._kept_states = None
        self._groups = self._derived_data = ()
        self._writes = []
        self._angles.end()
        if self._writer is not None:
            self._writer.end()
        self.states.forget_rows()
        self._head_inputs = None
        if self._head is not None:
            self._head.forget()
        for cache in self._caches.values():
            cache.begin(0)

    def forget(self) -> None:
        """Drop the steps in flight, and everything outside the arena, which a failed step may have left wrong."""
        self._in_flight.clear()
        self.reset()
        self.states.forget()
        self.adapters.forget()
        if self.matmuls is not None:
            self.matmuls.reconsider()

    @return_refusals
    def settle(self, ops: StateOps) -> None:
        """Carry out the operations on recurrent states without a step, and `reset`."""
        self.states.carry_out(ops)
        self.reset()

    # -- the forward pass ---------------------------------------------------------------------------------------------

    def _forward(self, plan: StepPlan) -> tuple[mx.array, mx.array | None]:
        """Build a step's forward pass. Return the needed logits `[n, vocab]` and prompt tokens' kept hidden states."""
        if plan.tokens is not None:
            tokens = mx.array(plan.tokens)
        else:
            assert self._last_sampled is not None
            tokens = self._last_sampled.tokens
            if plan.source is not None:
                tokens = tokens[mx.array(plan.source)]
        matmuls = nullcontext() if self.matmuls is None else self.matmuls.step()
        adapters = nullcontext() if plan.adapters is None else self.adapters.apply_to_step(plan, self.states.step)
        kept_indices = find_kept_rows(plan) if plan.kind is StepKind.MIXED else None
        kept, sees_all = kept_indices, self._head is not None and self._head.sees_all_tokens
        runs_head = self._head is not None and plan.runs_head and (sees_all or len(plan.logit_rows) > 0)
        if runs_head:
            everything = sees_all or kept is not None
            kept = np.arange(len(plan.positions), dtype=np.int32) if everything else plan.logit_rows
        with swiglu.use_powers_of_two(), matmuls, adapters:
            embeddings, ids = None, tokens
            if self.sight is not None and plan.features:  # 0 pads, and has inputs of each layer in Gemma 4
                embeddings, ids = self.sight.embed(tokens, plan.features), mx.maximum(tokens, 0)
            inputs = ids[:, None], self._layer_caches, plan.logit_rows
            if kept is None:
                return self._output_projection.run(*inputs, embeddings), None
            logits, states = self._output_projection.run_keeping(*inputs, kept, embeddings)
            if runs_head:
                self._head_inputs = self._output_projection.hidden_states(states), tokens, embeddings
                return logits, None if kept_indices is None else states[mx.array(kept_indices)]
            return logits, states

    def _update_and_fetch(self, layer: int, keys: mx.array, values: mx.array | None) -> PagedKV:
        """Write a layer's new keys and values `[T, kv_heads, 1, dim]` to the arena or the tail. Return where attention
        finds all of the layer's keys and values.

        Without `values`, the values are part of the keys. Keys and values are quantized only here. From then on they
        are moved as codes.
        """
        new: Slab = (keys,) if values is None else (keys, values)
        form = self._forms[layer]
        if form is not None:
            new = form.quantize(*new)
        plan, arena = self._plan, self.memory.arena
        assert plan is not None
        self._feed(*new)
        group, tail_write = arena.group_of[layer], None
        if plan.kind is StepKind.MIXED:
            write = self._writes[group]
            arena.write(layer, write.slot_index, *(write.pad(a[:, :, 0].swapaxes(0, 1)) for a in new))
            tail = None
        elif self._writer is not None and (tail_write := self._write_tail(layer, keys, values)) is not None:
            tail = self.memory.tail[layer] = tail_write.tail
        else:
            tail = self.memory.write_tail(layer, plan.column, plan.columns, new)
        step, derived_data = self._groups[group], self._derived_data[group]
        kv = PagedKV(arena, layer, step, tail, self._tail_tokens, keys.dtype, self._attend, derived_data, form)
        if tail_write is not None:
            kv.replace_queries = tail_write.replace_queries
        return kv

    def _write_tail(self, layer: int, keys: mx.array, values: mx.array | None) -> WrittenTail | None:
        """Have the `TailWriter` write a decode step's keys and values; None if it does not serve them."""
        plan = self._plan
        if self._writer is None or plan is None or self._forms[layer] is not None:
            return None
        return self._writer.write(keys, values, self.memory.tail[layer] if plan.column else None)

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def arena(self) -> KVArena:
        """The arena with the keys and values."""
        return self.memory.arena

    @property
    def blocks(self) -> GroupCounts:
        """How many blocks each layer group has in the arena."""
        return self.memory.blocks

    @property
    def bytes(self) -> MemoryInUse:
        """The bytes in use now."""
        return self.memory.bytes

    @property
    def command_buffers(self) -> CommandBuffers | None:
        """The command buffers that a decode step takes on the GPU; None on a CPU."""
        if self.computes_at_dispatch:
            return None
        if self._command_buffers is None or self._command_buffers[0] != self.blocks:
            slabs = {layer: sum(a.size for a in self.arena.slab(layer)) for layer in self.arena.group_of}
            limits = command_buffer_limits(str(mx.device_info(mx.gpu).get("architecture", "")), os.environ)
            self._command_buffers = self.blocks, count_command_buffers(count_bound_elements(self.model, slabs), limits)
        return self._command_buffers[1]

    @property
    def shapes(self) -> tuple[Shapes, ...]:
        """The shapes of the arrays that `copy_out` returns for a block of each layer group."""
        return self.memory.shapes

    @return_refusals
    def begin(self, blocks: GroupCounts) -> None:
        """Allocate an empty arena of `blocks` blocks."""
        self.memory.begin(blocks)

    def can_resize(self, blocks: GroupCounts) -> bool:
        """Return whether a resize may be tried: the system would give the memory now, or the arena has no blocks to
        lose. In the second case a refusal is handled as that of a step, which is tried again.
        """
        return not min(self.blocks) or self.arena.can_resize(blocks)

    @return_refusals
    def resize(self, blocks: GroupCounts) -> None:
        """Resize the arena to `blocks` blocks per layer group."""
        self.memory.resize(blocks)

    @return_refusals
    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks within the arena."""
        mx.synchronize()
        self.memory.copy(copies)

    @return_refusals
    def copy_out(self, group: int, names: Sequence[int]) -> list[Arrays | None]:
        """Return NumPy copies of blocks of a layer group. If `group` is `STATE`, return copies of snapshots, with None
        for one that does not exist. Nothing may be in flight.
        """
        return self.memory.copy_out(group, names)

    def release(self) -> None:
        """Free the arena, also after a step that failed while it wrote."""
        self.arena.release()
        self.trim()

    def trim(self) -> None:
        """Free the memory that MLX keeps for reuse after arrays are deleted."""
        mx.clear_cache()
