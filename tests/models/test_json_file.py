"""JSON files of a model folder: an object, or one line that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.errors import ModelCorrupt
from cortexmlx.models.folder_config import read_json_object


def test_an_object_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"né": [1, 2.5, null]}', encoding="utf-8")
    assert read_json_object(path) == {"né": [1, 2.5, None]}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"text"', b"null", b"\xff{}", b"[" * 100_000, b'{"a": 1} b'],
    ids=["nothing", "cut short", "list", "text", "null", "no UTF-8", "too deep", "more behind it"],
)
def test_what_is_no_object_is_named_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelCorrupt, match=r"config\.json.*Download it again\.") as caught:
        read_json_object(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelCorrupt, match=r"none\.json"):
        read_json_object(tmp_path / "none.json")


def test_a_pointer_of_git_lfs_is_told_how_to_become_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    with pytest.raises(ModelCorrupt, match=r"config\.json is a git-lfs pointer, .* run `git lfs pull`"):
        read_json_object(tmp_path / "config.json")
