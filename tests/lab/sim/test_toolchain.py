"""Which compiler the simulator takes, and what it says when there is none."""

import pytest

from cortexmlx.errors import ToolchainMissing
from cortexmlx.metal.lab.sim import toolchain

find = toolchain.find_compiler.__wrapped__


def test_without_any_compiler_the_message_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainMissing, match="pip install ziglang"):
        find()


def test_a_compiler_that_is_too_old_is_passed_over(monkeypatch, tmp_path):
    old = tmp_path / "old-compiler"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: str(old) if name == str(old) else None)
    assert find().identity.startswith("ziglang")


def test_cxx_is_taken_first_when_it_is_recent_enough(monkeypatch, tmp_path):
    mine = tmp_path / "my-clang"
    mine.write_text("#!/bin/sh\nexit 0\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", str(mine))
    assert find().compile[0] == str(mine)
