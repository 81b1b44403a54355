"""Writing a batch: a record is on disk as soon as it is there, and a file is whole however its run ended."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.cli.batch.files import BatchWriter, RecordFile
from cortexmlx.cli.files.stream import RecordStream
from cortexmlx.errors import CortexError, InvalidRequest

ERROR = {"id": 2, "error": {"code": "x", "line": 2}}


def opened(path: Path, keep: Callable[[dict[str, Any]], bool] | None = None) -> RecordFile:
    file = RecordFile(path, keep)
    file.open()
    return file


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_record_is_in_the_file_at_once_and_on_the_disk_when_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    synced: list[int] = []
    monkeypatch.setattr("cortexmlx.cli.batch.files.os.fsync", lambda file: synced.append(os.fstat(file).st_size))
    file = opened(path)
    for count, record in enumerate([{"id": 1, "text": "né"}, ERROR, {"id": 3}], 1):
        file.append(record)
        lines = lines_of(path)
        assert len(lines) == count and lines[-1] == record and len(synced) == count - 1
        file.sync()
        assert synced[count - 1 :] == [path.stat().st_size]
    assert "né" in path.read_text(encoding="utf-8")
    file.close()
    again = opened(path)
    assert (again.keys, again.failed_keys) == (["1", "2", "3"], {"2"})
    again.append({"id": 4})
    again.close()
    assert [record["id"] for record in lines_of(path)] == [1, 2, 3, 4]


@given(st.integers(0, 200), st.booleans())
def test_wherever_a_file_is_torn_whole_records_stay(
    tmp_path_factory: pytest.TempPathFactory, at: int, zeros: bool
) -> None:
    path = tmp_path_factory.mktemp("torn") / "out"
    lines = [json.dumps({"id": i, "text": "é" * i}, ensure_ascii=False).encode() + b"\n" for i in range(6)]
    path.write_bytes(b"".join(lines)[:at] + b"\0" * (40 * zeros))
    file = opened(path)
    whole = [n for n in range(6) if sum(map(len, lines[: n + 1])) <= at]
    assert file.keys == list(map(str, whole)) and path.read_bytes() == b"".join(lines[n] for n in whole)
    file.close()


def test_what_is_no_record_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text('{"id": 1}\nmy notes\n{"id": 2}\n')
    with pytest.raises(InvalidRequest, match=r"line 2 of .*notes is no record of a batch: --force starts again"):
        opened(path)
    assert path.read_text() == '{"id": 1}\nmy notes\n{"id": 2}\n'


@settings(max_examples=25)
@given(st.permutations(range(5)), st.integers(0, 5))
def test_records_come_into_the_order_of_the_input(
    tmp_path_factory: pytest.TempPathFactory, finished: list[int], before: int
) -> None:
    path = tmp_path_factory.mktemp("order") / "out"
    place = {str(n): n for n in range(5)}
    for part in (finished[:before], finished[before:]):
        file = opened(path)
        for n in part:
            file.append({"id": n, "text": "é" * n})
            file.append({"id": n, "text": "é" * n})  # an interrupt came after it was taken
        file.sort_records(place)
        assert file.keys == [record and str(record["id"]) for record in lines_of(path)]
        file.close()
    assert lines_of(path) == [{"id": n, "text": "é" * n} for n in range(5)]
    assert sorted(p.name for p in path.parent.iterdir()) == ["out"]


def test_errors_may_be_left_out_and_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    file = opened(link)
    for record in ({"id": 1}, ERROR, {"id": 3}):
        file.append(record)
    file.close()
    kept = opened(link, lambda record: not record.get("error"))
    assert kept.keys == ["1", "3"] and kept.failed_keys == set() and lines_of(real) == [{"id": 1}, {"id": 3}]
    kept.sort_records({"3": 1, "1": 2})
    kept.close()
    assert link.is_symlink() and lines_of(link) == [{"id": 3}, {"id": 1}]


def test_a_file_that_is_put_into_order_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "out"
    file = opened(path)
    path.chmod(0o640)
    for identity in (2, 1):
        file.append({"id": identity})
    file.sort_records({"1": 1, "2": 2})
    file.close()
    assert path.stat().st_mode & 0o777 == 0o640 and lines_of(path) == [{"id": 1}, {"id": 2}]


def test_a_disk_that_is_full_keeps_what_was_written_and_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stands for the disk: it takes the beginning of a record."""
    file = opened(tmp_path / "out")
    file.append({"id": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, before[1]))
    try:
        with pytest.raises(CortexError, match=r"out cannot be written: File too large; .* --resume the rest"):
            file.append({"id": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "out").read_text() == '{"id": 1}\n' and file.keys == ["1"]
    file.append({"id": 0})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cortexmlx.cli.batch.files.os.fsync", full)
    with pytest.raises(CortexError, match=r"out cannot be written: No space left on device; .* --resume the rest"):
        file.sync()
    with pytest.raises(CortexError, match=r"in the order of the input cannot be written: .* --resume puts them into"):
        file.sort_records({"0": 1, "1": 2})
    assert lines_of(tmp_path / "out") == [{"id": 1}, {"id": 0}]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_file_that_is_mounted_by_itself_is_not_promised_to_come_into_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(own: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    file = opened(tmp_path / "out")
    file.append({"id": 1})
    file.append({"id": 0})
    with pytest.raises(CortexError, match=r"busy; it holds every record .*, and stays so: .* mount its folder"):
        file.sort_records({"0": 1, "1": 2})
    assert lines_of(tmp_path / "out") == [{"id": 1}, {"id": 0}]


def test_an_interrupt_while_writing_leaves_a_whole_record_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(tmp_path / "out")
    real = file._file

    class Interrupted:
        """Half of what is written gets into the file."""

        truncate = real.truncate

        def write(self, line: bytes) -> int:
            real.write(line[: len(line) // 2])
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(file, "_file", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            file.append({"id": 1})
    assert lines_of(tmp_path / "out") == [] == file.keys
    file.append({"id": 1})
    assert lines_of(tmp_path / "out") == [{"id": 1}]


def test_a_device_that_is_full_is_named(tmp_path: Path) -> None:
    stream = RecordStream(Path("/dev/full"))
    with pytest.raises(CortexError, match=r"/dev/full cannot be written: No space left on device"):
        stream.append({"id": 1})
    stream.close()


def test_stdout_stays_open(capsys: pytest.CaptureFixture[str]) -> None:
    stream = RecordStream(None)
    stream.append({"id": 1})
    stream.close()
    print("more")
    assert capsys.readouterr().out == '{"id": 1}\nmore\n'


def test_errors_go_to_their_own_file(tmp_path: Path) -> None:
    out, errors = opened(tmp_path / "out"), opened(tmp_path / "errors")
    writer = BatchWriter(out, errors)
    for record in ({"id": 1}, ERROR, {"id": 3}):
        writer.write(record)
    assert (out.keys, errors.keys) == (["1", "3"], ["2"])
