"""Weight files that are cut short, damaged or missing: each named, with what to do, before MLX maps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cortexmlx.errors import ModelCorrupt
from support.folders import fails, write_folder


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_truncated_weights_are_reported_with_the_bytes(tmp_path: Path, kept: int) -> None:
    folder = write_folder(tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:kept])
    fails(folder, ModelCorrupt, "model.safetensors", "Download it again")


def test_a_damaged_weights_header(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:20] = b"\xff" * 12
    file.write_bytes(content)
    fails(folder, ModelCorrupt, "header cannot be read")


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    fails(folder, ModelCorrupt, "git lfs pull")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(folder, ModelCorrupt, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}'])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(content)
    fails(folder, ModelCorrupt, "model.safetensors.index.json")
