"""What can be quantized, and how much more then fits."""

from __future__ import annotations

import pytest

from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.sizing import tokens_that_fit
from cortexmlx.kv.spec import KVSpec, LayerGroup, describe_quantization, quantize_groups


def groups_of(*dims: int, dtype: str = "float16") -> tuple[LayerGroup, ...]:
    return tuple(LayerGroup(KVSpec(2, dim, dim, dtype), (layer,)) for layer, dim in enumerate(dims))


@pytest.mark.parametrize(("dims", "asked", "group"), [((64,), None, 64), ((64, 96), None, 32), ((128, 64), 32, 32)])
def test_the_largest_group_that_divides_every_head_is_taken(
    dims: tuple[int, ...], asked: int | None, group: int
) -> None:
    made = quantize_groups(groups_of(*dims), 4, asked)
    assert [(g.spec.kv_bits, g.spec.kv_group_size, g.spec.key_dim) for g in made] == [(4, group, d) for d in dims]
    assert describe_quantization(made) == f"4 bits in groups of {group}"


def test_without_bits_everything_stays_as_it_is() -> None:
    groups = groups_of(80, 8)
    assert quantize_groups(groups, None) == groups and describe_quantization(groups) == ""


def test_layers_without_keys_stay_as_they_are() -> None:
    recurrent = LayerGroup(KVSpec(0, 0, 0, "float16", row_bytes=12), (1,))
    paged, other = quantize_groups((*groups_of(64), recurrent), 8)
    assert paged.spec.kv_bits == 8 and other == recurrent
    assert describe_quantization((other, paged)) == "8 bits in groups of 64"


def test_what_groups_do_not_divide_is_refused_by_its_numbers() -> None:
    with pytest.raises(ModelUnsupported, match=r"of 80 numbers .* groups of 32, .* without kv_bits"):
        quantize_groups(groups_of(64, 80), 8)
    with pytest.raises(ModelUnsupported, match=r"of 32 and 96 numbers .* groups of 64, .* choose kv_group_size 32"):
        quantize_groups(groups_of(32, 96, 64), 8, 64)
    latent = LayerGroup(KVSpec(1, 96, 80, "float16", value_in_key=True), (0,))
    with pytest.raises(ModelUnsupported, match="of 80 numbers"):
        quantize_groups((latent,), 8)


def test_a_model_without_keys_and_values_has_nothing_to_quantize() -> None:
    with pytest.raises(ModelUnsupported, match="no layer keeps keys and values"):
        quantize_groups((LayerGroup(KVSpec(0, 0, 0, "float32", row_bytes=12), (0,)),), 8)


@pytest.mark.parametrize(
    ("bits", "dtype", "beside", "times"),
    [
        (8, "float16", "float16", 1.85),
        (8, "float16", "float32", 3.6),
        (8, "float32", "float32", 3.5),
        (4, "bfloat16", "bfloat16", 3.4),
        (4, "float16", "float32", 6.8),
        (4, "float32", "float32", 6.4),
    ],
)
def test_tokens_that_fit_in_a_gigabyte(bits: int, dtype: str, beside: str, times: float) -> None:
    """Beside those of plain numbers. A model in float32 has scales in float32."""
    more = tokens_that_fit(quantize_groups(groups_of(64, 64, dtype=dtype), bits), 10**9)
    plain = tokens_that_fit(groups_of(64, 64, dtype=beside), 10**9)
    assert more is not None and plain is not None
    assert more / plain == pytest.approx(times, rel=0.05) and more / plain >= times
