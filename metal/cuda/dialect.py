"""The kernels on an NVIDIA GPU: the same bodies in `mx.fast.cuda_kernel`.

`dialect.h` says Metal's words in CUDA. What a header cannot do happens here: address spaces and Metal's headers
go, arrays in threadgroup memory become `__shared__`, functions of constants are the device's, too, and Metal's thread
attributes become local variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import mlx.core as mx

_ATTRIBUTES = """
  const uint3 threadgroup_position_in_grid = blockIdx;
  const uint simdgroup_index_in_threadgroup = threadIdx.x / 32, thread_index_in_simdgroup = threadIdx.x % 32;
"""
_ADDRESS_SPACE = re.compile(r"\b(?:device|constant|thread|threadgroup) (?=[\w:<])")
_SHARED = re.compile(r"\bthreadgroup (\w+ \w+\[)")
_FUNCTION_OF_CONSTANTS = re.compile(r"\bconstexpr (?=\w+ \w+\()")
_METAL_HEADER = re.compile(r"^#include <metal_\w+>$", re.M)


def cuda_body(entry: str) -> str:
    """The entry of a kernel as the body of a CUDA kernel."""
    return _ATTRIBUTES + _ADDRESS_SPACE.sub("", _SHARED.sub(r"__shared__ __align__(16) \1", entry))


def cuda_header(text: str) -> str:
    """The text of a kernel source behind the dialect."""
    dialect = (files("cortexmlx.metal.cuda") / "dialect.h").read_text()
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
    """In the place of `mx.fast.metal_kernel`, where MLX runs on CUDA."""
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
