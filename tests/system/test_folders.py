"""The user's folders, on each system."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cortexmlx.disk.folder import default_folder
from cortexmlx.metal.lab.sim import toolchain
from cortexmlx.system.files import cache_folder, state_folder


@pytest.mark.parametrize(
    ("system", "variable", "wanted"),
    [
        ("linux", None, "home/.cache/cortexmlx"),
        ("darwin", None, "home/Library/Caches/cortexmlx"),
        ("darwin", "", "home/Library/Caches/cortexmlx"),
        ("darwin", "elsewhere", "elsewhere/cortexmlx"),
        ("linux", "elsewhere", "elsewhere/cortexmlx"),
    ],
)
def test_all_caches_lie_where_the_system_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, variable: str | None, wanted: str
) -> None:
    for name in ("CORTEXMLX_KV_STORE", "CORTEXMLX_SIM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "platform", system)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable and str(tmp_path / variable))
    assert cache_folder() == tmp_path / wanted
    assert default_folder() == tmp_path / wanted / "kv"
    assert toolchain.cache_folder() == tmp_path / wanted / "sim"


def test_who_has_no_home_has_caches_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("CORTEXMLX_KV_STORE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert default_folder().is_absolute() and f"cortexmlx-{os.geteuid()}" in default_folder().parts


@pytest.mark.parametrize("variable", [None, "", "elsewhere"])
def test_what_programs_keep_lies_where_xdg_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable is not None:
        monkeypatch.setenv("XDG_STATE_HOME", variable and str(tmp_path / variable))
    wanted = tmp_path / variable if variable else tmp_path / ".local" / "state"
    assert state_folder() == wanted / "cortexmlx"
