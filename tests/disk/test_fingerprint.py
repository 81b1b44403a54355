"""A model's fingerprint: the same in every process, another for whatever changes keys and values."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from cortexmlx.disk import setup as names
from cortexmlx.models import LoadedModel, load_model
from cortexmlx.models.weights_hash import WeightsHash, hash_model_arrays
from support.effort import examples
from support.models.adapters import write_adapter


def with_files(folder: Path, *, adapter: Path | None = None) -> str:
    """The fingerprint that an engine with a store gives a model."""
    weights = WeightsHash(lambda: None)
    loaded = load_model(folder, adapter=adapter, weights_hash=weights)
    weights.check_arrays(loaded.model)
    value = weights.value()
    assert value is not None
    return names.fingerprint(names.hash_all_but_weights(loaded), value)


def fingerprint(loaded: LoadedModel, *others: object) -> str:
    """The fingerprint of a model whose files say nothing."""
    return names.fingerprint(names.hash_all_but_weights(loaded, *others), hash_model_arrays(loaded.model))


def rewritten(folder: Path, target: Path, change: Any, file: str = "model.safetensors") -> Path:
    """A copy of a model or an adapter, each of whose arrays is `change(name, array)`."""
    shutil.copytree(folder, target)
    weights = {name: change(name, array) for name, array in mx.load(str(folder / file)).items()}
    mx.save_safetensors(str(target / file), weights, metadata={"format": "mlx"})
    return target


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
    for dtype, size in [(mx.float16, 65537), (mx.uint32, 300_000), (mx.bfloat16, 3), (mx.float32, 9_000_001)]:
        module = nn.Module()
        module.weight = mx.zeros((size,), dtype)
        model = LoadedModel(module, None, {}, "x", "x", 1, 1, 1, "float32")  # type: ignore[arg-type]
        before = fingerprint(model)
        for place in (0, size // 2, size - 1):
            module.weight = mx.zeros((size,), dtype)
            module.weight[place] = 1
            assert fingerprint(model) != before, (dtype, place)


SIGN = 0x80000000


@settings(max_examples=examples(30, few=10), deadline=None)
@given(data=st.data())
def test_no_set_of_bits_is_missed(data: st.DataObject) -> None:
    """Any number of changes, sign flips in pairs among them, which cancel each other in a sum modulo a power of two."""
    module = nn.Module()
    words = np.random.default_rng(0).integers(0, 1 << 32, (3, 40), np.uint32)
    module.weight = mx.array(words)
    model = LoadedModel(module, None, {}, "x", "x", 1, 1, 1, "float32")  # type: ignore[arg-type]
    before = fingerprint(model)
    bits = st.sampled_from([SIGN, 0x8000, 0x80008000, 1])
    flips = st.dictionaries(st.integers(0, 119), bits, min_size=1, max_size=8)
    changed = words.copy()
    for place, bit in data.draw(flips).items():
        changed.reshape(-1)[place] ^= np.uint32(bit)
    module.weight = mx.array(changed)
    assert fingerprint(model) != before
    module.weight = mx.array(words)
    assert fingerprint(model) == before


def _negated(part: str) -> Any:
    return lambda name, array: -array if part in name else array


def _rows_swapped(name: str, array: mx.array) -> mx.array:
    return array[::-1] if "q_proj" in name else array


def test_models_of_the_same_shapes_differ(tiny: Any, tmp_path: Path) -> None:
    """Negated matrices, permuted rows, and matrices that change places, told by files and by arrays."""
    layers = dict(mx.load(str(tiny("llama") / "model.safetensors")))

    def places_changed(name: str, array: mx.array) -> mx.array:
        other = (
            name.replace("layers.0.", "layers.X.").replace("layers.1.", "layers.0.").replace("layers.X.", "layers.1.")
        )
        return layers[other]

    changes = [_negated("v_proj"), _negated("layers.0.self_attn.k_proj"), _rows_swapped, places_changed]
    folders = [tiny("llama"), *(rewritten(tiny("llama"), tmp_path / str(n), c) for n, c in enumerate(changes))]
    assert len({with_files(folder) for folder in folders}) == 5
    assert len({fingerprint(load_model(folder)) for folder in folders}) == 5
    assert with_files(tiny("llama")) == with_files(tiny("llama"))


def test_negated_adapters_differ(tiny: Any, tmp_path: Path) -> None:
    """ "Task arithmetic" negates the one matrix of every pair."""
    plus = write_adapter(tmp_path / "plus", tiny("llama"))
    minus = rewritten(plus, tmp_path / "minus", _negated("lora_b"), "adapters.safetensors")
    by_files = {with_files(tiny("llama"), adapter=adapter) for adapter in (None, plus, minus)}
    by_arrays = {fingerprint(load_model(tiny("llama"), adapter=adapter)) for adapter in (None, plus, minus)}
    assert len(by_files) == len(by_arrays) == 3


def test_bfloat16_that_was_widened_counts_to_its_last_bit(tiny: Any, tmp_path: Path) -> None:
    """Widened, the lower half of every word is zero: two changes of the upper half may not cancel each other."""
    folders = []
    for bits in (0, 1, 0x80, 0x8000):

        def change(name: str, array: mx.array, bits: int = bits) -> mx.array:
            words = np.array(array.astype(mx.bfloat16).view(mx.uint16))
            if "v_proj" in name:
                words.reshape(-1)[[0, -1]] ^= np.uint16(bits)
            return mx.array(words).view(mx.bfloat16)

        folders.append(rewritten(tiny("llama"), tmp_path / str(bits), change))
    models = [load_model(folder) for folder in folders]
    assert {model.dtype for model in models} == {"float32"}
    assert len({fingerprint(model) for model in models}) == len({with_files(folder) for folder in folders}) == 4


SETTINGS = {
    "rope_theta": 20000.0,
    "rms_norm_eps": 1e-4,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_traditional": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 7,
}


def test_every_setting_counts_with_the_same_weights(tiny: Any, tmp_path: Path) -> None:
    found = [with_files(tiny("llama"))]
    for name, value in SETTINGS.items():
        folder = shutil.copytree(tiny("llama"), tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {name: value}))
        found.append(with_files(folder))
    assert len(set(found)) == len(found)


def test_layers_whose_settings_an_app_changes_differ(loaded: LoadedModel) -> None:
    """Beside numbers and words: lists, frequencies that are no parameters, and other layers with the same arrays."""
    attention = loaded.model.layers[0].self_attn
    before = [fingerprint(loaded)]
    for rope in (nn.RoPE(8, base=5.0), nn.RoPE(8, traditional=True), nn.Identity()):
        attention.rope = rope
        before.append(fingerprint(loaded))
    for value in ([1, 2], [1, 3], {"a": 1}, None, mx.ones((3,)), mx.zeros((3,)), nn.silu, nn.relu):
        attention._setting = value
        before.append(fingerprint(loaded))
    assert len(set(before)) == len(before)


SAYS = """
import sys
from cortexmlx.disk.setup import hash_all_but_weights, fingerprint
from cortexmlx.models import load_model
from cortexmlx.models.weights_hash import hash_model_arrays
loaded = load_model(sys.argv[1])
print(fingerprint(hash_all_but_weights(loaded), hash_model_arrays(loaded.model)))
"""


def test_another_process_finds_the_same(tiny: Any) -> None:
    folder = tiny("gpt_oss")
    done = subprocess.run([sys.executable, "-c", SAYS, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint(load_model(folder))
