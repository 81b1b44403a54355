"""The kernels of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cortexmlx.kv.spec import ITEMSIZE
from cortexmlx.metal.lab.agx.kernel_files import kernel_texts
from cortexmlx.metal.lab.agx.opencl import Instance, opencl_unit
from cortexmlx.metal.lab.sim.source import KernelText
from cortexmlx.metal.prefill import PrefillVariant
from cortexmlx.metal.products.shape import ProductVariant
from cortexmlx.metal.rules import REDUCE_THREADS, Variant
from cortexmlx.metal.shape import Kernel
from cortexmlx.metal.vector import lane_numbers


@dataclass(frozen=True)
class KernelWork:
    """A kernel to compile, and what its loops work on. A kernel that reads no keys has None for all of the latter.

    The tokens of one turn of a loop follow from `key_bytes`, `value_bytes` and the bytes that the turn loads.
    """

    name: str
    kernel: str
    source: str
    threads: int
    heads: int | None = None
    """Query heads that a simdgroup holds."""
    key_bytes: float | None = None
    """Bytes that one lane loads of a token's key."""
    value_bytes: float | None = None
    """Bytes that one lane loads of a token's value."""
    slice_tokens: int | None = None
    """Tokens in one turn of the loop around the loops over keys and values. None if there is no such loop."""


def our_kernels(variant: Variant) -> Iterator[KernelWork]:
    """Yield the decode kernel and the reduce kernel of a variant, from the text that MLX would compile."""
    decode, reduce, _ = kernel_texts(variant)  # what leaves whole results has the loops of `decode`
    geometry = variant.geometry
    shared = geometry.parts if variant.kernel is Kernel.WIDE else 1  # each part loads its share of the keys
    dims = variant.key_dim // shared, 0 if variant.latent else variant.value_dim // geometry.parts
    key_bytes, value_bytes = (_lane_bytes(variant, dim) for dim in dims)
    yield KernelWork(
        variant.label,
        geometry.name,
        _unit(decode, geometry.threads),
        geometry.threads,
        min(geometry.tile, variant.group),
        key_bytes,
        value_bytes,
        geometry.slice_tokens,
    )
    sinks = ", sinks" if variant.sinks else ""
    yield KernelWork(
        f"{variant.dtype}, value_dim {variant.value_dim}{sinks}",
        "paged_reduce",
        _unit(reduce, REDUCE_THREADS),
        REDUCE_THREADS,
    )


def prefill_kernel(variant: PrefillVariant) -> KernelWork:
    """Return a variant's prefill kernel. Its loops do no fixed share of a token: their instructions are not counted."""
    [text] = kernel_texts(variant)
    return KernelWork(variant.label, "paged_prefill", _unit(text, variant.threads), variant.threads)


def product_kernel(product: ProductVariant) -> KernelWork:
    """Return the kernel of a quantized product."""
    [text] = kernel_texts(product)
    name = "quantized_product" + ("" if product.shape.experts is None else "_of_experts")
    return KernelWork(product.label, name, _unit(text, product.shape.threads), product.shape.threads)


def _lane_bytes(variant: Variant, dim: int) -> float:
    """Return the bytes that a lane loads of a token's key or value of `dim` numbers.

    In the matrix and wide kernels the lanes of a simdgroup share each token, and a fraction of a byte is dropped. In
    the matrix kernel the four lanes of a row load its scales and biases.
    """
    item, bits = ITEMSIZE[variant.kv_dtype], variant.kv_bits
    if bits is None or variant.quant_group is None:
        return lane_numbers(dim) * item if variant.kernel is Kernel.VECTOR else dim * item // 32
    if variant.kernel is Kernel.MATRIX:
        return (dim * bits / 8 + dim // variant.quant_group * 2 * item * 4) / 32
    pack = min(lane_numbers(dim), 4)
    return lane_numbers(dim) // pack * (max(pack * bits // 8, 2) + 2 * item)  # a byte takes a register of 16 bits


def _unit(kernel: KernelText, threads: int) -> str:
    return opencl_unit(kernel.text, Instance(kernel.name, kernel.template, (threads, 1, 1)))
