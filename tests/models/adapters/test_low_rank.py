"""The numbers of an adapter that is served per request: read as they are stored, or refused with the reason."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cortexmlx.errors import AdapterRefused, CortexError, ModelCorrupt, ModelNotFound
from cortexmlx.models.adapters import files, low_rank
from cortexmlx.models.adapters.files import Adapter
from cortexmlx.models.adapters.low_rank import LowRankAdapter, read_low_rank_adapter
from support.models.adapters import write_adapter, write_peft_adapter
from support.models.tiny import write_tiny

NAME = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "a", write_tiny(tmp_path / "m"))


def read(folder: Path, most_rank: int = 64, most_bytes: int = 1 << 30) -> LowRankAdapter:
    return read_low_rank_adapter("sql", folder, most_rank, most_bytes)


def refused(folder: Path, error: type[CortexError], *words: str, **limits: int) -> None:
    with pytest.raises(error) as caught:
        read(folder, **limits)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def change(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, folder / "adapters.safetensors")


def test_the_scale_is_folded_into_b(adapter: Path) -> None:
    stored, found = load_file(adapter / "adapters.safetensors"), read(adapter)
    a, b = found.pairs[NAME]
    assert np.array_equal(a, stored[f"{NAME}.lora_a"]) and np.array_equal(b, 2 * stored[f"{NAME}.lora_b"])
    assert (found.rank, found.base) == (4, "org/base")
    assert found.targets == ("model.layers.1.mlp.down_proj", NAME)


def test_pefts_matrices_are_transposed(tmp_path: Path) -> None:
    a, b = write_peft_adapter(tmp_path / "p", {NAME: (32, 48)})[NAME]
    mine = read(tmp_path / "p").pairs[NAME]
    assert np.array_equal(mine[0], a.T) and np.allclose(mine[1], 1.5 * b.T)
    assert mine[0].flags.c_contiguous


def test_half_precision_is_read_as_what_it_stands_for(adapter: Path) -> None:
    import mlx.core as mx

    stored = load_file(adapter / "adapters.safetensors")
    for dtype in (mx.bfloat16, mx.float16):
        halves = {name: mx.array(array).astype(dtype) for name, array in stored.items()}
        mx.save_safetensors(str(adapter / "adapters.safetensors"), halves)
        assert np.array_equal(read(adapter).pairs[NAME][0], np.array(halves[f"{NAME}.lora_a"].astype(mx.float32)))


def test_an_adapter_is_its_content_not_its_name_or_folder(adapter: Path, tmp_path: Path) -> None:
    first = read(adapter).digest
    moved = adapter.rename(tmp_path / "elsewhere")
    assert read(moved).digest == first
    change(moved, lora_parameters={"rank": 4, "scale": 2.5, "keys": None})
    assert read(moved).digest != first, "another scale is another content"
    change(moved, lora_parameters={"rank": 4, "scale": 2.0, "keys": None})
    stored = load_file(moved / "adapters.safetensors")
    stored[f"{NAME}.lora_a"][0, 0] += 1e-3
    rewrite(moved, stored)
    assert read(moved).digest != first


@pytest.mark.parametrize(("kind", "word"), [("dora", "DoRA"), ("full", "whole layers")])
def test_what_is_no_lora_is_refused_by_name(tmp_path: Path, kind: str, word: str) -> None:
    folder = write_adapter(tmp_path / "a", write_tiny(tmp_path / "m"), kind)
    refused(folder, AdapterRefused, "'sql'", word, "--adapter")


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m", "mixtral")
    folder = write_adapter(tmp_path / "a", model, keys=("block_sparse_moe.switch_mlp.up_proj",))
    refused(folder, AdapterRefused, "'sql'", "switch_mlp.up_proj", "experts")


def test_what_peft_says_beside_lora_is_refused_by_name(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path / "p", {NAME: (32, 48)}, modules_to_save=["lm_head"])
    refused(tmp_path / "p", AdapterRefused, "'sql'", "modules_to_save")


def test_limits_come_before_the_numbers_are_read(adapter: Path) -> None:
    refused(adapter, AdapterRefused, "rank 4", "3 at most", "max_adapter_rank", most_rank=3)
    refused(adapter, AdapterRefused, "bytes", "adapter_memory", most_bytes=100)


@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("in_place", [True, False])
def test_files_that_change_while_they_are_read_are_no_adapter(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, name: str, in_place: bool
) -> None:
    """The new file has the same shapes and as many bytes."""
    file, whole = adapter / name, low_rank._read_tensors

    def tensors(read: Adapter) -> dict[str, low_rank.Matrix]:
        found = whole(read)
        time.sleep(0.02)  # a file system's clock may tick only every 10 ms
        if in_place:
            file.write_bytes(file.read_bytes())
        else:
            (adapter / "new").write_bytes(file.read_bytes())
            (adapter / "new").replace(file)
        return found

    monkeypatch.setattr(low_rank, "_read_tensors", tensors)
    refused(adapter, ModelCorrupt, f"{file} has changed while it was read. Load it again.")


def test_a_file_that_is_changed_all_the_time_is_no_adapter(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_TRIES", 3)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: (adapter / "adapters.safetensors").touch())
    (adapter / "adapters.safetensors").touch()
    os.utime(adapter / "adapter_config.json", (1, 1))
    refused(adapter, ModelCorrupt, "adapters.safetensors has changed while it was read. Load it again.")


def test_all_of_an_adapter_is_of_one_folder(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that another folder takes after the configuration was read."""
    other = write_adapter(tmp_path / "b", tmp_path / "m", scale=7.0, seed=4)
    link, whole = tmp_path / "current", files.read_json_object
    link.symlink_to("a")

    def configuration(path: Path) -> dict[str, Any]:
        found = whole(path)
        link.unlink()
        link.symlink_to("b")
        return found

    monkeypatch.setattr(files, "read_json_object", configuration)
    found = read(link)
    monkeypatch.undo()
    assert found.digest == read(adapter).digest != read(other).digest
    assert found.path == link, "what the user gave is what the user is told"


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "none", ModelNotFound, "none")


