"""Where the records of a run go, and what is refused before anything is loaded."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.cli.batch.files import BatchFiles, RecordFile
from cortexmlx.cli.batch.resume import RunIdentity
from cortexmlx.cli.files.outputs import STDOUT, ExistingFileMode
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.types.sampling_params import SamplingParams
from support.patience import PATIENCE, soon

IDENTITY = RunIdentity("fake", "-", None, False, SamplingParams())


def files(output: Path, errors: Path | None = None, mode: ExistingFileMode = ExistingFileMode.NEW) -> BatchFiles:
    return BatchFiles(output, errors, mode, "-")


def test_a_file_without_records_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with files(tmp_path / "out") as made:
        made.open(IDENTITY, {}).write({"id": 1})
    with pytest.raises(InvalidRequest, match=r"out exists already: --resume continues it, --force"):
        files(tmp_path / "out")
    with files(tmp_path / "out", mode=ExistingFileMode.RESUME) as again:
        again.check(IDENTITY, {})
        again.open(IDENTITY, {})
        assert again.done_keys == {"1"}
    with files(tmp_path / "out", mode=ExistingFileMode.FORCE) as anew:
        anew.open(IDENTITY, {})
        assert anew.done_keys == set()
    assert (tmp_path / "out").read_bytes() == b""


def test_answers_stay_when_a_run_that_would_begin_again_does_not_get_that_far(tmp_path: Path) -> None:
    (tmp_path / "out").write_text('{"id": 1}\n')
    with files(tmp_path / "out", mode=ExistingFileMode.FORCE):
        pass  # the model was not found
    assert (tmp_path / "out").read_text() == '{"id": 1}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_errors_of_an_earlier_run_are_refused_too(tmp_path: Path) -> None:
    (tmp_path / "errors").write_text('{"id": 1, "error": {}}\n')
    with pytest.raises(InvalidRequest, match="errors exists already"):
        files(tmp_path / "out", tmp_path / "errors")


def test_errors_beside_answers_to_stdout_are_begun_again_too(tmp_path: Path) -> None:
    (tmp_path / "errors").write_text('{"id": 1, "error": {}}\n')
    with files(STDOUT, tmp_path / "errors", ExistingFileMode.FORCE) as anew:
        anew.open(IDENTITY, {})
        assert anew.done_keys == set()  # else the request was not asked
    assert (tmp_path / "errors").read_bytes() == b""


@pytest.mark.parametrize("mode", [ExistingFileMode.NEW, ExistingFileMode.FORCE])
def test_two_batches_at_once_do_not_share_a_file_for_errors(mode: ExistingFileMode, tmp_path: Path) -> None:
    """Each would put only its own into order in the end, and the other's would be lost."""
    one, errors = {"id": 1, "error": {"line": 1}}, tmp_path / "errors"
    early = files(tmp_path / "early", errors, mode)  # before the first one writes
    with files(tmp_path / "out", errors, mode) as first, early:
        writer = first.open(IDENTITY, {})
        writer.write(one)
        for path in (tmp_path / "other", STDOUT):
            with pytest.raises(InvalidRequest, match=r"another batch is writing .*errors: wait for it, or"):
                files(path, errors, mode)
        with pytest.raises(InvalidRequest, match=r"another batch is writing .*errors"):
            early.open(IDENTITY, {})
    assert json.loads(errors.read_text()) == one


@pytest.mark.parametrize("name", ["out.run", "out.new"])
def test_what_a_run_keeps_beside_its_output_is_neither_its_input_nor_for_errors(tmp_path: Path, name: str) -> None:
    own = tmp_path / name
    own.write_text("hello\n")
    with pytest.raises(InvalidRequest, match=f"{name} is what a batch to .* keeps for itself"):
        BatchFiles(tmp_path / "out", None, ExistingFileMode.NEW, str(own))
    with pytest.raises(InvalidRequest, match=f"{name} is what a batch to .* keeps for itself"):
        files(tmp_path / "out", own, ExistingFileMode.FORCE)
    assert own.read_text() == "hello\n"


@pytest.mark.parametrize("name", ["out.run", "out.new"])
@pytest.mark.parametrize("mode", [ExistingFileMode.NEW, ExistingFileMode.FORCE])
def test_somebody_elses_file_beside_the_output_is_not_written_over(
    name: str, mode: ExistingFileMode, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("#!/bin/sh\n")
    with pytest.raises(InvalidRequest, match=f"{name} is none of a batch's, and one to .*out writes over it"):
        files(tmp_path / "out", mode=mode)
    assert (tmp_path / name).read_text() == "#!/bin/sh\n"
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/null")  # "error: Invalid argument", without a name
    with pytest.raises(InvalidRequest, match=f"{name} is none of a batch's"):
        files(tmp_path / "out", mode=mode)
    (tmp_path / name).unlink()
    for left in ("", '{"model": "fa', "\0\0\0"):  # by a run that was killed
        (tmp_path / name).write_text(left)
        with files(tmp_path / "out", mode=mode) as made:
            made.open(IDENTITY, {})


def test_a_device_is_only_written(tmp_path: Path) -> None:
    with files(Path("/dev/null")) as made:
        made.open(IDENTITY, {}).write({"id": 1})
        assert not made.is_regular_file
        made.sort_records({})
    assert not Path("/dev/null.run").exists()


def test_what_cannot_take_records_is_refused_with_the_options_name(tmp_path: Path) -> None:
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing" / "out")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    for name, says in {
        "": "is a folder: give {} a file",
        "nowhere": "no folder .*/missing to write out into",
        "loop": "cannot be written: Too many levels of symbolic links: give {} another name",
        "file/out": "cannot be written: Not a directory: give {} another name",
        "/dev/fd/987": "/dev/fd/987 is not open: give {} another name",
        "x" * 300: "cannot be written: File name too long: give {} another name",
    }.items():
        with pytest.raises(InvalidRequest, match=says.format("-o")):
            files(tmp_path / name)
        with pytest.raises(InvalidRequest, match=says.format("--errors")):
            files(tmp_path / "out", tmp_path / name)
    assert not (tmp_path / "out.run").exists()


