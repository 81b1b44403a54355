"""A store that models share: none is served the keys and values of another, however much alike they are."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tuner.utils import linear_to_lora_layers

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.core import EngineCore
from cortexmlx.errors import ModelCorrupt, ModelNotFound
from cortexmlx.models import LoadedModel, load_model
from support.engine.core_driver import Driver
from support.models.adapters import write_adapter
from support.models.tiny import tokens_of
from support.store.stored import Stored

LONG = tokens_of(90, seed=4)


def negated(folder: Path, target: Path, file: str, part: str) -> Path:
    """A copy of a model or an adapter in which some matrices have the other sign."""
    shutil.copytree(folder, target)
    weights = mx.load(str(folder / file))
    weights = {name: -array if part in name else array for name, array in weights.items()}
    mx.save_safetensors(str(target / file), weights, metadata={"format": "mlx"})
    return target


@pytest.mark.parametrize("part", ["layers.0.self_attn.k_proj", "down_proj"])
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


def _edited(model: Any) -> None:
    for layer in model.layers:
        layer.self_attn.v_proj.weight[:] = -layer.self_attn.v_proj.weight


def _with_lora(model: Any) -> None:
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 8.0, "dropout": 0.0, "keys": ["self_attn.v_proj"]})
    for number, layer in enumerate(model.layers):
        layer.self_attn.v_proj.lora_b = mx.random.normal(layer.self_attn.v_proj.lora_b.shape, key=mx.random.key(number))


def _merged(model: Any) -> None:
    _with_lora(model)
    for layer in model.layers:
        layer.self_attn.v_proj = layer.self_attn.v_proj.fuse()


@pytest.mark.parametrize("change", [_edited, _with_lora, _merged])
def test_weights_that_an_app_changes_while_it_loads_are_another_model(
    change: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are the same, and their hash is kept."""
    with Stored(tiny("llama"), tmp_path / "kv") as driver:
        driver.ask(LONG)

    def changed(*arguments: Any, **options: Any) -> LoadedModel:
        mx.random.seed(0)
        loaded = load_model(*arguments, **options)
        change(loaded.model)
        return loaded

    monkeypatch.setattr("cortexmlx.core.in_process_model.load_model", changed)
    right = list(Driver(tiny("llama")).answers([LONG], 10)[0])
    for cached in (0, 88):
        with Stored(tiny("llama"), tmp_path / "kv") as driver:
            assert driver.ask(LONG) == (right, cached)


def test_who_has_no_store_hashes_nothing(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortexmlx.disk.hashes.FileHash.__init__", lambda *_: 1 // 0)
    Driver(tiny("llama"))
    Driver(tiny("llama"), kv_store=tmp_path / "kv", prefix_cache=False)
    assert not (tmp_path / "kv").exists()


def test_a_model_is_read_once_for_its_hash(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        first = driver.ask(LONG)[0]
    monkeypatch.setattr("cortexmlx.disk.hashes._FileSource.hash_range", lambda *_: 1 // 0)
    with Stored(tiny("llama"), tmp_path) as driver:
        assert driver.ask(LONG) == (first, 88)


def test_nobody_hashes_for_an_opening_that_failed(tiny: Any, tmp_path: Path) -> None:
    """A folder that holds no model leaves no store behind, and a damaged one no thread."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    for model, error in ((folder, ModelCorrupt), (tmp_path, ModelNotFound)):
        with pytest.raises(error):
            EngineCore(EngineConfig(model, kv_store=tmp_path / "kv"))
    assert not [thread for thread in threading.enumerate() if thread.name == "cortexmlx-hash"]
