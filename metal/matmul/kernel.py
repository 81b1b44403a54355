"""The quantized matmul as `mx.fast.metal_kernel` objects, and its calls.

The mathematics is in `shaders/quantized_matmul.metal`. This module has the entries: the lines between MLX's generated
signature and the kernel's function.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from cortexmlx.metal.kernels import KernelFactory, kernel_text, make_kernel
from cortexmlx.metal.matmul.shape import EXPERT_ROWS, OUTPUTS, MatmulShape, split_rows
from cortexmlx.metal.work import SMALL

FILE = "quantized_matmul.metal"
NO_EXPERT = (1 << 32) - 1
"""Fills up a list of experts to `SMALL`: a smaller input would be in another address space, and another kernel."""

_BEGIN = f"""
  constexpr int OCTETS = {OUTPUTS // 8}, MOST = {EXPERT_ROWS};
  threadgroup float sums[SLICES * 8 * (8 * OCTETS + 4)];
  const int first = int(threadgroup_position_in_grid.x) * 8 * OCTETS;"""

_WEIGHTS = {
    "affine": "AffineWeights<T, BITS>",
    "mxfp4": "Mxfp4Weights",
}


def _weights_declaration(mode: str) -> str:
    """Return the Metal line that declares the weights of a mode."""
    arrays = "weight_codes, weight_scales" + (", weight_biases" if mode == "affine" else "")
    return f"""
  const {_WEIGHTS[mode]} weights = {{{arrays}}};"""


def _kernel_call(mode: str, tiles: str, rows: str, matrix: str) -> str:
    """Return the Metal lines that call the kernel's function."""
    kinds = f"{_WEIGHTS[mode]}, {rows}"
    return f"""quantized_matmul<T, BITS, GROUP, SLICES, OCTETS, {tiles}, {kinds}>(
      activations, weights, rows, uint(groups), {matrix}, first, outputs, matmuls, sums,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"""


def _make_entry(mode: str) -> str:
    """Return the Metal lines that run the kernel for rows with one matrix."""
    return f"""{_BEGIN}{_weights_declaration(mode)}
  const int outputs = weight_scales_shape[0], groups = weight_scales_shape[1];
  const int first_row = int(threadgroup_position_in_grid.y) * 8 * TILES;
  const NextRows rows = {{min(activations_shape[0] - first_row, 8 * TILES), first_row}};
  {_kernel_call(mode, "TILES", "NextRows", "0")}
"""


def _make_expert_entry(mode: str) -> str:
    """Return the Metal lines that run the kernel for pairs of a token and an expert."""
    return f"""{_BEGIN}{_weights_declaration(mode)}
  threadgroup int found[MOST];
  const int outputs = weight_scales_shape[1], groups = weight_scales_shape[2];
  const int pairs = int(threadgroups_per_grid.y), pair = int(threadgroup_position_in_grid.y);
  const uint expert = expert_of_pair[pair], lane = thread_index_in_simdgroup;
  const bool writes = simdgroup_index_in_threadgroup == 0;
  const int count = find_pairs<MOST>(expert_of_pair, pairs, expert, 0, writes, found, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (found[0] != pair) {{
    return;  // the expert's rows are the work of its first pair
  }}
  for (int done = 0; done < count; done += MOST) {{
    if (done > 0) {{
      find_pairs<MOST>(expert_of_pair, pairs, expert, done, writes, found, lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }}
    const RowsOfExpert rows = {{min(count - done, MOST), pairs / activations_shape[0], found}};
    if (rows.count <= 8) {{
      {_kernel_call(mode, "1", "RowsOfExpert", "int(expert)")}
    }} else {{
      {_kernel_call(mode, "MOST / 8", "RowsOfExpert", "int(expert)")}
    }}
  }}
"""


@dataclass(frozen=True)
class QuantizedWeights:
    """The arrays of a layer's quantized weights, row-contiguous, as `mx.quantize` gives them."""

    codes: mx.array
    """`[outputs, inputs * bits / 32]` uint32; with experts before that `[experts]`."""
    scales: mx.array
    """`[outputs, inputs / group]`, in the dtype of the rows; uint8 in mxfp4."""
    biases: mx.array | None
    """Shape and dtype of `scales`; None in mxfp4."""

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that the kernel reads: codes, scales and, if any, biases."""
        return [self.codes, self.scales, *([] if self.biases is None else [self.biases])]


class MatmulKernel:
    """The quantized matmul kernels, made once by `factory`: one for each mode, with and without experts."""

    def __init__(self, factory: KernelFactory) -> None:
        self._kernels = {
            (mode, experts): make_kernel(
                factory,
                f"cortex_matmul_{mode}" + ("_of_experts" if experts else ""),
                inputs=[
                    *("activations", "weight_codes", "weight_scales"),
                    *(["weight_biases"] if mode == "affine" else []),
                    *(["expert_of_pair"] if experts else []),
                ],
                outputs=["matmuls"],
                entry=_make_expert_entry(mode) if experts else _make_entry(mode),
                text=kernel_text(FILE),
                copies=True,
            )
            for mode in _WEIGHTS
            for experts in (False, True)
        }

    def __call__(
        self, shape: MatmulShape, x: mx.array, weights: QuantizedWeights, *, init_value: float | None = None
    ) -> mx.array:
        """Return the matmul of `x` `[..., inputs]` with a matrix: `[..., outputs]`.

        `init_value` fills the output before the launch, which costs a launch of its own.
        """
        rows = x.size // shape.inputs
        matmuls: mx.array
        (matmuls,) = self._kernels[shape.mode, False](
            inputs=[_flatten_rows(x, rows), *weights.arrays],
            output_shapes=[(*x.shape[:-1], shape.outputs)],
            output_dtypes=[x.dtype],
            init_value=init_value,
            **_launch_arguments(shape, rows),
        )
        return matmuls

    def multiply_experts(
        self,
        shape: MatmulShape,
        x: mx.array,
        weights: QuantizedWeights,
        experts: mx.array,
        *,
        init_value: float | None = None,
    ) -> mx.array:
        """Return the matmul of each row of `x` `[..., inputs]` with the matrices of its experts: `[*experts.shape,
        outputs]`.

        `experts` has equally many numbers for each row, in the order of rows: pair p is of row `p // (pairs // rows)`.
        An expert's first pair computes all of its pairs, so that its weights are read once for every `EXPERT_ROWS`.
        """
        rows, pairs, of_pairs = x.size // shape.inputs, experts.size, experts.shape
        if experts.dtype != mx.uint32:
            experts = experts.astype(mx.uint32)
        if pairs < SMALL:
            no_expert = mx.array(NO_EXPERT, mx.uint32)
            experts = mx.pad(experts.reshape(-1), (0, SMALL - pairs), constant_values=no_expert)
        matmuls: mx.array
        (matmuls,) = self._kernels[shape.mode, True](
            inputs=[_flatten_rows(x, rows), *weights.arrays, experts],
            output_shapes=[(*of_pairs, shape.outputs)],
            output_dtypes=[x.dtype],
            init_value=init_value,
            **_expert_launch_arguments(shape, pairs),
        )
        return matmuls


def _flatten_rows(x: mx.array, rows: int) -> mx.array:
    """Return `x` with all its rows along the first axis."""
    return x if x.shape[0] == rows else x.reshape(rows, -1)


@cache
def _launch_arguments(shape: MatmulShape, rows: int) -> dict[str, Any]:
    """For a call without experts, return the arguments that depend only on the shape and the number of rows."""
    parts = split_rows(rows)
    return _shared_arguments(shape, (("TILES", parts.tiles),), parts.parts)


@cache
def _expert_launch_arguments(shape: MatmulShape, pairs: int) -> dict[str, Any]:
    """For a call with experts, return the arguments that depend only on the shape and the number of pairs."""
    return _shared_arguments(shape, (), pairs)


def _shared_arguments(shape: MatmulShape, extra_template: tuple[tuple[str, int], ...], groups: int) -> dict[str, Any]:
    """Return a call's template arguments, grid and threadgroup. Shapes of one format and slice count share a kernel."""
    numbers = [("BITS", shape.bits), ("GROUP", shape.group), ("SLICES", shape.slices), *extra_template]
    return {
        "template": [("T", getattr(mx, shape.dtype)), *numbers],
        "grid": (shape.threads * shape.threadgroups, groups, 1),
        "threadgroup": (shape.threads, 1, 1),
    }
