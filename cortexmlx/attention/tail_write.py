"""Writes a decode step's new keys and values into the tail by one kernel launch, which also does the norms and rotary
embeddings before it.

Models are not edited, and nobody lists them. Their rotary modules and norms, whose mathematics is known, return arrays
that remember how they were computed. If a layer stores keys that are just what its rotary module returned, one kernel
computes them from that module's input, and the model's own operations are never evaluated, because nobody reads them.
Where anything else happened in between, nothing is remembered, and the model's operations are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, YarnRoPE

from cortexmlx.attention.probe import trace_decode_step
from cortexmlx.attention.selfcheck import KernelApproval, KernelCheck, check_tail_write
from cortexmlx.kv.arena import Slab
from cortexmlx.metal.kernels import KernelFactory
from cortexmlx.metal.tail_write import (
    HeadNorm,
    NewTokens,
    RopeParameters,
    TailWriteKernel,
    TailWriteVariant,
    pack_positions,
    refusal,
)
from cortexmlx.metal.work import SMALL
from cortexmlx.types.arrays import IntArray

_MAX_HEAD_DIM = 512
_PRUNE_STEP = 2
"""The decode step before which the modules are let go that the first one could not use."""


@dataclass(frozen=True)
class NormOrigin:
    """How an array was computed: as `norm` of `input_array`. Axes of length 1 may have moved since."""

    module: Any
    norm: HeadNorm
    input_array: mx.array


@dataclass(frozen=True)
class RotaryOrigin:
    """How an array `[rows, heads, 1, dim]` was computed: rotary embedding of `input_array`, after `norm` if any."""

    module: Any
    rope: RopeParameters
    frequencies: mx.array | None
    norm: HeadNorm | None
    input_array: mx.array
    norm_module: Any


class TrackedArray(mx.array):
    """An array that remembers how it was computed (`origin`). A transposition that moves an axis of length 1 keeps the
    origin. Other operations return plain arrays, and a change in place clears it.
    """

    origin: NormOrigin | RotaryOrigin | None = None

    def transpose(self, *axes: Any) -> mx.array:  # type: ignore[override]
        """Transpose; keep the origin if only an axis of length 1 moves."""
        transposed = super().transpose(*axes)
        flat = axes[0] if len(axes) == 1 else axes
        if self.ndim == 4 and tuple(flat) == (0, 2, 1, 3) and 1 in self.shape[1:3] and self.origin is not None:
            return _track(transposed, self.origin)
        return transposed


def _track(array: mx.array, origin: NormOrigin | RotaryOrigin) -> TrackedArray:
    tracked = TrackedArray(array)
    tracked.origin = origin
    return tracked


def _forget_on_change(name: str) -> Callable[..., Any]:
    """Return an override of the in-place method `name` that also clears the origin."""

    def change_and_forget(self: TrackedArray, *args: Any) -> Any:
        self.origin = None
        return getattr(mx.array, name)(self, *args)

    return change_and_forget


_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul"
IN_PLACE_METHODS = (
    "__setitem__",
    *(f"__i{name}__" for name in _OPERATORS.split() if hasattr(mx.array, f"__i{name}__")),
)
"""The methods that change an array in place."""

for _name in IN_PLACE_METHODS:
    setattr(TrackedArray, _name, _forget_on_change(_name))


@dataclass(frozen=True)
class WrittenTail:
    """The result of a tail write: a layer's new tail, and its rotated queries."""

    tail: Slab
    queries: mx.array
    original_queries: TrackedArray
    """The model's own queries."""

    def replace_queries(self, queries: mx.array) -> mx.array:
        """Return the kernel's rotated queries in the place of the model's, unless the model has changed them since."""
        return (
            self.queries if queries is self.original_queries and self.original_queries.origin is not None else queries
        )


