"""How many bytes decode attention reads, as the simulator counts them."""

from __future__ import annotations

import pytest

from cortexmlx.metal.rules import Variant
from cortexmlx.metal.shape import SIMDGROUP, Kernel
from cortexmlx.metal.vector import lane_numbers
from support.kernels.traffic import measure

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
