"""`python -m cortexmlx.metal.lab.agx`: from what the compiler printed to figures per token and query head, and the
command as a whole, with a compiler that has its answers ready.
"""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cortexmlx.errors import KernelCompileError
from cortexmlx.metal.lab.agx import __main__ as command
from cortexmlx.metal.lab.agx.__main__ import heading, read_result, row
from cortexmlx.metal.lab.agx.compiler import CompilerOutput, MesaCompiler
from cortexmlx.metal.lab.agx.kernels import KernelWork
from cortexmlx.metal.lab.agx.listing import CLASSES, UnknownListing
from cortexmlx.metal.lab.cost.sheet import SHAPES
from cortexmlx.metal.rules import VARIANTS

STATISTICS = "SHADER: 9 inst, 7 alu, 70 bytes, 47 regs, 46 uniforms, 0 scratch, 832 threads, 3 loops, 2:5 spills:fills"

PAGED = """
=== FINAL kernel main
block0 {
} -> block1

block1 {
   r0 = device_load u0:u1, r0, x, #0, slot 0
   r0 = imad r0, r0, #0, #0
   r0 = imad r0, r0, #0, #0
} -> block2

block2 {
   r4l...r5h = device_load u0:u1, r4, xyzw, #0, slot 0
   r6l...r7h = device_load u0:u1, r4, xyzw, #0, slot 0
   r4 = ffma r4l, r4h, r5l
   r4 = simd_reduce r4, #1
   r4 = shuffle r4, r5
} -> block2 block3  from block1 block2

block3 {
   r2 = exp2 r2
} -> block4  from block2

block4 {
   r4...r7 = device_load u0:u1, r4, xyzw, #0, slot 0
   r4 = ffma r4, r5, r6
   r4 = ffma r4, r5, r6
} -> block4 block5  from block3 block4

block5 {
   wait #0, slot 0
} -> block1 block6  from block4

block6 {
   r2 = fadd r2, r3
} -> block6 block7  from block5 block6

block7 {
   stop
}
=== END
"""
SINGLE = """
=== FINAL kernel main
block0 {
   r4...r7 = device_load u0:u1, r4, xyzw, #0, slot 0
   r4 = ffma r4, r5, r6
   r4 = simd_reduce r4, #1
} -> block0 block1
block1 {
   r4...r5 = device_load u0:u1, r4, xy, #0, slot 0
   r4 = simd_reduce r4, #1
   r4 = simd_reduce r4, #1
} -> block1 block2
block2 {
   stop
}
=== END
"""
WORKLOAD = KernelWork("a variant", "paged_decode", "the text", 128, 2, 8, 16, 32)


def test_the_loops_over_keys_and_values_and_a_share_of_the_slice_are_one_token() -> None:
    result = read_result(WORKLOAD, CompilerOutput(PAGED, STATISTICS))
    assert result.tokens == (2, 1, 32), "16 bytes of keys are two tokens of 8, 16 bytes of values one of 16"
    counts = result.per_token_head
    assert counts is not None and list(counts) == list(CLASSES)
    # Keys: a turn is 2 tokens and 2 heads. Values: 1 token and 2 heads. The slice: 32 tokens and 2 heads.
    wanted = {
        "device load": 2 / 4 + 1 / 2 + 1 / 64,
        "fma": 1 / 4 + 2 / 2,
        "reduce": 1 / 4,
        "shuffle": 1 / 4,
        "integer": 2 / 64,
        "float": 1 / 64,
        "wait": 1 / 64,
    }
    assert {kind: number for kind, number in counts.items() if number} == pytest.approx(wanted, abs=5e-4)


def test_of_an_unrolled_loop_and_its_remainder_the_unrolled_one_counts() -> None:
    workload = replace(WORKLOAD, heads=1, key_bytes=4, value_bytes=4, slice_tokens=None)
    result = read_result(workload, CompilerOutput(SINGLE, STATISTICS))
    assert result.tokens == (2,)
    assert result.per_token_head is not None
    assert (result.per_token_head["reduce"], result.per_token_head["fma"]) == (0.5, 0.5)


