"""A model's fingerprint: the same in every process, another for whatever changes keys and values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from cortexmlx.execution.fingerprint import fingerprint
from cortexmlx.models import LoadedModel, load_model
from support.adapters import write_adapter


@pytest.fixture
def loaded(tiny: Any) -> LoadedModel:
    return load_model(tiny("llama"))


def test_it_is_the_same_for_the_same_and_names_all_else(loaded: LoadedModel, tiny: Any) -> None:
    again = load_model(tiny("llama"))
    assert fingerprint(loaded, 8) == fingerprint(again, 8)
    turned = replace(again, config=again.config | {"rope_theta": 20000.0})
    others = [fingerprint(x, n) for x, n in ((again, 16), (turned, 8), (load_model(tiny("one layer")), 8))]
    assert len({fingerprint(loaded, 8), *others}) == 4


def test_an_adapters_scale_counts(tiny: Any, tmp_path: Path) -> None:
    """It is a plain number of its layers: the same matrices with another one compute other keys and values."""
    adapters = [write_adapter(tmp_path / f"{scale:g}", tiny("llama"), scale=scale) for scale in (2.0, 20.0)]
    one, other, again = (load_model(tiny("llama"), adapter=adapters[i]) for i in (0, 1, 0))
    assert fingerprint(one) == fingerprint(again) != fingerprint(other)


@pytest.mark.parametrize("bit", [1, 0x8000, 0x80000000])
def test_one_bit_of_one_weight_is_enough(loaded: LoadedModel, bit: int) -> None:
    """The first, the last, and one in between, of a large weight and of a small one."""
    before = fingerprint(loaded)
    for name, array in tree_flatten(loaded.model.parameters())[:3]:
        for place in (0, array.size // 2, array.size - 1):
            words = np.array(array.view(mx.uint32)).reshape(-1)
            words[place] ^= bit
            changed = mx.array(words.reshape(array.shape)).view(array.dtype)
            loaded.model.load_weights([(name, changed)], strict=False)
            assert fingerprint(loaded) != before
            loaded.model.load_weights([(name, array)], strict=False)
    assert fingerprint(loaded) == before


def test_weights_of_any_size_and_type_count() -> None:
    """Above one row of sums, above as many as are made at once, odd sizes, packed and half-precision ones."""
    import mlx.nn as nn

    for dtype, size in [(mx.float16, 65537), (mx.uint32, 300_000), (mx.bfloat16, 3), (mx.float32, 9_000_001)]:
        module = nn.Module()
        module.weight = mx.zeros((size,), dtype)
        model = LoadedModel(module, None, {}, "x", "x", 1, 1, 1, "float32")  # type: ignore[arg-type]
        before = fingerprint(model)
        for place in (0, size // 2, size - 1):
            module.weight = mx.zeros((size,), dtype)
            module.weight[place] = 1
            assert fingerprint(model) != before, (dtype, place)
