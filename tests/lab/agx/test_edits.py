"""The changes to Mesa's source: all of them, or none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cortexmlx.metal.lab.agx import edits
from cortexmlx.metal.lab.agx.edits import EDITS, Edit, apply


def tree(folder: Path, extra: str = "") -> Path:
    """A source tree that has each text once."""
    for edit in EDITS:
        path = folder / edit.path
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else extra
        path.write_text(f"{before}before\n{edit.at}\nafter\n")
    return folder


def test_every_edit_is_made_once(tmp_path: Path) -> None:
    apply(tree(tmp_path))
    for edit in EDITS:
        same = [e for e in EDITS if (e.path, e.put) == (edit.path, edit.put)]
        assert (tmp_path / edit.path).read_text().count(edit.put) == len(same)
    with pytest.raises(ValueError, match=r"another Mesa than 25\.0"):
        apply(tmp_path, (Edit(EDITS[0].path, "what is not there", "anything"),))


def test_a_source_in_which_a_text_is_missing_or_stands_twice_is_left_as_it_was(tmp_path: Path) -> None:
    last = EDITS[-1]
    for number, text in enumerate(("", last.at + last.at)):
        folder = tree(tmp_path / str(number))
        path = folder / last.path
        path.write_text(path.read_text().replace(last.at, text))
        before = {p: p.read_text() for p in folder.rglob("*") if p.is_file()}
        with pytest.raises(ValueError, match=f"has {0 if not text else 2} times, not once"):
            apply(folder)
        assert {p: p.read_text() for p in before} == before


def test_the_script_says_what_is_wrong_and_fails(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, edits.__file__, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "is it Mesa's source?" in done.stderr