def test_a_slice_without_loops_inside_is_one_turn() -> None:
    workload = replace(WORKLOAD, key_bytes=4, value_bytes=4, slice_tokens=2)
    result = read_result(workload, CompilerOutput(SINGLE, STATISTICS))
    assert result.tokens == (2,)
    assert result.per_token_head is not None and result.per_token_head["fma"] == 1 / (2 * 2)


def test_a_kernel_without_keys_has_statistics_only() -> None:
    workload = KernelWork("a variant", "paged_reduce", "the text", 128)
    result = read_result(workload, CompilerOutput(PAGED, STATISTICS))
    assert result.per_token_head is None and result.statistics.resident_threads == 832
    assert row(result).endswith("|")


@pytest.mark.parametrize(
    ("workload", "listing", "reason"),
    [
        (replace(WORKLOAD, key_bytes=12), PAGED, "loads 16 bytes, which is no multiple of a token's 12"),
        (replace(WORKLOAD, key_bytes=32), PAGED, "loads 16 bytes, which is no multiple of a token's 32"),
        (WORKLOAD, SINGLE, "no loop loads 32 tokens of 24 bytes"),
    ],
)
def test_loops_that_are_not_understood_are_refused(workload: KernelWork, listing: str, reason: str) -> None:
    with pytest.raises(UnknownListing, match=reason):
        read_result(workload, CompilerOutput(listing, STATISTICS))


def test_a_third_loop_that_loads_is_not_guessed_at() -> None:
    listing = PAGED.replace(
        "   r2 = exp2 r2\n} -> block4", "   r2 = device_load u0:u1, r2, x, #0, slot 0\n} -> block3 block4"
    )
    with pytest.raises(UnknownListing, match="loads 4 bytes, which is no multiple"):
        read_result(WORKLOAD, CompilerOutput(listing, STATISTICS))


def test_a_line_has_a_cell_under_each_heading() -> None:
    line = row(read_result(WORKLOAD, CompilerOutput(PAGED, STATISTICS)))
    before, after = (part.split() for part in line.split("|"))
    assert before[-4:] == ["9", "47", "832", "2:5"]
    names = heading().split("|")[1].split()
    cells = dict(zip(names, map(float, after), strict=True))
    assert (cells["fma"], cells["shuffle"]) == (1.25, 0.25)
    assert cells["all"] == pytest.approx(sum(cells.values()) - cells["all"], abs=0.1)


def test_the_record_is_plain_and_has_no_text() -> None:
    record = json.loads(json.dumps(read_result(WORKLOAD, CompilerOutput(PAGED, STATISTICS)).record()))
    assert "source" not in record
    assert (record["kernel"], record["heads"], record["threads"], record["half_registers"]) == (
        "paged_decode",
        2,
        128,
        47,
    )
    assert (record["resident_threads"], record["spills"], record["fills"]) == (832, 2, 5)
    assert record["tokens_per_turn"] == [2, 1, 32] and record["per_token_head"]["fma"] == 1.25


# The command as a whole.

NO_LOOPS_LISTING = "=== FINAL k main\nblock0 {\n   stop\n}\n=== END\n"
NO_LOOPS = "S: 9 inst, 7 alu, 70 bytes, 47 regs, 46 uniforms, 0 scratch, 832 threads, 3 loops, 0:0 spills:fills"


class Ready(MesaCompiler):
    """Answers what is asked of it with the same two texts; refuses what has sinks."""

    def compile(self, unit: str) -> CompilerOutput:
        if "constexpr bool SINKS = 1" in unit:
            raise KernelCompileError("clang failed (1):\nno sinks here")
        return CompilerOutput(NO_LOOPS_LISTING, NO_LOOPS)


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
    monkeypatch.setattr(command, "_workloads", lambda words, every: iter(()))
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
