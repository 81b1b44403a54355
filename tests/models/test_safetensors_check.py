"""Weight files that are cut short, damaged or missing: each named, with what to do, before MLX maps them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from cortexmlx.errors import ModelCorrupt
from cortexmlx.models.safetensors_check import check_weights
from support.folders import fails, write_folder

NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        *((lambda whole, kept=kept: whole[:kept], "Download it again") for kept in (0, 4, 8, 100, -1)),
        (lambda whole: whole[:8] + b"\xff" * 12 + whole[20:], "header cannot be read"),
        (lambda whole: struct.pack("<Q", len(NESTED)) + NESTED, "header cannot be read"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    ],
    ids=["empty", "4 bytes", "8 bytes", "100 bytes", "one byte less", "no header", "nested without end", "a pointer"],
)
def test_a_file_that_is_cut_short_or_damaged_says_so(
    tmp_path: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    folder = write_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    fails(folder, ModelCorrupt, "model.safetensors", says)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [([0, 16384], "share bytes"), ([4, 16388], "share bytes"), ([0, float("inf")], "header cannot be read")],
)
def test_a_tensor_in_the_place_of_another_is_not_read(tmp_path: Path, offsets: list[float], said: str) -> None:
    """MLX would compute with the other's numbers."""
    folder = write_folder(tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    header["model.layers.0.self_attn.q_proj.weight"]["data_offsets"] = offsets
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    fails(folder, ModelCorrupt, "model.safetensors", said)


MISSING = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (json.dumps(MISSING), "model-00002-of-00002.safetensors"),
        *((broken, "model.safetensors.index.json") for broken in ("{", "[]", "{}", '{"weight_map": [1]}')),
    ],
)
def test_a_missing_shard_and_a_broken_index_are_named(tmp_path: Path, content: str, says: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(content)
    fails(folder, ModelCorrupt, says)


def test_a_tensor_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    """mlx-lm reads all files in any order, and the last one wins."""
    folder = write_folder(tmp_path / "m")
    (folder / "model-00001-of-00002.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    fails(folder, ModelCorrupt, "model.embed_tokens.weight both in", "model-00001-of-00002", "and in model.safetensors")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "../../outside.safetensors", "/etc/passwd"])
def test_an_index_of_other_files_is_not_followed(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert set(check_weights(folder).values()) == {folder / "model.safetensors"}


def test_a_link_to_itself_and_a_folder_in_the_place_of_a_file_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    file.unlink()
    file.symlink_to(file)
    fails(folder, ModelCorrupt, "model.safetensors cannot be read", "symbolic links")
    file.unlink()
    file.mkdir()
    fails(folder, ModelCorrupt, "model.safetensors cannot be read", "directory")
