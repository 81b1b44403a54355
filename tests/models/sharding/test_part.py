"""The parts of all ranks are the model, and each rank needs no more memory than its part and one tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from cortexmlx.errors import HostRefused, ModelCorrupt
from cortexmlx.models import load_model
from cortexmlx.models.sharding import CutMode, StandInGroup, load_part
from support.hosts.models import write


def parts(
    folder: Path, hosts: int, ways: Sequence[CutMode] = (CutMode.TENSOR,), **how: Any
) -> list[dict[str, np.ndarray]]:
    """The arrays of each rank's part."""
    loaded = [load_part(folder, StandInGroup(rank, hosts), ways, **how).loaded.model for rank in range(hosts)]
    return [{path: np.array(array) for path, array in tree_flatten(model.parameters())} for model in loaded]


def whole(folder: Path, **how: Any) -> dict[str, np.ndarray]:
    return {p: np.array(a) for p, a in tree_flatten(load_model(folder, **how).model.parameters())}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_the_parts_of_all_ranks_are_the_model(name: str, hosts: int, tmp_path: Path) -> None:
    """Each array is the same everywhere, or the ranks' arrays one after the other along one axis are the model's."""
    folder = write(tmp_path / name, name)
    every, cut = whole(folder), parts(folder, hosts)
    divided = 0
    for path, array in every.items():
        mine = [part[path] for part in cut]
        if mine[0].shape == array.shape:
            assert all(np.array_equal(each, array) for each in mine), path
            continue
        axis = next(i for i, (a, b) in enumerate(zip(mine[0].shape, array.shape, strict=True)) if a != b)
        assert np.array_equal(np.concatenate(mine, axis), array), path
        divided += array.size
    assert divided > sum(array.size for array in every.values()) / 3
    assert all(part.keys() == every.keys() for part in cut)


def test_the_parts_of_a_pipeline_have_each_layer_once_and_rank_0_the_last(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "qwen2")
    every, cut = whole(folder), parts(folder, 3, (CutMode.PIPELINE,))
    layers = [sorted({path.split(".")[2] for path in part if ".layers." in path}) for part in cut]
    assert layers == [["2", "3"], ["1"], ["0"]]
    for path, array in every.items():
        assert any(np.array_equal(part[path], array) for part in cut if path in part), path


@pytest.mark.parametrize(
    ("name", "way"), [("llama", CutMode.TENSOR), ("qwen2", CutMode.PIPELINE), ("gpt_oss", CutMode.TENSOR)]
)
def test_each_part_tells_the_size_of_the_whole_model(name: str, way: CutMode, tmp_path: Path) -> None:
    folder = write(tmp_path / name, name)
    all_of_it = load_model(folder)
    for rank in range(2):
        part = load_part(folder, StandInGroup(rank, 2), (way,))
        assert (part.whole_bytes, part.whole_parameters) == (all_of_it.weight_bytes, all_of_it.parameters)
        assert part.loaded.parameters < part.whole_parameters < 2 * part.loaded.parameters


def test_packed_weights_stay_packed_in_the_parts(tmp_path: Path) -> None:
    folder = quantized(tmp_path)
    every, cut = whole(folder, dequantize=False), parts(folder, 2, dequantize=False)
    path = "model.layers.0.mlp.down_proj"
    assert every[f"{path}.weight"].dtype == np.uint32
    for name in ("weight", "scales", "biases"):
        both = np.concatenate([part[f"{path}.{name}"] for part in cut], axis=-1)
        assert np.array_equal(both, every[f"{path}.{name}"])
    wide, expanded = whole(folder, dequantize=True), parts(folder, 2, dequantize=True)
    both = np.concatenate([part[f"{path}.weight"] for part in expanded], axis=-1)
    assert np.array_equal(both, wide[f"{path}.weight"]) and both.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "way"), [("qwen2", CutMode.TENSOR), ("qwen2", CutMode.PIPELINE), ("deepseek_v3", CutMode.TENSOR)]
)
def test_a_rank_needs_the_memory_of_its_part_and_of_the_largest_tensor(name: str, way: CutMode, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    own = {"qwen2": {"head_dim": 32}, "deepseek_v3": {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "v_head_dim": 64}}
    folder = write(tmp_path / "m", name, **sizes | own[name])
    load_part(folder, StandInGroup(0, 2), (way,))  # what is made once
    mx.clear_cache()
    mx.reset_peak_memory()
    before, limit = mx.get_active_memory(), mx.set_cache_limit(1 << 30)
    loaded = load_part(folder, StandInGroup(0, 2), (way,)).loaded
    assert mx.set_cache_limit(limit) == 1 << 30, "MLX's cache is as it was before"
    assert mx.get_cache_memory() <= 128 << 10, "what is freed is given back at once"
    peak, kept = mx.get_peak_memory() - before, mx.get_active_memory() - before
    every = {path: array.nbytes for path, array in whole(folder).items()}
    largest, total = max(every.values()), sum(every.values())
    slack = 512 << 10  # MLX lets an array have a buffer that is up to 16 KiB larger
    assert loaded.weight_bytes < 0.75 * total
    assert kept <= loaded.weight_bytes + slack
    assert peak <= loaded.weight_bytes + largest + slack < 0.9 * total


def test_one_rank_has_all_of_any_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "llama")
    every = whole(folder)
    (all_of_it,) = parts(folder, 1, ())
    assert all(np.array_equal(every[path], all_of_it[path]) for path in every) and all_of_it.keys() == every.keys()


def test_what_cannot_be_cut_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "llama")
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with pytest.raises(HostRefused, match="8 attention heads and 4 key-value heads cannot be divided by 3"):
        load_part(folder, StandInGroup(0, 3))
    assert mx.get_peak_memory() - before < 16 << 10
    with pytest.raises(HostRefused, match="cannot be cut: fuse it"):
        load_part(folder, StandInGroup(0, 2), adapter="some/adapter")


def test_damaged_weights_are_told_as_without_hosts(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    with pytest.raises(ModelCorrupt):
        load_part(folder, StandInGroup(0, 2))


def quantized(root: Path) -> Path:
    """A llama of 4 bits in groups of 32, which two ranks can divide."""
    from mlx_lm.utils import load_model as read
    from mlx_lm.utils import quantize_model, save_model

    folder = write(root / "plain", "llama", hidden_size=64, intermediate_size=128)
    model, config = read(folder)
    model, config = quantize_model(model, config, 32, 4)
    packed = root / "packed"
    save_model(packed, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (packed / name).write_text((folder / name).read_text())
    (packed / "config.json").write_text(json.dumps(config))
    return packed
