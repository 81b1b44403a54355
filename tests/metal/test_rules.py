"""The rules of which variant is served."""

from __future__ import annotations

from cortexmlx.metal.rules import Variant, refusal


def test_every_variant_fits_a_threadgroup() -> None:
    for dim in (64, 80, 96, 112, 128, 192, 256):
        for group in range(1, 33):
            v = Variant("float32", "float32", dim, dim, 32, group)
            assert refusal(v) is None
            assert v.tile * v.tiles >= group > v.tile * (v.tiles - 1)
    assert refusal(Variant("float32", "float32", 256, 256, 32, 71)) is not None
