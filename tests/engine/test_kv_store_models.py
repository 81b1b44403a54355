"""A store that models share: none is served the keys and values of another, however much alike they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from support.adapters import write_adapter
from support.core_driver import Driver
from support.stored import Stored
from support.tiny import tokens_of

LONG = tokens_of(90, seed=4)


def negated(folder: Path, target: Path, file: str, part: str) -> Path:
    """A copy of a model or an adapter in which some matrices have the other sign."""
    shutil.copytree(folder, target)
    weights = mx.load(str(folder / file))
    weights = {name: -array if part in name else array for name, array in weights.items()}
    mx.save_safetensors(str(target / file), weights, metadata={"format": "mlx"})
    return target


@pytest.mark.parametrize("part", ["v_proj", "layers.0.self_attn.k_proj", "down_proj"])
def test_a_model_with_a_negated_matrix_is_another_model(part: str, tiny: Any, theirs: Any, tmp_path: Path) -> None:
    other = negated(tiny("llama"), tmp_path / "negated", "model.safetensors", part)
    right = list(Driver(other).answers([LONG], 10)[0])
    with Stored(tiny("llama"), tmp_path / "kv") as driver:
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 0)
    with Stored(other, tmp_path / "kv") as driver:
        assert driver.ask(LONG) == (right, 0)
    for folder, answer in ((tiny("llama"), theirs("llama", LONG, 10)), (other, right)):
        with Stored(folder, tmp_path / "kv") as driver:
            assert driver.ask(LONG) == (answer, 88)


def test_a_negated_adapter_is_another_adapter(tiny: Any, tmp_path: Path) -> None:
    keys = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    plus = write_adapter(tmp_path / "plus", tiny("llama"), num_layers=2, keys=keys, scale=8.0)
    minus = negated(plus, tmp_path / "minus", "adapters.safetensors", "lora_b")
    right = list(Driver(tiny("llama"), adapter=minus).answers([LONG], 10)[0])
    with Stored(tiny("llama"), tmp_path / "kv", adapter=plus) as driver:
        assert list(driver.ask(LONG)[0]) != right
    for cached in (0, 88):
        with Stored(tiny("llama"), tmp_path / "kv", adapter=minus) as driver:
            assert driver.ask(LONG) == (right, cached)
