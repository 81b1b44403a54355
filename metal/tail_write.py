"""The kernel tail_write.metal: applies norm and rotation to a decode step's queries and keys, and writes keys and
values into the tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from cortexmlx.metal.kernels import KernelFactory, kernel_text, make_kernel
from cortexmlx.metal.shape import DTYPES
from cortexmlx.metal.work import SMALL
from cortexmlx.types.arrays import IntArray

COLUMNS = 4
"""Columns of a tail that a simdgroup copies."""

_ENTRY = f"""
  threadgroup T numbers[KEY_DIM];
  const int query_heads = queries_shape[1], kv_heads = keys_shape[1], columns = step_places[0];
  const int row = int(threadgroup_position_in_grid.z), task = int(threadgroup_position_in_grid.y);
  const uint lane = thread_index_in_simdgroup;
  const int column = step_places[1];
  const Rotation<ROTATED, FREQUENCIES> rotation = {{
      frequencies, numbers_of_layer[0], numbers_of_layer[1] * float(step_places[3 + row])}};
  if (task < query_heads) {{
    const int64_t head = int64_t(row) * query_heads + task;
    write_turned<T, KEY_DIM, QUERY_NORM, ROTATED, TRADITIONAL>(
        queries + head * KEY_DIM, query_weight, numbers_of_layer[2], rotation, turned + head * KEY_DIM, numbers, lane);
    return;
  }}
  const int parts = (columns + {COLUMNS} - 1) / {COLUMNS};
  const int part = (task - query_heads) % parts, of_kind = (task - query_heads) / parts;
  const int begin = part * {COLUMNS}, end = min(begin + {COLUMNS}, columns);
  const int64_t head = int64_t(row) * kv_heads + of_kind % kv_heads;
  const bool begins = column == 0, here = column >= begin && column < end;
  if (of_kind < kv_heads) {{
    const int64_t at = head * columns * KEY_DIM;
    copy_columns<T, KEY_DIM>(tail_keys + (begins ? 0 : at), new_keys + at, begin, end, column, begins, lane);
    if (here) {{
      write_turned<T, KEY_DIM, KEY_NORM, ROTATED, TRADITIONAL>(
          keys + head * KEY_DIM, key_weight, numbers_of_layer[3], rotation, new_keys + at + column * KEY_DIM, numbers,
          lane);
    }}
  }} else {{
    const int64_t at = head * columns * VALUE_DIM;
    copy_columns<T, VALUE_DIM>(tail_values + (begins ? 0 : at), new_values + at, begin, end, column, begins, lane);
    for (int d = int(lane); here && d < VALUE_DIM; d += 32) {{
      new_values[at + column * VALUE_DIM + d] = values[head * VALUE_DIM + d];
    }}
  }}
"""


@dataclass(frozen=True)
class RopeParameters:
    """How RoPE rotates the numbers of a head by their position."""

    dims: int
    """The first numbers of a head, which are rotated."""
    traditional: bool
    """Whether neighbours are a pair. Otherwise the numbers n and n + dims / 2 are."""
    base: float | None
    """Pair p turns by position / base^(2 p / dims); None: by its frequency."""
    scale: float = 1.0
    """Multiplies positions."""


@dataclass(frozen=True)
class TailWriteVariant:
    """One instantiation of the tail write kernel: dtype, dims, rotation and norms."""

    dtype: str
    key_dim: int
    value_dim: int
    rope: RopeParameters
    query_norm: bool
    key_norm: bool

    @property
    def label(self) -> str:
        """A short description of the variant for logs."""
        norms = ("no norm", "a norm", "norms")[self.query_norm + self.key_norm]
        dims = f"head_dim {self.key_dim}/{self.value_dim}, {self.rope.dims} rotated"
        return f"write of {self.dtype} tokens, {dims}, {norms}"


@dataclass(frozen=True)
class HeadNorm:
    """An RMSNorm over the numbers of a head: its weight and epsilon."""

    weight: mx.array
    eps: float


@dataclass(frozen=True)
class NewTokens:
    """The tail write kernel's inputs: a step's queries, keys, values `[rows, heads, dim]`, before norm and rotation."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    query_norm: HeadNorm | None
    key_norm: HeadNorm | None
    rope: RopeParameters
    frequencies: mx.array | None
    """`[dims / 2]` float32, if `rope` has no base."""

    @property
    def variant(self) -> TailWriteVariant:
        """The kernel variant that serves these tokens."""
        return TailWriteVariant(
            str(self.queries.dtype).rpartition(".")[2],
            self.keys.shape[2],
            self.values.shape[2],
            self.rope,
            self.query_norm is not None,
            self.key_norm is not None,
        )