def test_one_file_under_two_names_is_not_input_answers_or_errors_at_once(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("hello\n")
    (tmp_path / "out").touch()
    for name, target in (("hard in", "in"), ("hard out", "out")):
        os.link(tmp_path / target, tmp_path / name)
    (tmp_path / "link in").symlink_to(tmp_path / "in")
    (tmp_path / "link new").symlink_to(tmp_path / "new")
    for output, errors, says in (
        ("hard in", None, "both input and output: give -o"),
        ("link in", None, "both input and output: give -o"),
        ("out", "hard in", "both input and output: give --errors"),
        ("out", "hard out", "for answers and for errors"),
        ("new", "link new", "for answers and for errors"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            BatchFiles(tmp_path / output, errors and tmp_path / errors, ExistingFileMode.FORCE, str(tmp_path / "in"))  # type: ignore[arg-type]
    assert (tmp_path / "in").read_text() == "hello\n"


def test_what_this_process_was_given_open_is_gone_on_with_not_begun_again(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        log.write("before\n")
        log.flush()
        with files(Path(f"/dev/fd/{log.fileno()}"), tmp_path / "errors") as made:
            assert not made.is_regular_file
            made.open(IDENTITY, {}).write({"id": 1})
        log.write("after\n")
    assert (tmp_path / "log").read_text() == 'before\n{"id": 1}\nafter\n'
    assert sorted(os.listdir(tmp_path)) == ["errors", "log"]


def test_stdout_is_not_for_answers_and_errors_at_once() -> None:
    with pytest.raises(InvalidRequest, match="is for answers and for errors"):
        files(STDOUT, STDOUT)


def test_a_pipe_that_nobody_reads_yet_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    said: list[str] = []

    def read_when_asked() -> None:
        assert soon(lambda: said.append(capsys.readouterr().err) or any(said))  # type: ignore[func-returns-value]
        read.append(pipe.read_text())

    reader = threading.Thread(target=read_when_asked)
    reader.start()
    with files(pipe) as made:
        made.open(IDENTITY, {}).write({"id": 1})
    reader.join(PATIENCE)
    assert read == ['{"id": 1}\n'] and f"waiting for somebody to read {pipe} ..." in "".join(said)


@pytest.mark.skipif(os.geteuid() == 0, reason="who may do everything is refused nothing")
def test_a_file_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch(0o444)
    with pytest.raises(InvalidRequest, match="out may not be written: give -o another name"):
        files(tmp_path / "out")


def test_a_place_where_nothing_may_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortexmlx.cli.batch.files.os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(InvalidRequest, match="out may not be written: give -o another name"):
        files(tmp_path / "out")


@pytest.mark.parametrize("name", ["out.csv", "OUT.CSV", "out.parquet", "out.jsonl.gz", "out.pdf", "out.xlsx", "out.md"])
def test_a_name_that_promises_another_form_is_refused(name: str, tmp_path: Path) -> None:
    for mode in (ExistingFileMode.NEW, ExistingFileMode.FORCE, ExistingFileMode.RESUME):
        with pytest.raises(
            InvalidRequest, match=r"batch writes JSONL.* is named like .*: give -o (?!.*jsonl.jsonl).*jsonl$"
        ):
            files(tmp_path / name, mode=mode)
    with pytest.raises(InvalidRequest, match=r"batch writes JSONL.*: give --errors .*jsonl"):
        files(tmp_path / "out.jsonl", tmp_path / name)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "name", ["out", "out.jsonl", "out.ndjson", "out.json", "out.txt", "out.2026-11-22", "out.v2", ".csv", "out.JSONL"]
)
def test_other_names_are_taken(name: str, tmp_path: Path) -> None:
    with files(tmp_path / name):
        pass


def test_a_pipe_may_have_any_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out.gz")
    with files(tmp_path / "out.gz"):
        pass


def test_a_run_that_an_older_version_began_in_a_table_may_go_on(tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text('{"id": "a", "text": "b"}\n')
    with files(tmp_path / "out.csv", mode=ExistingFileMode.RESUME):
        pass


# -- Writing a batch: a record is on disk as soon as it is there, and a file is whole however its run ended -----------


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
