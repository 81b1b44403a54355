"""Segments: what other programs read in them, and that they are there as a whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.disk.segments import read_header, remove_unfinished, write_segment
from support.store.records import record

SECRET = b"s" * 32


def test_mlx_reads_a_segment_as_safetensors(tmp_path: Path) -> None:
    records = [record(n) for n in range(5)]
    name, size, _ = write_segment(tmp_path, SECRET, "a model", records)
    assert (tmp_path / name).stat().st_size == size
    tensors = mx.load(str(tmp_path / name))
    assert isinstance(tensors, dict) and len(tensors) == 15
    for each in records:
        assert tensors[f"{each.key.hex()}.tokens"].tolist() == list(each.tokens)
        for number, array in enumerate(each.arrays):
            assert np.array_equal(np.array(tensors[f"{each.key.hex()}.{number}"]), array)


def test_the_header_says_where_everything_lies(tmp_path: Path) -> None:
    name, _, places = write_segment(tmp_path, SECRET, "a model", [record(n) for n in range(5)])
    assert read_header(tmp_path, name) == ("a model", places)


def test_nobody_else_may_read_a_segment(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        name, _, _ = write_segment(tmp_path, SECRET, "a model", [record(1)])
    finally:
        os.umask(before)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.rename", refuse)
    with pytest.raises(OSError, match="No space"):
        write_segment(tmp_path, SECRET, "a model", [record(1)])
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from cortexmlx.disk.segments import write_segment
from support.store.records import record
os.rename = lambda *args: os.kill(os.getpid(), 9)
write_segment(Path(sys.argv[1]), b"s" * 32, "a model", [record(1)])
"""


def test_what_a_killed_writer_leaves_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    tests = str(Path(__file__).resolve().parents[1])
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), tests], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".unfinished" and left.stat().st_size > 0
    seen = []
    rename = os.rename

    def look(source: Path, target: Path) -> None:
        remove_unfinished(tmp_path)
        seen.extend(path.name for path in tmp_path.iterdir())
        rename(source, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.rename", look)
        name, _, _ = write_segment(tmp_path, SECRET, "a model", [record(1)])
    assert seen == [name.replace(".safetensors", ".unfinished")]


@pytest.mark.parametrize(
    "header", [b"", b"\xff" * 8, b"\2\0\0\0\0\0\0\0{}", b"\2\0\0\0\0\0\0\0[]", b"\4\0\0\0\0\0\0\0null"]
)
def test_what_is_no_segment_is_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "x").write_bytes(header)
    with pytest.raises(ValueError, match=r"x|Expecting"):
        read_header(tmp_path, "x")


def by_hand(model: str = '"m"', layout: str = '[["I32",[8]]]', begin: str = "0") -> bytes:
    key = "ab" * 16
    about = f'{{"format":"cortexmlx-kv-1","model":{model},"{key}":{json.dumps("00" * 16 + " " + layout)}}}'
    text = f'{{"__metadata__":{about},"{key}.tokens":{{"data_offsets":[{begin},32]}}}}'.encode()
    return len(text).to_bytes(8, "little") + text + bytes(32)


@pytest.mark.parametrize(
    "data",
    [
        (99_999).to_bytes(8, "little") + b"[" * 99_999,
        by_hand(begin="Infinity"),
        by_hand(begin="NaN"),
        by_hand(begin="-9"),
        by_hand(begin="9" * 30),
        by_hand(layout='[["I32",[Infinity]]]'),
        by_hand(layout='[["I32",[-2,-4]]]'),
    ],
)
def test_a_header_that_somebody_made_up_is_a_value_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(by_hand())
    assert read_header(tmp_path, "x")[0] == "m"
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match=r"x|layout|NaN"):
        read_header(tmp_path, "x")


def test_a_models_name_is_text_for_files_and_terminals(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(by_hand(model=r'"a\u001b[2J\ud800b"'))
    assert read_header(tmp_path, "x")[0] == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b"