def refusal(variant: TailWriteVariant) -> str | None:
    """Return the reason why the kernel does not serve a variant, or None if it does."""
    if variant.dtype not in DTYPES:
        return "the kernel reads float32, float16 and bfloat16"
    if variant.key_dim % 4 or variant.value_dim % 4:
        return "the kernel copies 4 numbers at a time, so a head_dim must be a multiple of 4"
    if min(variant.key_dim, variant.value_dim) < SMALL:
        return f"a head_dim below {SMALL} would make small inputs, which MLX puts into another address space"
    if variant.rope.dims % 2 or not 0 < variant.rope.dims <= variant.key_dim:
        return "pairs of numbers are rotated, no more than a head has"
    return None


_HALVES = RopeParameters(128, False, 1000000.0)
WRITES: tuple[TailWriteVariant, ...] = (
    *(
        TailWriteVariant(t, 128, 128, _HALVES, query_norm=norms, key_norm=norms)
        for t in DTYPES
        for norms in (False, True)
    ),
    TailWriteVariant("float16", 64, 64, RopeParameters(64, False, None), query_norm=False, key_norm=False),
    TailWriteVariant("bfloat16", 256, 256, RopeParameters(256, False, 10000.0), query_norm=True, key_norm=True),
    TailWriteVariant("bfloat16", 128, 128, RopeParameters(64, True, 10000.0), query_norm=False, key_norm=False),
)
"""The variants in `CHECKED`, the list of checked.py."""


def pack_positions(columns: int, column: int, positions: IntArray) -> IntArray:
    """Return the input array that a step's layers share: `columns`, `column` and the `positions` `[rows]` in one."""
    packed = np.concatenate([np.array([columns, column, 0], np.int32), positions.astype(np.int32)])
    return np.pad(packed, (0, max(0, SMALL - len(packed))))


class TailWriteKernel:
    """The kernel that writes a step's new keys and values into the tails of the rows, made by `factory`."""

    def __init__(self, factory: KernelFactory) -> None:
        self._nothing = mx.array([0.0] * SMALL)  # not lazy: several threads check variants
        self._numbers: dict[tuple[float, ...], mx.array] = {}
        self._kernel = make_kernel(
            factory,
            "cortex_tail_write",
            inputs=[
                *("queries", "keys", "values", "query_weight", "key_weight", "frequencies"),
                *("tail_keys", "tail_values", "step_places", "numbers_of_layer"),
            ],
            outputs=["turned", "new_keys", "new_values"],
            entry=_ENTRY,
            text=kernel_text("tail_write.metal"),
            copies=True,
        )

    def __call__(
        self,
        new: NewTokens,
        tail: tuple[mx.array, ...] | None,
        columns: int,
        packed_positions: mx.array,
        *,
        init_value: float | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return the rotated queries `[rows, query_heads, 1, key_dim]` and the new tails of keys and values. Without a
        `tail`, one of `columns` columns begins.

        `packed_positions` are those of `pack_positions`. `init_value` fills the outputs before the launch.
        """
        variant = new.variant
        rows, query_heads, key_dim = new.queries.shape
        kv_heads, value_dim = new.values.shape[1:]
        parts = -(-columns // COLUMNS)
        tail_inputs = tail or (new.keys, new.values)  # not read, but the kernel needs buffers
        rotated_queries, keys, values = self._kernel(
            inputs=[
                new.queries,
                new.keys,
                new.values,
                new.queries if new.query_norm is None else new.query_norm.weight,
                new.keys if new.key_norm is None else new.key_norm.weight,
                self._nothing if new.frequencies is None else new.frequencies,
                *tail_inputs,
                packed_positions,
                self._runtime_parameters(new),
            ],
            template=[
                ("T", new.queries.dtype),
                ("KEY_DIM", key_dim),
                ("VALUE_DIM", value_dim),
                ("QUERY_NORM", variant.query_norm),
                ("KEY_NORM", variant.key_norm),
                ("ROTATED", new.rope.dims),
                ("TRADITIONAL", new.rope.traditional),
                ("FREQUENCIES", new.frequencies is not None),
            ],
            grid=(32, query_heads + 2 * kv_heads * parts, rows),
            threadgroup=(32, 1, 1),
            output_shapes=[
                (rows, query_heads, 1, key_dim),
                (rows, kv_heads, columns, key_dim),
                (rows, kv_heads, columns, value_dim),
            ],
            output_dtypes=[new.queries.dtype, new.keys.dtype, new.values.dtype],
            init_value=init_value,
        )
        return rotated_queries, keys, values

    def _runtime_parameters(self, new: NewTokens) -> mx.array:
        """Return a layer's non-template parameters (base, scale, epsilons), made once for layers that share them."""
        eps = (0.0 if norm is None else norm.eps for norm in (new.query_norm, new.key_norm))
        numbers = (float(np.log2(new.rope.base or 1.0)), new.rope.scale, *eps)
        if numbers not in self._numbers:
            self._numbers[numbers] = mx.array([*numbers, *[0.0] * (SMALL - len(numbers))], mx.float32)
        return self._numbers[numbers]
