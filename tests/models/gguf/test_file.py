"""The GGUF header: read exactly, and never a crash or a foreign exception however the file is damaged."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.errors import CortexError, ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.models.gguf.file import read_gguf_header
from support.effort import examples
from support.gguf.models import write_model
from support.gguf.writer import Uint32, write_gguf


def test_metadata_and_tensors_are_read_as_written(tmp_path: Path) -> None:
    written = {
        "a.text": "héllo",
        "a.flag": True,
        "a.count": Uint32(7),
        "a.minus": -3,
        "a.number": 0.5,
        "a.texts": ["x", "", "ü"],
        "a.numbers": [1.5, -2.0],
        "a.empty": [],
    }
    stored = {
        "one": ("F32", (2, 3), bytes(24)),
        "two": ("Q4_1", (4, 64), bytes(160)),
        "three": ("F16", (5,), bytes(10)),
    }
    header = read_gguf_header(write_gguf(tmp_path / "a.gguf", written, stored))
    assert header.metadata == written
    assert {n: (t.type_name, t.shape, t.nbytes) for n, t in header.tensors.items()} == {
        name: (kind, shape, len(data)) for name, (kind, shape, data) in stored.items()
    }
    assert all(t.offset % 32 == 0 for t in header.tensors.values())


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none\.gguf"):
        read_gguf_header(tmp_path / "none.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + bytes(100), b"GGUF"])
def test_what_is_not_a_gguf_file_is_corrupt(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelCorrupt, match=r"a\.gguf"):
        read_gguf_header(path)


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_other_versions_are_refused_by_number(tmp_path: Path, version: int) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(ModelUnsupported, match=str(version)):
        read_gguf_header(path)


def test_a_tensor_beyond_the_end_is_named_with_the_numbers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {}, {"w": ("F32", (64,), bytes(256))})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelCorrupt, match=r"cut short.*'w'.*\d+.*\d+"):
        read_gguf_header(path)


def test_rows_that_do_not_fill_their_blocks_are_corrupt(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {}, {"w": ("Q8_0", (2, 33), bytes(68))})
    with pytest.raises(ModelCorrupt, match="33"):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("values", "names", "written", "read", "says"),
    [
        ({"t": ["plain", "xyz"]}, (), b"xyz", b"\xe2\x82z", r"'t'.*UTF-8"),
        ({"kk": 1, "kx": 2}, (), b"kx", b"kk", "'kk' appears twice"),
        ({}, ("ww", "wx"), b"wx", b"ww", "'ww' appears twice"),
    ],
)
def test_damaged_texts_and_names_that_come_twice_are_named(
    tmp_path: Path, values: dict[str, Any], names: tuple[str, ...], written: bytes, read: bytes, says: str
) -> None:
    path = write_gguf(tmp_path / "a.gguf", values, {name: ("F32", (8,), bytes(32)) for name in names})
    path.write_bytes(path.read_bytes().replace(written, read))
    with pytest.raises(ModelCorrupt, match=says):
        read_gguf_header(path)


def test_tensors_that_overlap_are_named(tmp_path: Path) -> None:
    stored = {"first": ("F32", (16,), bytes(64)), "second": ("F32", (16,), bytes(64))}
    path = write_gguf(tmp_path / "a.gguf", {}, stored)
    content = path.read_bytes()
    entry = content.index(b"second") + len(b"second") + 4 + 8 + 4
    assert struct.unpack_from("<Q", content, entry) == (64,)
    path.write_bytes(content[:entry] + struct.pack("<Q", 32) + content[entry + 8 :])
    with pytest.raises(ModelCorrupt, match="'first' and 'second' overlap"):
        read_gguf_header(path)


@pytest.mark.parametrize("kind", [0, 7, 8])
def test_lists_beyond_any_vocabulary_are_refused_where_the_file_has_the_bytes(tmp_path: Path, kind: int) -> None:
    """Each item becomes an object of its own, far larger than its byte."""
    count = (1 << 23) + 1
    body = struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, kind, count)
    with (tmp_path / "a.gguf").open("wb") as file:
        file.write(b"GGUF" + body)
        file.truncate(count * (8 if kind == 8 else 1) + 1000)
    with pytest.raises(ModelCorrupt, match=f"{count} values"):
        read_gguf_header(tmp_path / "a.gguf")


def test_a_text_beyond_any_template_is_refused_where_the_file_has_the_bytes(tmp_path: Path) -> None:
    length = (1 << 24) + 1
    with (tmp_path / "a.gguf").open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", length))
        file.truncate(length + 1000)
    with pytest.raises(ModelCorrupt, match=f"{length} bytes"):
        read_gguf_header(tmp_path / "a.gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf", type_name="Q4_1").read_bytes()


def outcome(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    try:
        read_gguf_header(path)
    except CortexError as error:
        assert "\n" not in str(error)
        return type(error).__name__
    return "read"


def test_every_truncation_is_reported(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    lengths = {*range(0, 200), *range(200, len(whole) - 64, 97), len(whole) - 64}
    assert {outcome(path, whole[:length]) for length in lengths} == {"ModelCorrupt"}


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_random_damage_never_escapes_as_a_foreign_exception(
    data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(whole[:9000])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    outcome(tmp_path_factory.getbasetemp() / "damaged.gguf", bytes(content) + whole[9000:])


def test_lengths_that_overflow_are_refused_without_allocating(tmp_path: Path) -> None:
    huge = struct.pack("<Q", 2**63)
    for body in (
        struct.pack("<IQQ", 3, 2**62, 0),
        struct.pack("<IQQ", 3, 0, 2**62),
        struct.pack("<IQQ", 3, 0, 1) + huge,
        struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + struct.pack("<I", 8) + huge,
        struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + struct.pack("<I", 6) + huge,
        struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"w" + struct.pack("<I", 2) + huge + huge + bytes(12),
    ):
        assert outcome(tmp_path / "a.gguf", b"GGUF" + body) == "ModelCorrupt"


def test_a_pointer_of_git_lfs_is_told_how_to_become_the_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    with pytest.raises(ModelCorrupt, match=r"tiny\.gguf is a git-lfs pointer, .* run `git lfs pull`"):
        read_gguf_header(tmp_path / "tiny.gguf")
