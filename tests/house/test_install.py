"""The first thing that a new user meets: the Makefile finds a Python that is new enough, or says how to get one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import ROOT

OLD = '#!/bin/sh\ncase "$1" in -V) echo Python 3.9.6 ;; *) exit 1 ;; esac\n'
"""A Mac's own `python3`, as far as the Makefile asks."""


def made(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-f", str(ROOT / "Makefile"), "-C", str(folder), *arguments]
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        (tmp_path / name).write_text(OLD)
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("name", ["python3", "python3.13"])
def test_the_first_python_that_is_new_enough_is_taken(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(sys.executable)
    assert made(folder, "--eval=found: ; @echo $(PYTHON)", "found").stdout.split("\n")[-3] == name


def test_without_one_the_message_says_how_to_get_one(folder: Path) -> None:
    for given in ((), ("PYTHON=python3",)):
        said = made(folder, "chat", f"PYTHONS={folder}/python3", *given)
        assert said.returncode
        for word in ("Python 3.11 or newer", "Python 3.9.6", "brew install python@3.12", "uv python", "python.org"):
            assert word in said.stderr
        assert "make chat PYTHON=" in said.stderr
        assert len(said.stderr) < 600
    assert not (folder / ".venv").exists()


def test_pip_with_an_old_python_says_so_and_not_that_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 6))
    with pytest.raises(SystemExit, match=r"(?s)needs Python 3\.11 or newer.*brew install.*python3\.12 -m venv"):
        exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), {})
