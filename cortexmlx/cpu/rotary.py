"""Rotary positions on a CPU: the cosines and sines of a step are computed once instead of in every layer.

On a GPU, MLX has one kernel for `rope`. On a CPU it is a chain of sixteen operations that computes the frequencies
again for the queries and the keys of every layer, a third of all operations of a decode step. All tokens of a step
share one array of positions. So here each layer only multiplies: `x * cos + swapped(x) * sin`. These are the same
products and sums in the same order as MLX's own, so the bits are the same.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

RopeKind = tuple[int, bool, float, float]
"""What the angles of a layer depend on besides positions: `dims`, `traditional`, `base` and `scale` of its `RoPE`."""


class StepAngles:
    """The rotary angles of the current step: its positions, and the cosine and sine tables that its layers share."""

    def __init__(self) -> None:
        self.positions: mx.array | None = None
        self.tables: dict[RopeKind, tuple[mx.array, mx.array]] = {}
        """What `make_table` has returned in this step."""

    def begin(self, positions: mx.array) -> None:
        """Begin a step whose tokens are at `positions` `[T]`. Models get this very array as their offset."""
        self.positions = positions
        self.tables = {}

    def end(self) -> None:
        """Drop the positions and tables of the last step."""
        self.positions = None
        self.tables = {}

    def make_table(self, rope: nn.RoPE, kind: RopeKind) -> tuple[mx.array, mx.array]:
        """Compute and keep the cosines and signed sines `[T, 1, 1, dims]` of `rope`, for all layers of its `kind`."""
        assert self.positions is not None
        tokens, axis = self.positions.shape[0], -1 if rope.traditional else -2
        ones = mx.ones((tokens, 1, 1, *((rope.dims // 2, 1) if rope.traditional else (1, rope.dims // 2))))
        unit = mx.concatenate([ones, mx.zeros_like(ones)], axis=axis).reshape(tokens, 1, 1, rope.dims)
        rotated_unit = nn.RoPE.__call__(rope, unit, offset=self.positions)
        cosines, sines = mx.split(_split_into_pairs(rotated_unit, rope), 2, axis=axis)
        self.tables[kind] = (
            mx.concatenate([cosines, cosines], axis=axis).reshape(unit.shape),
            mx.concatenate([-sines, sines], axis=axis).reshape(unit.shape),
        )
        return self.tables[kind]


class SharedRoPE(nn.RoPE):  # type: ignore[misc]
    """An `nn.RoPE` that reads cosines and sines from `StepAngles` if called with the step's positions in float32."""

    def __init__(self, rope: nn.RoPE, angles: StepAngles) -> None:
        super().__init__(rope.dims, rope.traditional, rope.base, rope.scale)
        self._angles = angles

    def __call__(self, x: mx.array, offset: mx.array | int = 0) -> mx.array:
        """Rotate `[T, heads, 1, dims]`; see `nn.RoPE`."""
        angles = self._angles
        if offset is not angles.positions or x.dtype != mx.float32 or x.shape[-1] != self.dims:
            rotated: mx.array = super().__call__(x, offset=offset)
            return rotated
        kind = (self.dims, self.traditional, self.base, self.scale)
        cosines, sines = angles.tables.get(kind) or angles.make_table(self, kind)
        pairs = _split_into_pairs(x, self)
        swapped_pairs = pairs[..., ::-1] if self.traditional else pairs[..., ::-1, :]
        return x * cosines + swapped_pairs.reshape(x.shape) * sines


def share_angles(model: nn.Module) -> StepAngles:
    """Make the model's RoPE layers share their angles, on a CPU only. Call `begin` of the result before every step."""
    angles = StepAngles()
    if mx.default_device() == mx.cpu:
        for module in model.modules():
            for name, child in list(module.items()):
                if type(child) is nn.RoPE:
                    setattr(module, name, SharedRoPE(child, angles))
    return angles


def _split_into_pairs(x: mx.array, rope: nn.RoPE) -> mx.array:
    """Reshape `[..., dims]` so that numbers rotated together lie along one axis: the last, or the one before it."""
    half = rope.dims // 2
    return x.reshape(*x.shape[:-1], *((half, 2) if rope.traditional else (2, half)))
