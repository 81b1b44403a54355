"""A run in a file comes back as it was; another file is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cortexmlx.bench.changes import saved
from cortexmlx.bench.report import speed
from cortexmlx.errors import InvalidRequest
from support.bench_reports import MODEL, ROW, report


def test_a_saved_run_comes_back(tmp_path: Path) -> None:
    made, file = report(speed.part([ROW], MODEL, "CPU")), tmp_path / "a.json"
    saved.check_new(file)
    saved.save(made, file)
    assert saved.read(file) == saved.of_report(made)
    assert json.loads(file.read_text())["rows"][0]["tokens_per_second"] == [40.0, 44.0]
    with pytest.raises(InvalidRequest, match="not overwritten"):
        saved.check_new(file)
    with pytest.raises(InvalidRequest, match="no folder"):
        saved.check_new(tmp_path / "none" / "a.json")


def test_a_full_disk_leaves_no_half_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        saved.save(report(speed.part([ROW], MODEL, "CPU")), tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "cortexmlx bench 0"}', '{"format": "cortexmlx bench 1"}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InvalidRequest, match=r"a\.json is no run"):
        saved.read(tmp_path / "a.json")
