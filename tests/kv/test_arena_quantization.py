"""Quantized arrays and what they stand for, against the definition in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.kv.arena import QUANTIZED_PARTS, Quantization


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [32, 64])
def test_several_arrays_become_three_each_and_come_back_within_a_step(bits: int, group: int) -> None:
    form = Quantization(bits, group)
    random = np.random.default_rng(bits + group)
    keys, values = (random.standard_normal((2, 5, dim)).astype(np.float32) for dim in (64, 128))
    parts = form.quantize(mx.array(keys), mx.array(values))
    assert len(parts) == 2 * QUANTIZED_PARTS
    assert [p.shape[-1] for p in parts] == [n for d in (64, 128) for n in (d * bits // 32, d // group, d // group)]
    for numbers, back, scales in zip((keys, values), form.dequantize(parts), (parts[1], parts[4]), strict=True):
        steps = np.repeat(np.abs(np.array(scales)), group, axis=-1)
        assert (np.abs(np.array(back) - numbers) <= 1.1 * steps).all(), "MLX moves the scale so that 0 is a code"
    codes = np.array(parts[0]).view(np.uint8)[0, 0]
    first = codes[0] & (1 << bits) - 1
    meant = float(np.array(parts[1])[0, 0, 0]) * int(first) + float(np.array(parts[2])[0, 0, 0])
    assert meant == pytest.approx(float(np.array(form.dequantize(parts[:QUANTIZED_PARTS])[0])[0, 0, 0]), abs=1e-6)
