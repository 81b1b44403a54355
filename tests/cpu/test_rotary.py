"""Shared angles: the same bits as MLX's own rotary embedding, and nothing shared where it would not be the same."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from cortexmlx.cpu.rotary import SharedRoPE, share_angles

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="angles are shared on a CPU only")


class TwoLayers(nn.Module):
    """Two attention layers' worth of rotary embeddings, the second with its own base."""

    def __init__(self, dims: int, traditional: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.layers = [nn.Module(), nn.Module()]
        for layer, base in zip(self.layers, (10_000.0, 500_000.0), strict=True):
            layer.rope = nn.RoPE(dims, traditional=traditional, base=base, scale=scale)


def flat(tokens: int, heads: int, dims: int, seed: int = 0) -> mx.array:
    """Queries as a model makes them of a flat step: `[T, heads, 1, dims]`, transposed."""
    values = np.random.default_rng(seed).normal(size=(tokens, 1, heads, dims)).astype(np.float32)
    return mx.array(values).transpose(0, 2, 1, 3)


POSITIONS = [0, 1, 2, 700, 701, 8_191, 5, 31]


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("tokens", [1, 8])
def test_shared_angles_give_the_bits_of_mlx(traditional: bool, scale: float, tokens: int) -> None:
    model = TwoLayers(64, traditional, scale)
    own = [layer.rope for layer in model.layers]
    angles = share_angles(model)
    for step in range(2):
        positions = mx.array([p + 16 * step for p in POSITIONS[:tokens]], mx.int32)
        angles.begin(positions)
        for layer, rope in zip(model.layers, own, strict=True):
            assert type(layer.rope) is SharedRoPE
            for heads in (3, 9):
                x = flat(tokens, heads, 64, seed=step)
                assert mx.array_equal(layer.rope(x, offset=positions), rope(x, offset=positions))


def test_other_offsets_and_shapes_are_rotated_by_mlx() -> None:
    model = TwoLayers(16, traditional=False)
    own = model.layers[0].rope
    angles = share_angles(model)
    positions = mx.array([3, 4], mx.int32)
    angles.begin(positions)
    shared = model.layers[0].rope
    longer = mx.array(np.random.default_rng(1).normal(size=(1, 2, 5, 16)).astype(np.float32))
    wider, half = flat(2, 3, 24), flat(2, 3, 16).astype(mx.float16)
    elsewhere = mx.array([9, 90], mx.int32)
    for x, offset in ((longer, 7), (wider, positions), (half, positions), (flat(2, 3, 16), elsewhere)):
        turned = shared(x, offset=offset)
        assert turned.dtype == x.dtype
        assert mx.array_equal(turned, own(x, offset=offset))


def test_a_step_computes_each_table_once() -> None:
    model = TwoLayers(16, traditional=False)
    model.layers[1].rope.base = model.layers[0].rope.base
    angles = share_angles(model)
    angles.begin(mx.array([1, 2], mx.int32))
    for layer in model.layers:
        layer.rope(flat(2, 3, 16), offset=angles.positions)
        if layer is model.layers[0]:
            (first,) = angles.tables.values()
    assert [table is first for table in angles.tables.values()] == [True]
    angles.begin(mx.array([2, 3], mx.int32))
    assert not angles.tables


def test_embeddings_of_other_kinds_are_left_alone() -> None:
    class Scaled(nn.RoPE):
        pass

    model = TwoLayers(16, traditional=False)
    model.layers[0].rope = Scaled(16)
    share_angles(model)
    assert type(model.layers[0].rope) is Scaled
