"""What decode attention reads, counted by the simulator.

A figure is a ratio: the bytes read or written, over the bytes that must be read. Each live key and value must be read
once per KV head. The column `coalesced` is a ratio of memory segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.metal.kernels import DecodeInputs, DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.sim.report import LaunchReport
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.sources import BIASES, SCALES, SLABS
from cortexmlx.metal.work import SMALL, make_work_list, pad_tables


@dataclass(frozen=True)
class DecodeTraffic:
    """Traffic of one row's decode attention, over the bytes that must be read."""

    distinct: float
    """Keys and values, where a byte counts once per threadgroup."""
    loaded: float
    """Keys and values, where every load counts."""
    coalescing: float
    """Memory segments that the loaded bytes would fill, over the segments fetched. 1.0 is ideal."""
    partials: float
    """Partial results: what the decode kernel writes and the reduce kernel reads again."""


def measure(
    variant: Variant,
    tokens: int,
    *,
    tail_tokens: int = 0,
    window: int | None = None,
    kv_heads: int = 1,
) -> DecodeTraffic:
    """Measure a row of `tokens` tokens, the last `tail_tokens` in the tail."""
    decode, reduce = launches(variant, tokens, tail_tokens=tail_tokens, window=window, kv_heads=kv_heads)
    needed = min(tokens, window or tokens) * kv_heads * variant.bytes_per_token
    buffers = [b for name, b in decode.buffers.items() if name in (*SLABS, *SCALES, *BIASES)]
    segments = sum(b.simd_segments for b in buffers)
    return DecodeTraffic(
        distinct=sum(b.group_distinct_read for b in buffers) / needed,
        loaded=sum(b.bytes_read for b in buffers) / needed,
        coalescing=sum(b.simd_ideal_segments for b in buffers) / segments,
        partials=(decode.buffers["partials"].bytes_written + reduce.buffers["partials"].distinct_read) / needed,
    )


def launches(
    variant: Variant, tokens: int, *, tail_tokens: int = 0, window: int | None = None, kv_heads: int = 1
) -> tuple[LaunchReport, LaunchReport]:
    """Return the recorded decode launch and reduce launch for one row of `tokens` tokens."""
    arena_tokens = tokens - tail_tokens
    blocks = -(-arena_tokens // variant.block_size)
    dtype = getattr(mx, variant.kv_dtype)
    slots, heads = max(blocks, 1) * variant.block_size, kv_heads * variant.group
    dims = (variant.key_dim, variant.value_dim)
    keys, values, tail_keys, tail_values = (
        mx.ones((*heads_and_tokens, dim), dtype)
        for heads_and_tokens in ((kv_heads, slots), (1, kv_heads, 16))
        for dim in dims
    )
    slabs, scales, biases = [keys, values, tail_keys, tail_values], [], []
    if variant.kv_bits is not None and variant.quant_group is not None:
        each = [mx.quantize(numbers, group_size=variant.quant_group, bits=variant.kv_bits) for numbers in slabs]
        slabs, scales, biases = ([parts[n] for parts in each] for n in range(3))
    work = make_work_list(
        np.array([arena_tokens], np.int32), tail_tokens, AttentionWindow(window), variant.geometry.partition
    )
    inputs = DecodeInputs(
        mx.ones((1, heads, 1, variant.key_dim), getattr(mx, variant.dtype)),
        slabs[0],
        None if variant.latent else slabs[1],
        slabs[2],
        None if variant.latent else slabs[3],
        mx.array(pad_tables(np.arange(max(blocks, 1), dtype=np.int32)[None, ::-1])),
        mx.array(work.plan),
        mx.array([1.0, 0.0]),
        mx.zeros(max(SMALL, heads)),
        mx.zeros(max(SMALL, heads)),
        tuple(scales),
        tuple(biases),
    )
    with sim.recording() as recorded:
        DecodeKernels(sim.metal_kernel)(variant, work.items, inputs)
    decode, reduce = recorded.launches
    return decode, reduce
