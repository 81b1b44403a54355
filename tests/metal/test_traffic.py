"""How many bytes decode attention reads, as the simulator counts them."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.metal.kernels import DecodeInputs, DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.sim.report import LaunchReport
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.shape import SIMDGROUP, Kernel
from cortexmlx.metal.sources import BIASES, SCALES, SLABS
from cortexmlx.metal.vector import lane_numbers
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


LIMIT = 1.05


def threadgroup_loads(v: Variant) -> float:
    """How often each number is read on average: a key by each tile and part of the value, a value by each tile."""
    tiles, parts = v.geometry.tiles, v.geometry.parts
    return tiles * (v.key_dim * parts + v.value_dim) / (v.key_dim + v.value_dim)


@pytest.mark.parametrize(("group", "tokens", "window"), [(3, 512, None), (16, 1300, 700)])
def test_each_live_number_is_read_once_per_tile(group: int, tokens: int, window: int | None) -> None:
    v = Variant("float16", "float16", 64, 64, 32, group)
    traffic = measure(v, tokens, tail_tokens=7, window=window, kv_heads=2)
    assert 1.0 <= traffic.distinct / threadgroup_loads(v) <= LIMIT
    if v.kernel is Kernel.VECTOR:
        assert traffic.coalescing == 1.0
    else:
        # Here a lane's 16 bytes are two loads of 8. One meets half of 64 bytes of each of eight keys, in as many lines;
        # or half of each of four values. The other loads take the rest of the same lines.
        assert traffic.coalescing == pytest.approx((2 + 2) / (8 + 4), abs=0.01)


@pytest.mark.parametrize(
    "v",
    [
        Variant("float16", "float16", 64, 32, 32, 9, latent=True),
        pytest.param(Variant("float16", "float16", 576, 512, 32, 16, latent=True), marks=pytest.mark.slow),
        pytest.param(Variant("bfloat16", "bfloat16", 576, 512, 32, 3, latent=True), marks=pytest.mark.slow),
        pytest.param(Variant("float16", "float16", 512, 512, 32, 8), marks=pytest.mark.slow),
    ],
    ids=lambda v: v.label,
)
def test_a_threadgroup_of_the_wide_kernel_reads_each_live_number_once(v: Variant) -> None:
    """Of latent attention the keys alone. The slices of 16 tokens that a window cuts are not read beyond it."""
    for window in (None, 300):
        traffic = measure(v, 700, tail_tokens=7, window=window, kv_heads=2)
        tiles = v.geometry.tiles
        assert tiles <= traffic.distinct <= LIMIT * tiles, "a threadgroup for each tile"
        assert tiles <= traffic.loaded <= LIMIT * tiles
    partials = 2 * 4 * v.group * v.partial_floats / (v.geometry.partition * v.token_numbers * 2)
    assert measure(v, 2 * v.geometry.partition).partials == pytest.approx(partials)


def test_query_heads_share_what_is_loaded() -> None:
    traffic = measure(Variant("float16", "float16", 128, 128, 32, 8), 512)
    vector = measure(Variant("float16", "float16", 128, 128, 32, 8, forced_kernel=Kernel.VECTOR), 512)
    assert vector.loaded <= LIMIT
    assert traffic.loaded <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("group", range(1, 17))
def test_each_live_number_is_read_once_per_tile_in_every_shape(group: int) -> None:
    """A lane of the vector kernel that has no number of a head loads the head's last ones once more, without a branch:
    from the same line of memory, so that nothing more is read there.
    """
    for place, dim in enumerate((64, 80, 96, 112, 128, 192, 256)):
        v = Variant("bfloat16", "bfloat16", dim, dim, 32, group)
        lanes = SIMDGROUP * lane_numbers(dim) / dim if v.kernel is Kernel.VECTOR else 1
        tokens, window = ((512, None), (4097, None), (3000, 600))[(place + group) % 3]
        traffic = measure(v, tokens, tail_tokens=16, window=window)
        assert 1.0 <= traffic.distinct / threadgroup_loads(v) <= LIMIT
        assert traffic.loaded <= LIMIT * threadgroup_loads(v) * lanes


def test_codes_scales_and_biases_are_read_once_per_kv_head() -> None:
    v = Variant("float16", "float16", 64, 64, 32, 8, kv_bits=4, quant_group=64)
    assert v.bytes_per_token == 2 * (64 * 4 // 8 + 2 * 2)
    assert 1.0 <= measure(v, 300, tail_tokens=7, kv_heads=2).distinct <= LIMIT
