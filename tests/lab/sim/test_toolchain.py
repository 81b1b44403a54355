"""Which compiler is taken; and libraries that are built once, kept by content and forgotten when long unused."""

import os

import pytest

from cortexmlx.errors import ToolchainMissing
from cortexmlx.metal.lab.legal.msl import PREAMBLE
from cortexmlx.metal.lab.sim import toolchain
from cortexmlx.metal.lab.sim.toolchain import SHIM
from support.kernels.sim_tools import launch

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


# Built libraries, and the cache.


def test_a_kernel_is_compiled_once_and_its_text_is_the_key(monkeypatch, tmp_path):
    monkeypatch.setenv("CORTEXMLX_SIM_CACHE", str(tmp_path))
    source = "uint i = thread_position_in_grid.x; y[i] = x[i] + 41;"
    launch(source)
    libraries = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(toolchain.subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    y, _ = launch(source)
    assert y[1].item() == 42
    assert {path.name for path in tmp_path.iterdir()} == libraries


def test_the_cache_forgets_what_was_not_used_for_longest(tmp_path):
    for age in range(20):
        path = tmp_path / f"{age}.so"
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    toolchain.prune(tmp_path, most=20)
    assert len(list(tmp_path.iterdir())) == 20
    toolchain.prune(tmp_path, most=16)
    assert {path.stem for path in tmp_path.iterdir()} == {str(age) for age in range(12)}


def test_what_is_precompiled_is_what_mlx_puts_before_a_kernel():
    assert PREAMBLE in (SHIM / "sim" / "preamble.h").read_text()
