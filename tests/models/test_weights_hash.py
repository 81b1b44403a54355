"""The hash of a model's weights: of its files, as long as memory holds what they say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from cortexmlx.models import LoadedModel, load_model
from cortexmlx.models.weights_hash import WeightsHash, hash_arrays
from support.models.adapters import write_adapter


def hashed(
    folder: Path, change: Callable[[Any], object] = lambda model: None, **options: Any
) -> tuple[LoadedModel, str | None]:
    """A model that is loaded, changed and checked, and its hash."""
    weights = WeightsHash(lambda: None)
    loaded = load_model(folder, weights_hash=weights, **options)
    change(loaded.model)
    weights.check_arrays(loaded.model)
    return loaded, weights.value()


def test_files_and_how_they_are_read_count(tiny: Any, tmp_path: Path) -> None:
    adapters = [write_adapter(tmp_path / f"{n}", tiny("llama"), num_layers=n) for n in (1, 2)]
    folder = shutil.copytree(tiny("llama"), tmp_path / "copy")
    values = [hashed(tiny("llama"))[1], *(hashed(tiny("llama"), adapter=a)[1] for a in adapters)]
    assert len({*values, None}) == 4
    assert hashed(folder)[1] == values[0], "wherever it lies"


def test_a_large_folder_in_parts_is_hashed_part_by_part(tiny: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "parts")
    weights = dict(mx.load(str(folder / "model.safetensors")))
    (folder / "model.safetensors").unlink()
    for number, names in enumerate((sorted(weights)[:5], sorted(weights)[5:])):
        mx.save_safetensors(str(folder / f"model-{number}.safetensors"), {name: weights[name] for name in names})
    before = hashed(folder)[1]
    changed = {name: weights[name] for name in sorted(weights)[5:]}
    changed[sorted(weights)[5]] = -changed[sorted(weights)[5]]
    mx.save_safetensors(str(folder / "model-1.safetensors"), changed)
    assert None is not hashed(folder)[1] != before is not None


def _first(model: Any) -> Any:
    return model.layers[0].self_attn.q_proj


def _written(model: Any) -> None:
    _first(model).weight[0] = 7


def _replaced(model: Any) -> None:
    _first(model).weight = mx.array(_first(model).weight + 0)


def _transposed(model: Any) -> None:
    _first(model).weight = _first(model).weight.T


def _exchanged(model: Any) -> None:
    one, other = (layer.self_attn.q_proj for layer in model.layers[:2])
    one.weight, other.weight = other.weight, one.weight


def _narrower(model: Any) -> None:
    model.set_dtype(mx.float16)


def _with_a_bias(model: Any) -> None:
    _first(model).bias = mx.ones((32,))


CHANGES = [_written, _replaced, _transposed, _exchanged, _narrower, _with_a_bias]


@pytest.mark.parametrize("change", CHANGES)
def test_what_an_app_changes_in_memory_is_not_the_files(change: Any, tiny: Any) -> None:
    assert hashed(tiny("llama"), change)[1] is None


@pytest.mark.parametrize("change", CHANGES)
def test_arrays_are_still_held_if_their_bits_are_the_same(change: Any, tiny: Any) -> None:
    """Those that a model's own pass made anew are; whatever an app changed is not."""
    weights, model = WeightsHash(lambda: None), load_model(tiny("llama")).model
    assert not weights.has_held_arrays(model)
    weights.hold_arrays(model)
    assert weights.has_held_arrays(model)
    model.update(tree_map(lambda array: mx.array(np.array(array)), model.parameters()))
    assert weights.has_held_arrays(model)
    change(model)
    assert weights.has_held_arrays(model) is (change is _replaced)


def test_who_does_not_check_gets_no_hash(tiny: Any) -> None:
    weights = WeightsHash(lambda: None)
    assert weights.value() is None
    loaded = load_model(tiny("llama"), weights_hash=weights)
    assert weights.value() is None
    weights.check_arrays(loaded.model)
    assert weights.value() is not None
    weights.cancel()
    assert weights.value() is None


def test_files_that_change_while_they_are_loaded_have_no_hash(tiny: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "changing")

    def mend(model: Any) -> None:
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-1] ^= 0x80
        (folder / "model.safetensors").write_bytes(data)

    assert hashed(folder, mend)[1] is None


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.uint8, mx.bool_])
def test_arrays_of_any_form_are_hashed_by_their_numbers_in_order(dtype: mx.Dtype) -> None:
    """Strided, transposed, of one number or none: the hash is that of a dense copy."""
    numbers = mx.array(np.random.default_rng(0).integers(0, 2, (6, 4))).astype(dtype)
    for array in (numbers, numbers.T, numbers[::2], numbers[:, 1], numbers[:0], numbers[0, 0]):
        copy = mx.array(np.array(array.astype(mx.float32))).astype(dtype)
        assert hash_arrays([array]) == hash_arrays([copy])
    assert hash_arrays([numbers]) != hash_arrays([mx.contiguous(numbers.T)])
    assert hash_arrays([numbers, numbers[0]]) != hash_arrays([numbers[0], numbers])
