"""What a layer keeps for each token, against the bytes of arrays of that shape."""

from __future__ import annotations

import mlx.core as mx
import pytest

from cortexmlx.kv.spec import ITEMSIZE, KVSpec, LayerGroup, group_layers


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize(("heads", "key", "value"), [(1, 8, 8), (4, 128, 64), (2, 576, 0), (0, 0, 0)])
def test_a_tokens_bytes_are_those_of_its_arrays(dtype: str, heads: int, key: int, value: int) -> None:
    spec = KVSpec(heads, key, value, dtype)
    arrays = [mx.zeros((heads, 1, dim), getattr(mx, dtype)) for dim in (key, value)]
    assert spec.bytes_per_token == sum(a.nbytes for a in arrays)
    assert LayerGroup(spec, (0, 3, 4)).bytes_per_token == 3 * spec.bytes_per_token


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize(("bits", "group"), [(8, 64), (8, 32), (4, 64), (4, 32)])
def test_a_quantized_tokens_bytes_are_those_of_mlx_s_arrays(dtype: str, bits: int, group: int) -> None:
    for latent in (False, True):
        spec = KVSpec(3, 128, 64, dtype, value_in_key=latent, kv_bits=bits, kv_group_size=group)
        kept = [mx.zeros((3, 1, dim), getattr(mx, dtype)) for dim in ((128,) if latent else (128, 64))]
        arrays = [part for numbers in kept for part in mx.quantize(numbers, group, bits)]
        assert [(a.shape[-1], a.dtype) for a in arrays] == [(n, getattr(mx, t)) for n, t in spec.slab_arrays]
        assert spec.bytes_per_token == sum(a.nbytes for a in arrays)


def test_layers_of_equal_specs_are_one_group_in_the_order_of_their_first() -> None:
    full, window = KVSpec(2, 8, 8, "float16"), KVSpec(2, 8, 8, "float16", window=4)
    groups = group_layers([window, full, window, full, full])
    assert [(g.spec, tuple(g.layers)) for g in groups] == [(window, (0, 2)), (full, (1, 3, 4))]
    assert group_layers([]) == ()
