"""The lines of an entry that say where keys and values lie, and the inputs that they name."""

from __future__ import annotations

import re

from cortexmlx.metal.sources import BIASES, PLAIN, QUANTIZED, SCALES, SLABS

INPUT = r"\b(?:arena|tail)_(?:keys|values)(?:_scales|_biases)?\b(?!_shape)"


def test_every_input_is_named_once_and_no_other() -> None:
    assert sorted(re.findall(INPUT, PLAIN)) == sorted(SLABS)
    assert sorted(re.findall(INPUT, QUANTIZED)) == sorted((*SLABS, *SCALES, *BIASES))


def test_plain_pointers_are_moved_by_64_bits_and_quantized_ones_are_not() -> None:
    assert PLAIN.count("first_slot *") == PLAIN.count("first_column *") == 2
    assert "first_slot *" not in QUANTIZED and QUANTIZED.count("uint(first_slot)") == 2


def test_scales_and_biases_are_in_the_order_of_the_slabs() -> None:
    assert [name.removesuffix("_scales") for name in SCALES] == list(SLABS)
    assert [name.removesuffix("_biases") for name in BIASES] == list(SLABS)
