"""Execution modes: many rows on paged attention, or one row on mlx-lm's own caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from cortexmlx.attention.backends import AttentionBackend, choose_backend
from cortexmlx.attention.mlx_lm_hook import make_mlx_lm_caches
from cortexmlx.attention.paged import AttentionCall
from cortexmlx.attention.probe import NotPaged, build_lazy_logits, probe_attention_calls, probe_kv_specs
from cortexmlx.attention.selfcheck import KernelCheck
from cortexmlx.errors import InvalidRequest, ModelUnsupported
from cortexmlx.execution.boundary import Runner, raise_if_refused
from cortexmlx.execution.output_projection import OutputProjection
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.execution.serial_runner import (
    COUNTING_GROUPS,
    SerialRunner,
    SingleSequenceCache,
    find_own_groups,
    sees_later_tokens,
    untrimmable_caches,
)
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.sizing import (
    ArenaDemand,
    arena_blocks,
    bytes_per_token,
    format_bytes,
    initial_blocks,
    row_state_bytes,
    sequence_bytes,
    split_memory,
    tokens_that_fit,
)
from cortexmlx.kv.snapshots import SnapshotRegistry
from cortexmlx.kv.spec import GroupCounts, LayerGroup, group_layers, kv_bits_error, paged_groups, quantize_groups
from cortexmlx.matmul.autotuning import MatmulChoices
from cortexmlx.matmul.served import QuantizedMatmuls
from cortexmlx.metal.kernels import KernelFactory
from cortexmlx.models.assistant import Assistant
from cortexmlx.models.draft_head import DraftHead
from cortexmlx.types.arrays import dtype_name
from cortexmlx.vision.sight import Sight


class ExecutionMode(Protocol):
    """One way to run a model: many rows on paged attention, or one row on mlx-lm's own caches."""

    groups: tuple[LayerGroup, ...]
    """What the model's layers keep."""
    max_rows: int | None
    """How many requests may run at once; None: any number."""
    can_pipeline: bool
    """Whether a step may be built before the last one is read."""
    notes: tuple[str, ...]
    """Notes for the user, one line each."""

    def count_blocks(self, memory: int, load: ArenaDemand, context: int) -> GroupCounts:
        """Return how many blocks of each group fit into `memory` bytes, for rows of at most `context` tokens. Raises
        InvalidRequest if none fits.
        """

    def choose_backend(self, name: str) -> AttentionBackend:
        """Return the attention backend with this name: see `attention.backends.choose_backend`."""

    def kernel_checks(self, backend: AttentionBackend, block_size: int) -> Sequence[KernelCheck]:
        """Return the checks that compile and test kernels before the first step: see `AttentionBackend.checks`."""

    def tail_write_checks(self, backend: AttentionBackend) -> Sequence[KernelCheck]:
        """Return the checks of the kernel that writes the tail. Call it after `make_runner`."""

    def make_runner(self, block_size: int, vocab_size: int, backend: AttentionBackend) -> Runner:
        """Return the runner, without blocks. Raises ModelUnsupported if answers would depend on how prompts are cut."""

    def begin_arena(self, blocks: GroupCounts, prefix: PrefixCache, from_scratch: bool = False) -> KVCache:
        """Have the runner allocate an empty arena of at most `blocks` blocks, and return the cache that owns them.
        Raises MemoryRefused if the system has no memory; with `from_scratch`, the next step tries again instead.
        """


