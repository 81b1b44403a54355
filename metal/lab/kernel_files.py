"""The kernels as files for Apple's compiler: `python -m cortexmlx.metal.lab.kernel_files FOLDER`.

At run time MLX compiles its own headers, the kernel's text and a generated signature as one text. This module writes
that text to a file for each kernel of each variant, which needs no GPU. `xcrun metal -c` compiles the files anywhere.
`.ci/compile-metal` compiles them all.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from cortexmlx.metal.checked import CHECKED, CheckedKernel
from cortexmlx.metal.kernels import DecodeInputs, DecodeKernels
from cortexmlx.metal.lab.legal.msl import INCLUDE, UTILS
from cortexmlx.metal.lab.sim import metal_kernel
from cortexmlx.metal.lab.sim.source import KernelText
from cortexmlx.metal.lab.sim.toolchain import mlx_headers
from cortexmlx.metal.prefill import PrefillInputs, PrefillKernel, PrefillVariant
from cortexmlx.metal.products.kernel import ProductKernel, QuantizedWeights
from cortexmlx.metal.products.shape import ProductVariant
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.tail_write import COLUMNS, HeadNorm, NewTokens, TailWriteKernel, TailWriteVariant
from cortexmlx.metal.work import SMALL

_LONGEST_NAME = 200
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*$", re.M)


def kernel_texts(variant: CheckedKernel) -> Iterator[KernelText]:
    """Yield a variant's kernels as MLX generates them, for inputs of at least `SMALL` elements, as in the engine."""
    made: list[KernelText] = []

    def recording(**options: Any) -> Any:
        """A replacement of `mx.fast.metal_kernel` that keeps the text of a call and computes nothing."""
        kernel = metal_kernel(**options)

        def call(*, inputs: Any, template: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            made.append(kernel.text(inputs, output_dtypes, template))
            return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

        return call

    if isinstance(variant, TailWriteVariant):
        new = _new_tokens(variant)
        TailWriteKernel(recording)(new, None, COLUMNS, mx.zeros(SMALL, mx.int32))
    elif isinstance(variant, ProductVariant):
        _multiply(ProductKernel(recording), variant)
    elif isinstance(variant, PrefillVariant):
        PrefillKernel(recording)(variant, 1, _prefill_inputs(variant))
    else:
        kernels, inputs = DecodeKernels(recording), _decode_inputs(variant)
        kernels(variant, 1, inputs)
        kernels.decode_and_reduce(variant, 1, inputs)
    yield from made


def _decode_inputs(variant: Variant) -> DecodeInputs:
    dtype, kv_dtype = getattr(mx, variant.dtype), getattr(mx, variant.kv_dtype)
    stored = mx.uint32 if variant.kv_bits else kv_dtype
    apart = (mx.zeros(SMALL, kv_dtype),) * (4 if variant.kv_bits else 0)
    return DecodeInputs(
        queries=mx.zeros((1, variant.group, variant.query_tokens, variant.key_dim), dtype),
        keys=mx.zeros((1, variant.block_size, variant.key_dim), stored),
        values=None if variant.latent else mx.zeros((1, variant.block_size, variant.value_dim), stored),
        tail_keys=mx.zeros((1, 1, 1, variant.key_dim), stored),
        tail_values=None if variant.latent else mx.zeros((1, 1, 1, variant.value_dim), stored),
        tables=mx.zeros((1, SMALL), mx.int32),
        plan=mx.zeros(SMALL, mx.int32),
        factors=mx.zeros(2),
        sinks=mx.zeros(SMALL),
        slopes=mx.zeros(SMALL),
        scales=apart,
        biases=apart,
    )


def _new_tokens(variant: TailWriteVariant) -> NewTokens:
    dtype = getattr(mx, variant.dtype)
    queries, values = (mx.zeros((1, 1, dim), dtype) for dim in (variant.key_dim, variant.value_dim))
    norm, turning = HeadNorm(mx.zeros(variant.key_dim, dtype), 1e-5), variant.rope
    return NewTokens(
        queries,
        queries,
        values,
        norm if variant.query_norm else None,
        norm if variant.key_norm else None,
        turning,
        None if turning.base is not None else mx.zeros(turning.dims // 2),
    )


def _prefill_inputs(variant: PrefillVariant) -> PrefillInputs:
    dtype, kv_dtype = getattr(mx, variant.dtype), getattr(mx, variant.kv_dtype)
    return PrefillInputs(
        queries=mx.zeros((2, variant.group, 1, variant.key_dim), dtype),
        keys=mx.zeros((1, variant.block_size, variant.key_dim), kv_dtype),
        values=mx.zeros((1, variant.block_size, variant.value_dim), kv_dtype),
        tables=mx.zeros(SMALL, mx.int32),
        plan=mx.zeros(SMALL, mx.int32),
        factors=mx.zeros(2),
        sinks=mx.zeros(SMALL),
    )


def _multiply(kernel: ProductKernel, product: ProductVariant) -> None:
    """Call the kernel of a product."""
    shape, affine = product.shape, product.shape.mode == "affine"
    matrices = () if shape.experts is None else (shape.experts,)
    dtype, scales = getattr(mx, shape.dtype), (*matrices, shape.outputs, shape.inputs // shape.group)
    weights = QuantizedWeights(
        mx.zeros((*matrices, shape.outputs, shape.inputs * shape.bits // 32), mx.uint32),
        mx.zeros(scales, dtype if affine else mx.uint8),
        mx.zeros(scales, dtype) if affine else None,
    )
    rows = mx.zeros((product.rows, shape.inputs), dtype)
    if shape.experts is None:
        kernel(shape, rows, weights)
    else:
        kernel.multiply_experts(shape, rows, weights, mx.zeros(product.rows, mx.uint32))


def preamble() -> str:
    """Return the text that MLX puts before every kernel: its `utils.h` and all headers that this includes. Each header
    is there once, after the headers that it includes itself.
    """
    done: list[str] = []
    parts: list[str] = []

    def add(name: str) -> None:
        if name in done:
            return
        done.append(name)
        text = (mlx_headers() / name).read_text()
        for included in INCLUDE.findall(text):
            add(included)
        alone = _ONCE.sub("", INCLUDE.sub("", text))  # empty lines replace them, so line numbers stay
        parts.append(f'#line 1 "{name}"\n{alone.rstrip()}\n')

    add(UTILS)
    return "".join(parts)


def file_name(kernel: KernelText) -> str:
    """Return the file name of a kernel: its name in Metal, which has all its template arguments and input types. A long
    name is cut, and a digest of the whole name replaces its end.
    """
    name = kernel.name.removeprefix("custom_kernel_")
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}_{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return name + ".metal"


def metal_file(kernel: KernelText) -> str:
    """Return the whole text that MLX compiles for a kernel. A diagnostic names the line of a header or of this file."""
    before = preamble()
    return f'{before}#line {before.count(chr(10)) + 2} "{file_name(kernel)}"\n{kernel.text}'


def main(arguments: Sequence[str]) -> int:
    """Write every kernel of `CHECKED` once into the given folder. Return the exit status."""
    if len(arguments) != 1:
        print("usage: python -m cortexmlx.metal.lab.kernel_files FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    kernels = {file_name(kernel): kernel for variant in CHECKED for kernel in kernel_texts(variant)}
    for name, kernel in kernels.items():
        (folder / name).write_text(metal_file(kernel))
    print(f"{len(kernels)} kernels of {len(CHECKED)} variants in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