@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38])
def test_numbers_that_are_none(adapter: Path, number: float) -> None:
    stored = load_file(adapter / "adapters.safetensors")
    stored[f"{NAME}.lora_b"][1, 1] = number
    rewrite(adapter, stored)
    refused(adapter, ModelCorrupt, f"{NAME}.lora_b", "damaged")


def test_half_of_a_pair(adapter: Path) -> None:
    stored = load_file(adapter / "adapters.safetensors")
    del stored[f"{NAME}.lora_b"]
    rewrite(adapter, stored)
    refused(adapter, ModelCorrupt, f"no {NAME}.lora_b")


def test_something_else_beside_pairs(adapter: Path) -> None:
    stored = load_file(adapter / "adapters.safetensors")
    rewrite(adapter, stored | {"model.norm.weight": np.ones(32, np.float32)})
    with pytest.raises(CortexError, match=r"model\.norm"):
        read(adapter)


def test_a_lora_of_several_matrices_in_one_is_refused_by_name(adapter: Path) -> None:
    """As AFM's layers have them in mlx-lm."""
    stored = load_file(adapter / "adapters.safetensors")
    a, b = stored.pop(f"{NAME}.lora_a"), stored.pop(f"{NAME}.lora_b")
    rewrite(adapter, stored | {f"{NAME}.lora_a.0": a, f"{NAME}.lora_b.0": b})
    refused(adapter, AdapterRefused, "'sql'", f"{NAME}.lora_a.0", "one linear layer")


def test_the_rank_is_where_it_belongs(adapter: Path) -> None:
    stored = load_file(adapter / "adapters.safetensors")
    stored[f"{NAME}.lora_b"] = np.ascontiguousarray(stored[f"{NAME}.lora_b"].T)
    rewrite(adapter, stored)
    refused(adapter, ModelCorrupt, NAME, "rank 4")


def test_numbers_of_another_type(adapter: Path) -> None:
    stored = load_file(adapter / "adapters.safetensors")
    rewrite(adapter, {name: array.astype(np.int32) for name, array in stored.items()})
    refused(adapter, AdapterRefused, "I32")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": None},
        {"dtype": []},
        {"shape": [32.0, 4.0]},
        {"shape": [float("nan"), 4]},
        {"shape": [1 << 62, 4], "data_offsets": [0, 0]},
        {"shape": [1 << 30, 1 << 30, 1 << 30, 4], "data_offsets": [0, 0]},
        {"data_offsets": [0.0, 512.0]},
    ],
)
def test_a_header_that_is_none_is_damage(adapter: Path, changes: dict[str, Any]) -> None:
    file = adapter / "adapters.safetensors"
    whole = file.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    header[f"{NAME}.lora_a"] |= changes
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    refused(adapter, ModelCorrupt, "adapters.safetensors")


def test_a_header_without_a_type_is_damage(adapter: Path) -> None:
    header = json.dumps({"lora_a": {"shape": [2, 4], "data_offsets": [0, 32]}}).encode()
    (adapter / "adapters.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    refused(adapter, ModelCorrupt, "header cannot be read")
