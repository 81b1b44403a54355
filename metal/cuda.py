"""The kernels of this folder on an NVIDIA GPU: the same bodies in `mx.fast.cuda_kernel`, or as a file for nvcc.

`cuda_dialect.h` says Metal's words in CUDA. What a header cannot do happens here: address spaces go, arrays in
threadgroup memory become `__shared__`, and Metal's thread attributes become local variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import mlx.core as mx

from cortexmlx.metal.kernels import REDUCE_ENTRY, kernel_text
from cortexmlx.metal.rules import REDUCE_SIMDGROUPS, Variant
from cortexmlx.metal.vector import VectorGeometry

_ATTRIBUTES = """
  const uint3 threadgroup_position_in_grid = blockIdx;
  const uint simdgroup_index_in_threadgroup = threadIdx.x / 32, thread_index_in_simdgroup = threadIdx.x % 32;
"""
_ADDRESS_SPACE = re.compile(r"\b(?:device|constant|thread|threadgroup) (?=[\w:<])")
_SHARED = re.compile(r"\bthreadgroup (\w+ \w+\[)")
_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


def cuda_body(entry: str) -> str:
    """An entry of `kernels.py` as the body of a CUDA kernel."""
    return _ATTRIBUTES + _ADDRESS_SPACE.sub("", _SHARED.sub(r"__shared__ \1", entry))


def cuda_header(text: str) -> str:
    """The text of a kernel source behind the dialect."""
    return (files("cortexmlx.metal") / "cuda_dialect.h").read_text() + _ADDRESS_SPACE.sub("", text)


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


def cuda_file(variant: Variant) -> str:
    """One CUDA source file with the decode and reduce kernels of a variant, as `extern "C"` functions
    `cortex_paged_decode` and `cortex_paged_reduce` that take the buffers and the shapes they use.
    """
    types = {"T": _TYPES[variant.dtype], "KV": _TYPES[variant.kv_dtype]}
    names = ("KEY_DIM", "VALUE_DIM", "BLOCK_SIZE", "GROUP", "TILE", "AHEAD", "SLICES")
    geometry = VectorGeometry(variant)
    numbers = {name: int(getattr(variant, name.lower())) for name in names[:4]} | dict(geometry.template)
    numbers |= {
        "SIMDGROUPS": REDUCE_SIMDGROUPS,
        "TOKENS": variant.query_tokens,
        "SINKS": int(variant.sinks),
    }
    slabs = ", ".join(f"const KV* {name}" for name in ("arena_keys", "arena_values", "tail_keys", "tail_values"))
    shapes = ", ".join(f"const int* {name}_shape" for name in ("queries", "arena_keys", "tail_keys", "block_tables"))
    decode = (
        f"const T* queries, {slabs}, const int* block_tables, const int* decode_plan, const float* score_factors, "
        f"float* partials, {shapes}"
    )
    reduce = (
        "const float* partials, const int* decode_plan, const float* head_sinks, T* attended, const int* partials_shape"
    )
    constants = {
        "cortex_paged_decode": (*names, "SOFTCAP"),
        "cortex_paged_reduce": ("VALUE_DIM", "SIMDGROUPS", "TOKENS", "SINKS"),
    }

    def function(name: str, parameters: str, entry: str) -> str:
        lines = "".join(f"  constexpr int {key} = {int(numbers[key])};\n" for key in constants[name])
        return f'extern "C" __global__ void {name}({parameters}) {{\n{lines}{cuda_body(entry)}}}\n'

    aliases = "".join(f"using {name} = {value};\n" for name, value in types.items())
    once = kernel_text("paged_reduce.metal").replace((files("cortexmlx.metal") / "paged_attention.h").read_text(), "")
    return (
        cuda_header(kernel_text("paged_decode.metal") + once)
        + aliases
        + function("cortex_paged_decode", decode, VectorGeometry.entry)
        + function("cortex_paged_reduce", reduce, REDUCE_ENTRY)
    )
