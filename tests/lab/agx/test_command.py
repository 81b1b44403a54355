"""`python -m cortexmlx.metal.lab.agx` as a whole, with a compiler that has its answers ready."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from cortexmlx.errors import KernelCompileError
from cortexmlx.metal.lab.agx import __main__ as command
from cortexmlx.metal.lab.agx.compiler import CompilerOutput, MesaCompiler
from cortexmlx.metal.lab.cost.sheet import SHAPES
from cortexmlx.metal.rules import VARIANTS

LISTING = "=== FINAL k main\nblock0 {\n   stop\n}\n=== END\n"
STATISTICS = "S: 9 inst, 7 alu, 70 bytes, 47 regs, 46 uniforms, 0 scratch, 832 threads, 3 loops, 0:0 spills:fills"


class Ready(MesaCompiler):
    """Answers what is asked of it with the same two texts; refuses what has sinks."""

    def compile(self, unit: str) -> CompilerOutput:
        if "constexpr bool SINKS = 1" in unit:
            raise KernelCompileError("clang failed (1):\nno sinks here")
        return CompilerOutput(LISTING, STATISTICS)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["agx", *arguments])
    return command.main()


def test_without_a_compiler_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CORTEXMLX_AGX_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run(monkeypatch) == 1
    output = capsys.readouterr()
    assert "python -m cortexmlx.metal.lab.agx --build" in output.err and output.out == ""


def test_a_person_is_asked_before_anything_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORTEXMLX_AGX_CACHE", str(tmp_path))
    built: list[int] = []
    monkeypatch.setattr(command, "build_compiler", lambda: built.append(1) or Ready(tmp_path, "25.0.7", 15))
    monkeypatch.setattr(command, "_chosen", lambda words, every: iter(()))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, status, count in (("n", 1, 0), ("", 1, 0), ("y", 0, 1)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert (run(monkeypatch), len(built)) == (status, count)
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail("asked"))
    assert run(monkeypatch, "--build") == 0


def test_each_text_has_one_line_and_the_results_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_compiler", lambda: Ready(tmp_path, "25.0.7", 15))
    monkeypatch.setattr(command, "VARIANTS", [v for v in VARIANTS if v.sinks or v.dtype == "float16"][::3])
    monkeypatch.setattr(command, "SHAPES", SHAPES[:6])
    target = tmp_path / "all.json"
    assert run(monkeypatch, "--json", str(target), "paged_reduce", "float16") == 1
    output = capsys.readouterr()
    lines = output.out.splitlines()[1:]
    assert len(lines) == len(set(lines)) > 1 and all("paged_reduce" in line for line in lines)
    assert re.search(r"^paged_reduce, float16, value_dim \d+, sinks: clang failed", output.err, re.M)
    record = json.loads(target.read_text())
    assert (record["mesa"], record["llvm"], len(record["kernels"])) == ("25.0.7", 15, len(lines))
