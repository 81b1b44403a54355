"""Where the records of a run go, and what is refused before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cortexmlx.cli.batch.files import BatchFiles, Mode
from cortexmlx.cli.batch.resume import RunIdentity
from cortexmlx.errors import InvalidRequest
from cortexmlx.request import SamplingParams

IDENTITY = RunIdentity("fake", "-", None, False, SamplingParams())


def files(output: Path | None, errors: Path | None = None, mode: Mode = Mode.NEW) -> BatchFiles:
    return BatchFiles(output, errors, mode, "-")


def test_a_file_without_records_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with files(tmp_path / "out") as made:
        made.open(IDENTITY).write({"id": 1})
    with pytest.raises(InvalidRequest, match=r"out is there already: --resume goes on with it, --force"):
        files(tmp_path / "out")
    with files(tmp_path / "out", mode=Mode.RESUME) as again:
        again.check(IDENTITY)
        again.open(IDENTITY)
        assert again.done == {"1"}
    with files(tmp_path / "out", mode=Mode.FORCE) as anew:
        anew.open(IDENTITY)
        assert anew.done == set()
    assert (tmp_path / "out").read_bytes() == b""


def test_answers_stay_when_a_run_that_would_begin_again_does_not_get_that_far(tmp_path: Path) -> None:
    (tmp_path / "out").write_text('{"id": 1}\n')
    with files(tmp_path / "out", mode=Mode.FORCE):
        pass  # the model was not found
    assert (tmp_path / "out").read_text() == '{"id": 1}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_errors_of_an_earlier_run_are_refused_too(tmp_path: Path) -> None:
    (tmp_path / "errors").write_text('{"id": 1, "error": {}}\n')
    with pytest.raises(InvalidRequest, match="errors is there already"):
        files(tmp_path / "out", tmp_path / "errors")


@pytest.mark.parametrize("name", ["out.run", "out.new"])
def test_what_a_run_keeps_beside_its_output_is_neither_its_input_nor_for_errors(tmp_path: Path, name: str) -> None:
    own = tmp_path / name
    own.write_text("hello\n")
    with pytest.raises(InvalidRequest, match=f"{name} is what a batch to .* keeps for itself"):
        BatchFiles(tmp_path / "out", None, Mode.NEW, str(own))
    with pytest.raises(InvalidRequest, match=f"{name} is what a batch to .* keeps for itself"):
        files(tmp_path / "out", own, Mode.FORCE)
    assert own.read_text() == "hello\n"


def test_a_device_is_only_written(tmp_path: Path) -> None:
    with files(Path("/dev/null")) as made:
        made.open(IDENTITY).write({"id": 1})
        assert not made.kept
        made.arrange({})
    assert not Path("/dev/null.run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="who may do everything is refused nothing")
def test_a_file_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch(0o444)
    with pytest.raises(InvalidRequest, match="out may not be written: give -o another name"):
        files(tmp_path / "out")


def test_a_place_where_nothing_may_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortexmlx.cli.batch.files.os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(InvalidRequest, match="out may not be written: give -o another name"):
        files(tmp_path / "out")