class TailWriter:
    """Writes new keys and values into the tail by a kernel made by `factory`, for layers whose norms and rotary
    modules it tracks. With `check`, a variant is compared with float64 at first use. Only the thread that evaluates
    the steps may use it, but any thread may run its checks.
    """

    def __init__(self, factory: KernelFactory, *, check: bool = True) -> None:
        self._kernel = TailWriteKernel(factory)
        self._approval = KernelApproval(check)
        self._approvals: dict[Any, bool] = {}
        self._positions: mx.array | None = None
        self._packed_positions: mx.array | None = None
        self._columns = 0
        self._rotated_arrays: list[TrackedArray] = []
        self._tracked_modules: dict[int, tuple[Any, type]] = {}
        self._used_module_ids: set[int] = set()
        self._step_count = 0

    def notes(self) -> tuple[str, ...]:
        """Return one note per kernel variant that is left to MLX's operations: its label, and why."""
        return tuple(f"{label}: {reason}" for label, reason in self._approval.notes.items())

    def reconsider(self) -> None:
        """Check every kernel variant again at its next use, because a step failed."""
        self._approvals.clear()
        self._approval.reconsider()

    def track_model(self, model: nn.Module) -> None:
        """Make the rotary modules and norms of a model return tracked arrays, which remember how they were computed."""
        for module in model.modules():
            if id(module) in self._tracked_modules:  # several layers may share one
                continue
            rotation, norm = _rotation_of(module), _norm_of(module)
            if rotation is None and norm is None:
                continue
            self._tracked_modules[id(module)] = module, type(module)
            if rotation is not None:
                module.__class__ = self._make_tracking_rope(type(module), *rotation)
            elif norm is not None:
                module.__class__ = self._make_tracking_norm(type(module), module.weight, norm)
        self._step_count = 0

    def _make_tracking_rope(self, kind: Any, rotation: RopeParameters, frequencies: mx.array | None) -> Any:
        """Return a subclass of a rotary module class whose results are tracked."""

        class TrackingRope(kind):  # type: ignore[misc]
            def __call__(module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
                out: mx.array = super().__call__(x, *args, **kwargs)
                offset = kwargs.get("offset", args[0] if args else None)
                if self._positions is None or offset is not self._positions or len(args) + len(kwargs) != 1:
                    return out
                tracked = _track(out, RotaryOrigin(module, rotation, frequencies, *_find_norm(x)))
                self._rotated_arrays.append(tracked)
                return tracked

        return TrackingRope

    def _make_tracking_norm(self, kind: Any, weight: mx.array, norm: HeadNorm) -> Any:
        """Return a subclass of a norm class whose results are tracked."""

        class TrackingNorm(kind):  # type: ignore[misc]
            def __call__(module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
                out: mx.array = super().__call__(x, *args, **kwargs)
                if self._positions is None or module.weight is not weight or args or kwargs:  # with a gate, perhaps
                    return out
                return _track(out, NormOrigin(module, norm, _alias(x)))

        return TrackingNorm

    def begin(self, positions: mx.array, host_positions: IntArray, columns: int, column: int) -> None:
        """Begin a decode step whose tokens are at `positions` `[rows]`, which the model gets as its caches' offset.
        Each writes `column` of the tail's `columns`.
        """
        self._step_count += 1
        if self._step_count == _PRUNE_STEP:
            self._untrack_unused()
        self._positions, self._columns = positions, columns
        self._packed_positions = mx.array(pack_positions(columns, column, host_positions))
        self._rotated_arrays.clear()

    def _untrack_unused(self) -> None:
        """Stop tracking the modules whose arrays no write could use, since reading a tracked array costs a copy."""
        for module_id, (module, kind) in self._tracked_modules.items():
            if module_id not in self._used_module_ids:
                module.__class__ = kind
        self._tracked_modules = {
            name: entry for name, entry in self._tracked_modules.items() if name in self._used_module_ids
        }

    def end(self) -> None:
        """End the step: track nothing until the next `begin`."""
        if self._step_count < _PRUNE_STEP:
            self._step_count = 0  # the first step may have failed before the layers that it would have written
        self._positions = self._packed_positions = None
        self._rotated_arrays.clear()

    def write(self, keys: mx.array, values: mx.array | None, tail: Slab | None) -> WrittenTail | None:
        """Return a layer's tail with its new keys and values `[rows, kv_heads, 1, dim]` written; None if the kernel
        cannot compute them. `tail` is the layer's tail before; without it, a new tail begins.
        """
        kernel_inputs = self._match_kernel_inputs(keys, values)
        if kernel_inputs is None or self._packed_positions is None or not self._serves(kernel_inputs[0].variant):
            return None
        new, queries, modules = kernel_inputs
        if self._step_count < _PRUNE_STEP:
            self._used_module_ids |= modules
        rotated_queries, *new_tail = self._kernel(new, tail, self._columns, self._packed_positions)
        return WrittenTail(tuple(new_tail), rotated_queries, queries)

    def kernel_checks(self, model: nn.Module) -> list[KernelCheck]:
        """Return a check for each kernel variant that decode steps of a tracked model need. Nothing is computed."""
        if not self._approval.check:
            return []
        variants: dict[TailWriteVariant, None] = {}

        def add_variant(layer: int, keys: mx.array, values: mx.array | None) -> None:
            if (kernel_inputs := self._match_kernel_inputs(keys, values)) is not None:
                variants.setdefault(kernel_inputs[0].variant)

        self._positions = positions = mx.zeros(2, mx.int32)
        try:
            trace_decode_step(model, positions, add_variant)
        finally:
            self.end()
        return [KernelCheck(variant.label, partial(self._is_approved, variant)) for variant in variants]

    def _serves(self, variant: TailWriteVariant) -> bool:
        """Return whether a kernel variant may be used. The answer is computed once per variant."""
        if variant not in self._approvals:
            self._approvals[variant] = self._is_approved(variant)
        return self._approvals[variant]

    def _is_approved(self, variant: TailWriteVariant) -> bool:
        """Return whether the rules and the check allow a kernel variant."""
        return self._approval.is_approved(variant, refusal(variant), lambda: check_tail_write(self._kernel, variant))

    def _match_kernel_inputs(
        self, keys: mx.array, values: mx.array | None
    ) -> tuple[NewTokens, TrackedArray, set[int]] | None:
        """Return the kernel's inputs for a layer's new keys and values, the model's own queries, and the modules that
        the kernel replaces; None if keys or queries were computed in another way.
        """
        rotated = [array for array in self._rotated_arrays if array.origin is not None]
        self._rotated_arrays.clear()
        if len(rotated) != 2 or values is None:
            return None
        queries, rotated_keys = rotated if rotated[1] is keys else rotated[::-1]
        query_origin, key_origin = queries.origin, rotated_keys.origin
        if (
            rotated_keys is not keys
            or not isinstance(query_origin, RotaryOrigin)
            or not isinstance(key_origin, RotaryOrigin)
        ):
            return None
        if keys.ndim != 4 or queries.ndim != 4:
            return None
        rows, kv_heads, _, dim = keys.shape
        same_rotation = query_origin.rope == key_origin.rope and query_origin.frequencies is key_origin.frequencies
        flat = keys.shape[2] == queries.shape[2] == values.shape[2] == 1 and queries.shape[0] == rows
        if not same_rotation or not flat or queries.shape[3] != dim or not queries.dtype == keys.dtype == values.dtype:
            return None
        new = NewTokens(
            query_origin.input_array.reshape(rows, -1, dim),
            key_origin.input_array.reshape(rows, kv_heads, dim),
            values.reshape(rows, kv_heads, -1),
            query_origin.norm,
            key_origin.norm,
            key_origin.rope,
            key_origin.frequencies,
        )
        return new, queries, {id(m) for o in (query_origin, key_origin) for m in (o.module, o.norm_module)}


def _alias(x: mx.array) -> mx.array:
    """Return another array object with the same data, which no change of `x` in place reaches. It costs nothing."""
    return x.astype(x.dtype)


def _find_norm(x: mx.array) -> tuple[HeadNorm | None, mx.array, Any]:
    """Return the norm before a rotation, the norm's input and module; without a norm None, an alias of `x` and None."""
    origin = x.origin if isinstance(x, TrackedArray) else None
    if isinstance(origin, NormOrigin):
        weight, input_array = origin.norm.weight, origin.input_array
        if weight.dtype == input_array.dtype == x.dtype:
            return origin.norm, input_array, origin.module
    return None, _alias(x), None


def _rotation_of(module: Any) -> tuple[RopeParameters, mx.array | None] | None:
    """Return the rotation of a rotary module and its frequencies; None for any other module or an unknown rotation."""
    kind = type(module)
    if kind is nn.RoPE:
        return RopeParameters(module.dims, module.traditional, float(module.base), float(module.scale)), None
    if kind in (Llama3RoPE, ProportionalRoPE) or (kind is YarnRoPE and module.mscale == 1.0):
        frequencies = module._freqs.astype(mx.float32)
        padding = max(0, SMALL - frequencies.size)  # a small input would be in another address space
        return RopeParameters(module.dims, module.traditional, None), mx.pad(frequencies, (0, padding))
    return None


def _norm_of(module: Any) -> HeadNorm | None:
    """Return a module's RMSNorm if it is one, of at most the largest head size; None for any other module.

    A class that is not MLX's is tried out: its result must have the bits of MLX's, with its weight or one more.
    """
    weight, eps = getattr(module, "weight", None), getattr(module, "eps", None)
    if (
        not isinstance(weight, mx.array)
        or weight.ndim != 1
        or weight.size > _MAX_HEAD_DIM
        or not isinstance(eps, float)
    ):
        return None
    if type(module) is nn.RMSNorm:
        return HeadNorm(weight, eps)
    numbers = np.random.default_rng(0).standard_normal((2, 1, 3, weight.size)).astype(np.float32)
    x = mx.array(numbers).astype(weight.dtype)
    try:
        result = module(x)
        for candidate in (weight, 1.0 + weight):
            if mx.array_equal(result, mx.fast.rms_norm(x, candidate, eps)):
                return HeadNorm(candidate, eps)
    except Exception:  # whatever the code of a module raises that is no norm
        return None
    return None