class PagedMode:
    """Runs many rows at once, on one arena."""

    max_rows: int | None = None
    can_pipeline: bool = True
    notes: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, groups: tuple[LayerGroup, ...]) -> None:
        self.groups = groups
        self._model = model
        self._runner: ModelRunner
        self._snapshots: int | None = None
        self._head: DraftHead | Assistant | None = None
        self.sight: Sight | None = None
        """What sees images for the model; None: it reads text only."""

    def add_head(self, head: DraftHead | Assistant) -> bool:
        """Have a draft head or an assistant run with the model from now on. A head's layer joins the layer group of the
        model's layer with the same shape. Return False if that group does not see all tokens, or if the model's last
        hidden states are not available.
        """
        has_states = OutputProjection(self._model, build_lazy_logits).has_hidden_states()
        if isinstance(head, Assistant):
            self._head = head if has_states else None
            return has_states
        layer = len(make_mlx_lm_caches(self._model))
        for index, group in enumerate(self.groups):
            if head.like_layer in group.layers and group.spec.window is None and has_states:
                joined = replace(group, layers=(*group.layers, layer))
                self.groups = (*self.groups[:index], joined, *self.groups[index + 1 :])
                self._head = head
                return True
        return False

    def count_blocks(self, memory: int, load: ArenaDemand, context: int) -> GroupCounts:
        """Return how many blocks of each group fit into `memory` bytes, for rows of at most `context` tokens."""
        memory, snapshots = split_memory(self.groups, memory, load.rows)
        self._snapshots = snapshots if row_state_bytes(self.groups) else None
        if bytes_per_token(self.groups):
            return arena_blocks(memory, paged_groups(self.groups), load)
        return (load.rows * -(-context // load.block_size),)

    def choose_backend(self, name: str) -> AttentionBackend:
        return choose_backend(name)

    def kernel_checks(self, backend: AttentionBackend, block_size: int) -> Sequence[KernelCheck]:
        """Return the checks that compile and test the backend's attention kernels."""
        return backend.checks(self._model, paged_groups(self.groups), block_size)

    def head_checks(self, backend: AttentionBackend, block_size: int) -> Sequence[KernelCheck]:
        """Return the checks of the kernels that an assistant needs. A draft head needs no more than the model."""
        if backend.by_kernels is None or not isinstance(self._head, Assistant):
            return ()
        calls = []
        for layer, target in zip(self._head.model.layers, self._head.target_layers, strict=True):
            attention, dtype = layer.self_attn, dtype_name(layer.input_layernorm.weight.dtype)
            calls.append((target, AttentionCall(dtype, attention.n_heads, attention.head_dim, False, False, False)))
        return backend.by_kernels.kernel_checks(calls, paged_groups(self.groups), block_size)

    def tail_write_checks(self, backend: AttentionBackend) -> Sequence[KernelCheck]:
        """Return the checks of the kernel that writes the tail, if the backend has one."""
        return () if backend.writer is None else backend.writer.kernel_checks(self._model)

    def make_runner(self, block_size: int, vocab_size: int, backend: AttentionBackend) -> ModelRunner:
        """Return the runner of the paged model, whose arena has no blocks yet."""
        self._runner = ModelRunner(
            self._model,
            paged_groups(self.groups),
            block_size,
            vocab_size,
            backend.attend,
            backend.writer,
            matmuls := _make_matmuls(backend),
            head=self._head,
            sight=self.sight,
        )
        if matmuls is not None:
            try:
                matmuls.share_inputs(partial(probe_attention_calls, self._model))
            except BaseException:
                matmuls.remove()
                raise
        return self._runner

    def begin_arena(self, blocks: GroupCounts, prefix: PrefixCache, from_scratch: bool = False) -> KVCache:
        """Have the runner allocate an empty arena of at most `blocks` blocks, and return the cache that owns them."""
        return begin_paged_arena(
            self._runner, self.groups, blocks, prefix, self._snapshots, self._runner.can_resize, from_scratch
        )


def begin_paged_arena(
    runner: Runner,
    groups: Sequence[LayerGroup],
    blocks: GroupCounts,
    prefix: PrefixCache,
    snapshots: int | None,
    may_resize: Callable[[GroupCounts], bool],
    from_scratch: bool,
) -> KVCache:
    """Have a runner allocate an empty arena, and return the cache that owns its blocks. The cache has at most `blocks`
    blocks in each of `groups`, and at most `snapshots` snapshots of recurrent states (None: the model has no such
    states). `from_scratch` is as in `ExecutionMode.begin_arena`.
    """
    size = prefix.block_size
    first_blocks = tuple(initial_blocks(count, size) for count in blocks)
    refusal = runner.begin(first_blocks)
    if refusal is not None:
        first_blocks = (1,) * len(first_blocks) if from_scratch else raise_if_refused(refusal)
    pools = BlockPools(
        paged_groups(groups),
        first_blocks,
        size,
        max_blocks=blocks,
        prefix=prefix,
        snapshots=None if snapshots is None else SnapshotRegistry(snapshots),
        may_resize=may_resize,
    )
    return KVCache(pools)


class SerialMode:
    """Runs one row at a time on mlx-lm's own caches, since the model cannot be paged for the reason `reason`."""

    max_rows: int | None = 1

    def __init__(self, model: nn.Module, reason: NotPaged) -> None:
        """Raises ModelUnsupported if mlx-lm's code fails with one sequence, too."""
        with _refuse_model_errors(reason):
            self.groups = find_own_groups(model)
        self.notes: tuple[str, ...] = (f"one request runs at a time, on mlx-lm's own caches. {reason}",)
        untrimmable_names = untrimmable_caches(model)
        # A step that is built before the last one is read would compute one token after an answer's last.
        self.can_pipeline = not untrimmable_names
        if untrimmable_names:
            self.notes += (
                "a prompt goes on where the last answer ended, or is computed anew: "
                f"{' and '.join(untrimmable_names)} cannot always be cut back",
            )
        self._model = model
        self._reason = reason
        self._runner: SerialRunner

    def count_blocks(self, memory: int, load: ArenaDemand, context: int) -> GroupCounts:
        """Return how many blocks of each group fit into `memory` bytes, for rows of at most `context` tokens."""
        block_size = load.block_size
        max_blocks = -(-context // block_size)
        max_tokens = tokens_that_fit(self.groups, memory)
        if max_tokens is not None and max_tokens < block_size:
            min_bytes = sequence_bytes(self.groups, block_size)
            raise InvalidRequest(
                f"a KV memory of {format_bytes(memory)} holds no {block_size} tokens: "
                f"give it at least {format_bytes(min_bytes)}"
            )
        return (max_blocks if max_tokens is None else min(max_blocks, max_tokens // block_size),)

    def choose_backend(self, name: str) -> AttentionBackend:
        """Return a stand-in for mlx-lm's own attention. Only check `name`: see `attention.backends.choose_backend`."""
        return AttentionBackend("mlx-lm's own", choose_backend(name).attend)

    def kernel_checks(self, backend: AttentionBackend, block_size: int) -> Sequence[KernelCheck]:
        """Return no checks, since no kernel of ours runs."""
        return ()

    def tail_write_checks(self, backend: AttentionBackend) -> Sequence[KernelCheck]:
        """Return no checks, since there is no tail."""
        return ()

    def make_runner(self, block_size: int, vocab_size: int, backend: AttentionBackend) -> SerialRunner:
        """Return the runner on mlx-lm's own caches. Raises ModelUnsupported if answers would depend on prompt cuts."""
        with _refuse_model_errors(self._reason):
            sees_later = sees_later_tokens(self._model)
        if sees_later:
            raise ModelUnsupported(
                f"{self._reason}, and in mlx-lm's own code a token of a prompt sees those after it: answers would "
                "depend on how their prompts are cut"
            )
        self._runner = SerialRunner(self._model, self.groups, block_size, vocab_size)
        return self._runner

    def begin_arena(self, blocks: GroupCounts, prefix: PrefixCache, from_scratch: bool = False) -> KVCache:
        """Have the runner begin with empty caches; return a one-sequence cache that counts at most `blocks` blocks."""
        self._runner.begin((1,))
        resize = self._runner.can_resize
        pools = BlockPools(COUNTING_GROUPS, 1, prefix.block_size, max_blocks=blocks, prefix=prefix, may_resize=resize)
        return SingleSequenceCache(self.groups, pools, self._runner.rewind)


@contextmanager
def _refuse_model_errors(reason: NotPaged) -> Iterator[None]:
    """Raise ModelUnsupported for whatever mlx-lm's code of the model raises in this context."""
    try:
        yield
    except Exception as error:
        raise ModelUnsupported(f"{reason}, and mlx-lm's own code for it fails here, too") from error


def choose_execution_mode(
    model: nn.Module, kv_bits: int | None = None, kv_group_size: int | None = None
) -> ExecutionMode:
    """Return the paged mode if the model can be paged, else the serial mode. Keys and values have `kv_bits` bits
    (`quantize_groups`). Raises ModelUnsupported for a model that mlx-lm cannot run here, or whose answers would depend
    on how its prompts are cut, or whose keys and values cannot be quantized.
    """
    try:
        return PagedMode(model, quantize_groups(group_layers(probe_kv_specs(model)), kv_bits, kv_group_size))
    except NotPaged as why:
        if kv_bits is not None:
            raise kv_bits_error(kv_bits, str(why)) from why
        return SerialMode(model, why)


def _make_matmuls(backend: AttentionBackend) -> QuantizedMatmuls | None:
    """Return what computes quantized matmuls by our kernel, for the Metal backend; None for other backends."""
    if backend.name != "metal":
        return None
    return QuantizedMatmuls(cast(KernelFactory, mx.fast.metal_kernel), MatmulChoices())


def kv_store_notes(mode: ExecutionMode) -> tuple[str, ...]:
    """Return one note on why a model's keys and values cannot go to the KV store, or no note if they can."""
    return () if mode.max_rows is None else ("nothing goes to the KV store: mlx-lm's own caches are not in blocks",)
