"""What a batch reads as requests, and what it refuses because it is something else."""

from __future__ import annotations

import gzip
import os
import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cortexmlx.cli.files.source import InputFormat, _pipe_lines, is_jsonl, open_ahead, open_lines
from cortexmlx.errors import InvalidRequest
from support.patience import PATIENCE


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.csv", b"id,prompt\n1,hi\n", "is a table: batch reads JSONL"),
        (
            "t.TSV",
            b"id\tprompt\n",
            "Five lines of Python make JSONL of one: https://github.com/cortexmlx/cortexmlx/blob/main/docs/batch.md",
        ),
        ("t.yaml", b"- hi\n", "is a text of another form"),
        ("t.json", b'[\n {"prompt": "hi"}\n]\n', "is one JSON value, but must have"),
        ("t.jsonl", b' [{"prompt": "hi"}]', "jq -c '.[]'"),
        ("t.txt", b'{\n "prompt": "hi"\n}\n', "jq -c '.' "),
        ("t.jsonl", b"Why?\n\n[1] or [2]?\n", "has no JSON object: --format lines reads each line of it as a prompt"),
        ("t.jsonl.gz", gzip.compress(b"{}", mtime=0), "is compressed: gzip -dc "),
        ("t.bin", b"PK\x03\x04zip", "is no text"),
        ("t.txt", b"a\0b", "is no text"),
        ("t.txt", "hi".encode("utf-16"), "is UTF-16, and batch reads UTF-8: iconv -f UTF-16 -t UTF-8 "),
        ("t.txt", b"\xfe\xff" + "hi".encode("utf-16-be"), "is UTF-16"),
        ("t.txt", "hi".encode("utf-32"), "is UTF-32"),
    ],
)
def test_a_file_that_is_no_list_of_requests_is_refused_with_what_to_do(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequest) as refused, open_lines(str(tmp_path / name), InputFormat.auto):
        pass
    assert says in str(refused.value) and name in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "input_format"),
    [
        ("t.txt", b"[one]\n", InputFormat.auto),
        ("t", b"{oops\n", InputFormat.auto),
        ("t.csv", b"a,b\n", InputFormat.lines),
        ("t.csv", b'{"prompt": 1}\n', InputFormat.jsonl),
        ("empty.jsonl", b"", InputFormat.auto),
        ("t.jsonl", b'\noops\n {"prompt": "hi"}', InputFormat.auto),
        ("t.jsonl", b"Why?\n", InputFormat.lines),
    ],
)
def test_what_may_be_requests_is_read_from_its_first_byte(
    name: str, content: bytes, input_format: InputFormat, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with open_lines(str(tmp_path / name), input_format) as lines:
        assert lines.read() == content


def test_the_name_or_the_option_says_what_lines_are(tmp_path: Path) -> None:
    assert [is_jsonl(name, InputFormat.auto) for name in ("a.jsonl", "a.JSON", "a.txt", "-")] == [
        True,
        True,
        None,
        None,
    ]
    assert [is_jsonl("a.jsonl", how) for how in (InputFormat.jsonl, InputFormat.lines)] == [True, False]


def test_only_files_are_read_ahead(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a\nb\n")
    with open_ahead(str(tmp_path / "in")) as lines:
        assert lines is not None and list(lines) == [b"a\n", b"b\n"]
    os.mkfifo(tmp_path / "pipe")
    for other in ("-", str(tmp_path / "pipe"), str(tmp_path / "missing")):
        with open_ahead(other) as nothing:
            assert nothing is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"{}", mtime=0), "stdin is compressed: gzip -dc | cortexmlx batch ... -"),
        ("hi\n".encode("utf-16"), "stdin is UTF-16, and batch reads UTF-8: iconv -f UTF-16 -t UTF-8 | cortexmlx"),
        (b"a\0b\n", "stdin is no text"),
        (b'{\n "prompt": "hi"\n}\n', r"stdin is one JSON value, .* jq -c '\.' \| cortexmlx batch"),
        (b'[\n {"prompt": "hi"}\n]\n', r"stdin is one JSON value, .* jq -c '\.\[\]' \| cortexmlx batch"),
    ],
)
def test_so_is_what_comes_through_a_pipe(content: bytes, says: str) -> None:
    read, write = os.pipe()
    os.write(write, content)
    os.close(write)
    with os.fdopen(read, "rb") as pipe, pytest.raises(InvalidRequest, match=says):
        list(_pipe_lines(pipe, "-", InputFormat.auto))


@pytest.mark.parametrize("silent", [True, False])
def test_a_pipe_that_nobody_writes_to_is_waited_for_and_that_is_said(
    silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cortexmlx.cli.files.source._SILENCE_SECONDS", 0.1 if silent else PATIENCE)
    pipe, notes = tmp_path / "pipe", queue.Queue[str]()
    monkeypatch.setattr("cortexmlx.cli.files.source.console.print_note", notes.put)
    os.mkfifo(pipe)

    def write() -> None:
        if silent:
            assert notes.get(timeout=PATIENCE) == f"waiting for somebody to write to {pipe} ..."
        pipe.write_bytes(b"one\n")

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write)
        with open_lines(str(pipe), InputFormat.auto) as lines:
            assert [line for line in lines if line] == [b"one"]
        written.result()
    assert notes.empty()


def test_the_beginning_of_a_line_that_has_come_is_not_taken_for_a_value_over_several_lines() -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as pipe, os.fdopen(write, "wb", buffering=0) as end:
        lines = _pipe_lines(pipe, "-", InputFormat.auto)
        end.write(b"{")
        assert next(lines) is None
        end.write(b'"prompt": "a"}\n')
        assert next(lines) == b'{"prompt": "a"}'


def test_a_pipe_says_that_it_has_nothing_yet_and_cuts_no_line() -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as pipe, os.fdopen(write, "wb", buffering=0) as end:
        lines = _pipe_lines(pipe, "-", InputFormat.auto)
        assert next(lines) is None
        end.write(b"one\ntw")
        assert (next(lines), next(lines)) == (b"one", None)
        end.write(b"o\n\nlast")
        assert [next(lines) for _ in range(3)] == [b"two", b"", None]
        end.close()
        assert list(lines) == [b"last"]
