"""The decode kernels of the sheet, ours and MLX's, each with its counts and its arithmetic.

Each cost is of the pass that reads the keys and values. Second passes are left out, of ours and of MLX's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from cortexmlx.kv.spec import ITEMSIZE
from cortexmlx.metal import sim
from cortexmlx.metal.compare import mlx_decode
from cortexmlx.metal.compare.mlx_decode import HELD, Shape
from cortexmlx.metal.compare.traffic import launches
from cortexmlx.metal.cost import arithmetic
from cortexmlx.metal.cost.compiled import MATRIX, OURS, WIDE, kept_record, work
from cortexmlx.metal.cost.counts import Counted, count
from cortexmlx.metal.cost.cycles import Kind, Work, together
from cortexmlx.metal.rules import GEOMETRIES, Variant, refusal
from cortexmlx.metal.shape import Kernel
from cortexmlx.metal.sources import BIASES, SCALES, SLABS

BLOCK_TOKENS = 128
"""Tokens of a block of MLX's two passes, as its host code chooses at 32,768 tokens on a Pro or Max."""

_BLOCKS = 4
_PARTITIONS = 2


@dataclass(frozen=True)
class Cost:
    """What a kernel spends per token and KV head."""

    kernel: str
    group: int
    counted: Counted
    text: Work
    """The arithmetic that the kernel's text asks for."""
    compiled: Work | None
    """The arithmetic of the compiled kernel. None if the record does not have this text."""

    @property
    def work(self) -> Work:
        """All known instructions: those of the compiled kernel, or those of the text if it is not compiled."""
        return self.least if self.compiled is None else together(self.counted.work, self.compiled)

    @property
    def least(self) -> Work:
        """The instructions that the text asks for."""
        return together(self.counted.work, self.text)

    @property
    def live_bytes(self) -> float:
        """Bytes of a token's key and value."""
        return self.counted.live_bytes


@cache
def paged(variant: Variant) -> Cost:
    """Return the cost of a variant's kernel on one row whose tokens are all in the arena."""
    geometry = variant.geometry
    tokens = _PARTITIONS * geometry.partition
    decode, _ = launches(variant, tokens)
    apart = (*SCALES, *BIASES) if variant.kv_bits else ()
    counted = count(decode, SLABS, tokens, variant.bytes_per_token / 2, apart)
    heads = min(geometry.tile, variant.group) * geometry.tiles * geometry.parts
    if variant.kernel is Kernel.MATRIX:
        name, text = MATRIX, arithmetic.paged_matrix(variant)
    elif variant.kernel is Kernel.WIDE:
        name, text = WIDE, arithmetic.paged_wide(variant)
    else:
        name, text = OURS, arithmetic.paged_decode(variant)
        heads = geometry.tile * geometry.tiles
    return Cost(name, variant.group, counted, text, _compiled(name, variant.label, heads, counted, text))


@cache
def mlx(kernel: str, dtype: str, dim: int, group: int) -> Cost:
    """Return the cost of one of MLX's kernels, by its name, on one row of contiguous keys and values."""
    shape = Shape(dtype, dim, group, _BLOCKS * BLOCK_TOKENS)
    with sim.recording() as recorded:
        if kernel == "sdpa_vector":
            mlx_decode.one_pass(shape)
        elif kernel == "sdpa_vector_2pass_1":
            mlx_decode.two_pass(shape, _BLOCKS)
        else:
            mlx_decode.two_pass_gqa(shape, _BLOCKS, HELD[dim])
    slabs = ("buffer(1)", "buffer(2)")
    counted = count(recorded.last, slabs, shape.tokens, dim * ITEMSIZE[dtype])
    text = arithmetic.mlx_decode(dim, group)
    return Cost(kernel, group, counted, text, _compiled(kernel, f"{dtype}, head_dim {dim}", group, counted, text))


def _compiled(kernel: str, name: str, heads: int, counted: Counted, text: Work) -> Work | None:
    found = kept_record().find(kernel, name)
    run_time = sum(counted.work.get(kind, 0.0) for kind in (Kind.SHUFFLE_SAME, Kind.SHUFFLE_ANY))
    return work(found, heads, text[Kind.EXPONENT], run_time) if found else None


def candidates(variant: Variant) -> list[Variant]:
    """Return the variant for every kernel that serves it. The chosen kernel is the first."""
    others = (replace(variant, forced=kernel) for kernel in GEOMETRIES if kernel is not variant.kernel)
    return [variant, *(other for other in others if refusal(other) is None)]


def beside(variant: Variant) -> Iterator[Cost]:
    """Yield the costs of our kernels and of MLX's kernels for the same shape. Our chosen kernel is the first."""
    yield from map(paged, candidates(variant))
    dim = variant.key_dim
    plain = variant.kv_bits is None and not (variant.softcap or variant.alibi)
    if plain and dim == variant.value_dim and dim in (64, 96, 128, 192, 256):
        yield mlx("sdpa_vector", variant.kv_dtype, dim, variant.group)
        yield mlx("sdpa_vector_2pass_1", variant.kv_dtype, dim, variant.group)
        if variant.group == 8 and dim in HELD and mlx_decode.has_two_pass_gqa():
            yield mlx("sdpa_vector_2pass_1_gqa", variant.kv_dtype, dim, variant.group)
