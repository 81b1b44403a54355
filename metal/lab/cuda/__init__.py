"""The kernels on an NVIDIA GPU: the same bodies in `mx.fast.cuda_kernel`.

`dialect.h` defines Metal's names in CUDA. This module rewrites what a header cannot define:
- Address spaces and the includes of Metal's headers are removed.
- Arrays in threadgroup memory become `__shared__`.
- `constexpr` functions become `__device__` functions too.
- Metal's thread attributes become local variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import mlx.core as mx

_ATTRIBUTES = """
  const uint3 threadgroup_position_in_grid = blockIdx, threadgroups_per_grid = gridDim;
  const uint simdgroup_index_in_threadgroup = threadIdx.x / 32, thread_index_in_simdgroup = threadIdx.x % 32;
"""
_ADDRESS_SPACE = re.compile(r"\b(?:device|constant|thread|threadgroup) (?=[\w:<])")
_SHARED = re.compile(r"(?:\balignas\(16\) )?\bthreadgroup (\w+ \w+\[)")
_FUNCTION_OF_CONSTANTS = re.compile(r"\bconstexpr (?=\w+ \w+\()")
_METAL_HEADER = re.compile(r"^#include <metal_\w+>$", re.M)


def cuda_body(entry: str) -> str:
    """Return a kernel's entry as the body of a CUDA kernel."""
    return _ATTRIBUTES + _ADDRESS_SPACE.sub("", _SHARED.sub(r"__shared__ __align__(16) \1", entry))


def cuda_header(text: str) -> str:
    """Return `dialect.h` followed by the rewritten text of a kernel source."""
    dialect = (files("cortexmlx.metal.lab.cuda") / "dialect.h").read_text()
    text = _FUNCTION_OF_CONSTANTS.sub("__device__ constexpr ", _METAL_HEADER.sub("", text))
    return dialect + _ADDRESS_SPACE.sub("", text)


def cuda_factory(
    *,
    name: str,
    input_names: list[str],
    output_names: list[str],
    source: str,
    header: str,
    ensure_row_contiguous: bool = True,
) -> Callable[..., Sequence[mx.array]]:
    """Make a kernel where MLX runs on CUDA. Takes the arguments of `mx.fast.metal_kernel`."""
    kernel: Any = mx.fast.cuda_kernel(
        name=name,
        input_names=input_names,
        output_names=output_names,
        source=cuda_body(source),
        header=cuda_header(header),
        ensure_row_contiguous=ensure_row_contiguous,
    )
    made: Callable[..., Sequence[mx.array]] = kernel
    return made
