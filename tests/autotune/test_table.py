"""Times are kept on disk for one identity. Whatever is wrong with the file costs time only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.autotune import table as tables
from cortexmlx.autotune.table import ChoiceTable, TimedJob, TimingIdentity
from cortexmlx.autotune.timing import Timing
from support.effort import examples

HERE = TimingIdentity("a GPU", "15.1", "0.32.4", "0123", "0.1.0")
ENTRY = TimedJob("attention", "1 row", "rule", Timing({"rule": 2.0, "other": 1.0}, {"third": "it differs"}))


def test_what_is_added_is_read_by_the_next_process(tmp_path: Path) -> None:
    assert ChoiceTable(HERE, tmp_path).read() == {}
    assert ChoiceTable(HERE, tmp_path).add({"a": ENTRY})
    other = replace(ENTRY, timing=Timing({"rule": 0.5}, {}))
    assert ChoiceTable(HERE, tmp_path).add({"b": other})
    assert ChoiceTable(HERE, tmp_path).read() == {"a": ENTRY, "b": other}
    assert ChoiceTable(HERE, tmp_path).add({"a": other})
    assert ChoiceTable(HERE, tmp_path).read() == {"a": other, "b": other}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("part", [field.name for field in fields(TimingIdentity)])
def test_another_identity_has_another_table(part: str, tmp_path: Path) -> None:
    ChoiceTable(HERE, tmp_path).add({"a": ENTRY})
    other = ChoiceTable(replace(HERE, **{part: "something else"}), tmp_path)
    assert other.read() == {}
    other.path.write_bytes(ChoiceTable(HERE, tmp_path).path.read_bytes())  # the name alone is no proof
    assert other.read() == {}
    assert ChoiceTable(HERE, tmp_path).read() == {"a": ENTRY}


def test_the_usual_folder_is_among_the_users_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ChoiceTable(HERE).add({"a": ENTRY})
    assert [p.parent for p in tmp_path.rglob("*.json")] == [tmp_path / "cortexmlx" / "choices"]


@given(st.binary(max_size=200), st.integers(0, 10_000), st.booleans())
@settings(max_examples=examples(60))
def test_a_damaged_file_is_read_as_far_as_it_is_whole(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, place: int, cut: bool
) -> None:
    """Bytes are overwritten, or the file is cut: what is read is what was written, or nothing, and adding works."""
    folder = tmp_path_factory.mktemp("damaged")
    table = ChoiceTable(HERE, folder)
    table.add({"a": ENTRY, "b": ENTRY})
    whole = table.path.read_bytes()
    place %= len(whole)
    table.path.write_bytes(whole[:place] + junk + (b"" if cut else whole[place + len(junk) :]))
    found = table.read()
    assert all(isinstance(entry, TimedJob) and entry.timing.seconds for entry in found.values())
    assert table.add({"c": ENTRY}) and table.read()["c"] == ENTRY


WRONG: dict[str, Any] = {
    "not an object": 3,
    "no timing": {"label": "l", "batch": "b", "usual": "u"},
    "no label": {"batch": "b", "usual": "u", "timing": {"seconds": {"u": 1.0}, "refused": {}}},
    "nothing timed": {"label": "l", "batch": "b", "usual": "u", "timing": {"seconds": {}, "refused": {"u": "no"}}},
    "a time that is none": {
        "label": "l",
        "batch": "b",
        "usual": "u",
        "timing": {"seconds": {"u": float("nan")}, "refused": {}},
    },
    "a negative time": {"label": "l", "batch": "b", "usual": "u", "timing": {"seconds": {"u": -1.0}, "refused": {}}},
    "an endless time": {
        "label": "l",
        "batch": "b",
        "usual": "u",
        "timing": {"seconds": {"u": float("inf")}, "refused": {}},
    },
    "a time that no float holds": {
        "label": "l",
        "batch": "b",
        "usual": "u",
        "timing": {"seconds": {"u": 10**400}, "refused": {}},
    },
    "a truth as a time": {"label": "l", "batch": "b", "usual": "u", "timing": {"seconds": {"u": True}, "refused": {}}},
    "timed and refused": {
        "label": "l",
        "batch": "b",
        "usual": "u",
        "timing": {"seconds": {"u": 1.0}, "refused": {"u": "no"}},
    },
    "a reason that is none": {
        "label": "l",
        "batch": "b",
        "usual": "u",
        "timing": {"seconds": {"u": 1.0}, "refused": {"v": 2}},
    },
}


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG.keys())
def test_an_entry_that_makes_no_sense_is_left_out(value: Any, tmp_path: Path) -> None:
    table = ChoiceTable(HERE, tmp_path)
    table.add({"a": ENTRY})
    content = json.loads(table.path.read_bytes())
    content["entries"]["b"] = value
    table.path.write_text(json.dumps(content))
    assert table.read() == {"a": ENTRY}


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_times(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    table = ChoiceTable(HERE, tmp_path / "file" / "below")
    assert table.read() == {} and not table.add({"a": ENTRY})


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = ChoiceTable(HERE, tmp_path)
    table.add({"a": ENTRY})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cortexmlx.system.files.os.fsync", full)
    assert not table.add({"b": ENTRY})
    assert table.read() == {"a": ENTRY} and len(list(tmp_path.iterdir())) == 1


def test_two_processes_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    """Entries may be lost to the other process, but no file is ever half of one and half of another."""
    program = (
        "import sys; from pathlib import Path; from cortexmlx.autotune.table import *\n"
        "from cortexmlx.autotune.timing import Timing\n"
        f"table = ChoiceTable(TimingIdentity{(HERE.device, HERE.system, HERE.mlx, HERE.texts, HERE.cortexmlx)}, "
        "Path(sys.argv[1]))\n"
        "for n in range(10):\n"
        "    entry = TimedJob('l', 'b', 'u', Timing({'u': 1.0 + n}, {}))\n"
        "    assert table.add({f'{sys.argv[2]} {n}': entry}) and table.read()\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), name]) for name in ("one", "two")]
    assert [process.wait() for process in both] == [0, 0]
    found = ChoiceTable(HERE, tmp_path).read()
    assert {"one 9", "two 9"} & found.keys()
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_entries_and_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_ENTRIES", 3)
    monkeypatch.setattr(tables, "MAX_FILES", 2)
    for number in range(5):
        ChoiceTable(HERE, tmp_path).add({str(number): ENTRY})
    assert list(ChoiceTable(HERE, tmp_path).read()) == ["2", "3", "4"]
    for number in range(3):
        table = ChoiceTable(replace(HERE, texts=str(number)), tmp_path)
        table.add({"a": ENTRY})
        os.utime(table.path, (1000 + number,) * 2)
    last = ChoiceTable(replace(HERE, texts="the newest"), tmp_path)
    last.add({"a": ENTRY})
    assert len(list(tmp_path.iterdir())) == 2 and last.read() == {"a": ENTRY}
