"""Prefill on the tiled kernel: which layers it serves, and its inputs, made once per step for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from cortexmlx.attention.paged import PagedKV
from cortexmlx.attention.selfcheck.check import Approval, check_prefill
from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.kv.step import GroupStep
from cortexmlx.metal.kernels import KernelFactory
from cortexmlx.metal.prefill import PrefillInputs, PrefillKernel, PrefillVariant, refusal, why_ours
from cortexmlx.metal.work import prefill_list


@dataclass(frozen=True)
class _Work:
    """A work list on the device."""

    items: int
    plan: mx.array
    tables: mx.array


class PrefillStep:
    """The work lists of a GroupStep's pieces, by block size and tile."""

    def __init__(self, step: GroupStep) -> None:
        self._step = step
        self._lists: dict[tuple[int, int], _Work] = {}

    def work(self, block_size: int, tile: int) -> _Work:
        """The list for tiles of `tile` tokens."""
        if (block_size, tile) not in self._lists:
            work = prefill_list(self._step.pieces, block_size, self._step.attention_window, tile)
            self._lists[block_size, tile] = _Work(work.items, mx.array(work.plan), mx.array(work.tables))
        return self._lists[block_size, tile]


class MetalPrefill:
    """The prefill kernel, made by `factory`, for the layers of which `why_ours` says so and `approval` approves."""

    def __init__(self, factory: KernelFactory, approval: Approval, *, matrix_units: bool) -> None:
        self._kernel = PrefillKernel(factory)
        self._approval = approval
        self._matrix_units = matrix_units
        self._approved: dict[tuple[PrefillVariant, bool], bool] = {}

    @property
    def served(self) -> bool:
        """Whether the kernel has served a layer."""
        return any(self._approved.values())

    def reconsider(self) -> None:
        """Ask for every approval again."""
        self._approved.clear()

    def serves(self, variant: PrefillVariant, attention_window: AttentionWindow) -> bool:
        """Return whether the kernel serves a layer. Otherwise MLX's attention does."""
        if not self.wanted(variant, attention_window):
            return False
        whole = whole_blocks(variant, attention_window)
        if (variant, whole) not in self._approved:
            self._approved[variant, whole] = self.approve(variant, attention_window)
        return self._approved[variant, whole]

    def wanted(self, variant: PrefillVariant, attention_window: AttentionWindow) -> bool:
        """Return whether the kernel is better than MLX's attention for a layer."""
        return why_ours(variant, attention_window, matrix_units=self._matrix_units) is not None

    def approve(self, variant: PrefillVariant, attention_window: AttentionWindow) -> bool:
        """Return whether the kernel may serve a layer. Any thread may ask, once for each variant."""
        reason = refusal(variant)
        if not whole_blocks(variant, attention_window):
            reason = f"chunks of {attention_window.tokens} tokens are not of whole blocks"
        return self._approval.of(variant, reason, lambda: check_prefill(self._kernel, variant))

    def attend(
        self, variant: PrefillVariant, queries: mx.array, kv: PagedKV, factors: mx.array, sinks: mx.array
    ) -> mx.array:
        """Return the attention of all pieces, `[tokens, query_heads, 1, value_dim]`, for the pieces' `queries` alone.
        `factors` and `sinks` are as in DecodeInputs.
        """
        work = kv.derived.get(PrefillStep, kv.step).work(variant.block_size, variant.tile)
        keys, values = kv.arena.slab(kv.layer)
        inputs = PrefillInputs(mx.contiguous(queries), keys, values, work.tables, work.plan, factors, sinks)
        return self._kernel(variant, work.items, inputs)


def whole_blocks(variant: PrefillVariant, attention_window: AttentionWindow) -> bool:
    """Return whether chunks consist of whole blocks, if there are chunks."""
    return not attention_window.chunked or (attention_window.tokens or 0) % variant.block_size == 0
