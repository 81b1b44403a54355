"""A run in a file comes back as it was; another file is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cortexmlx.bench.changes import saved
from cortexmlx.bench.report import speed
from cortexmlx.errors import InvalidRequest
from support.cli.bench_reports import MODEL, ROW, report


def test_a_saved_run_comes_back(tmp_path: Path) -> None:
    made, file = report(speed.speed_section([ROW], MODEL, "CPU")), tmp_path / "a.json"
    saved.check_save_path(file)
    saved.save_run(made, file)
    assert saved.read_run(file) == saved.snapshot(made)
    assert json.loads(file.read_text())["rows"][0]["tokens_per_second"] == [40.0, 44.0]
    with pytest.raises(InvalidRequest, match="not overwritten"):
        saved.check_save_path(file)
    with pytest.raises(InvalidRequest, match="no folder"):
        saved.check_save_path(tmp_path / "none" / "a.json")


def test_a_full_disk_leaves_no_half_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        saved.save_run(report(speed.speed_section([ROW], MODEL, "CPU")), tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "cortexmlx bench 2"}', "[" * 100_000, "\xff"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidRequest, match=r"a\.json is no run"):
        saved.read_run(tmp_path / "a.json")


@pytest.mark.parametrize("kind", ["cortexmlx bench 1", "of another program", 7])
def test_the_file_of_another_version_is_told_from_a_damaged_one(kind: object, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"format": kind}))
    with pytest.raises(InvalidRequest, match=f"another version \\({kind!r}, here it is 'cortexmlx bench 2'\\)"):
        saved.read_run(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("compared", "series", 0, "values"), []),
        (("compared", "series", 0, "values"), ["fast", 1.0]),
        (("compared", "series", 0, "values"), [None, 1.0]),
        (("compared", "series", 0, "values"), [float("nan"), 1.0]),
        (("compared", "series", 0, "values"), 7),
        (("compared", "series", 0, "values"), [10**400]),
        (("compared", "series", 0, "name"), ["pp"]),
        (("compared", "series", 0, "better"), "maybe"),
        (("compared", "series", 0, "beside"), [1.0]),
        (("compared", "series", 0, "beside"), [0.0, 1.0]),
        (("compared", "series", 0, "rounds"), [0]),
        (("compared", "series", 0, "of_another_version"), 1),
        (("compared", "series"), {"a": 1}),
        (("compared", "yardstick"), []),
        (("compared", "yardstick"), {"memory, wall": ["x"]}),
        (("compared", "yardstick"), {"memory, wall": [0.0]}),
        (("compared", "model"), 3),
        (("machine", "load"), "high"),
        (("machine", "cpus"), None),
        (("settings",), "plain"),
    ],
)
def test_a_damaged_run_is_refused_before_anything_is_measured(
    place: tuple[str | int, ...], value: object, tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    saved.save_run(report(speed.speed_section([ROW], MODEL, "CPU")), file)
    found = json.loads(file.read_text())
    at = found
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    file.write_text(json.dumps(found))
    with pytest.raises(InvalidRequest, match=r"a\.json is no run that .* or is damaged"):
        saved.read_run(file)


def test_what_cannot_be_kept_is_known_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be written: "):
        saved.check_save_path(Path("/proc/self/a.json"))
    saved.check_save_path(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    made, file = report(speed.speed_section([ROW], MODEL, "CPU")), tmp_path / "a.json"
    saved.check_save_path(file)
    file.write_text("of another bench, meanwhile")
    with pytest.raises(FileExistsError):
        saved.save_run(made, file)
    assert file.read_text() == "of another bench, meanwhile"
