"""Reading what the compiler prints, on listings written by hand in its form."""

from __future__ import annotations

from collections import Counter

import pytest

from cortexmlx.metal.lab.agx.listing import Statistics, UnknownListing, find_loops, read_blocks, read_statistics

STATISTICS = (
    "SHADER-DB:  - MESA_SHADER_COMPUTE shader: 130 inst, 113 alu, 113 fscib, 102 ic, 1008 bytes, 47 regs, 46 uniforms, "
    "0 scratch, 1024 threads, 3 loops, 2:5 spills:fills\nKERNEL: k scratch 0 local 1040 gprs 48 bytes 880\n"
)

NESTED = """
shader before optimisation that nobody reads
=== FINAL kernel main
block0 {
   r0 = mov_imm #0
} -> block1 

block1 {
   while_icmp r0, u6, #0, n=1
   r1l = device_load u0:u1, r0, x, #0, slot 0
} -> block2  from block0 block4

block2 {
   r4l...r5h = device_load u0:u1, r4.abs, xyzw, #0, slot 0
   wait #0, slot 0
   r6...r9 = device_load u2:u3, r4.abs, xyzw, #0, slot 1
   r4 = ffma.sat r4l, r4h, r5l
   r4 = simd_reduce r4, #1
   jmp_exec_any #55db581d7500
} -> block2 block3  from block1 block2

block3 {
   r2 = iadd r2, #1, #0
   r14...r15 = simd_matrix r16l...r16h, r17l...r17h, r14...r15
} -> block4  from block2

block4 {
   r10:r11 = iadd r20:r21, r16:r17, #0
   local_store r3, r2l, #0, x, #0
} -> block1 block5  from block3

block5 {
   stop 
} from block4

=== END
=== FINAL kernel preamble
block0 {
   uniform_store r1, #12, x, #0
}
=== END
"""


def test_statistics_are_read_from_their_line() -> None:
    assert read_statistics(STATISTICS) == Statistics(
        instructions=130, code_bytes=1008, half_registers=47, uniforms=46, resident_threads=1024, spills=2, fills=5
    )


@pytest.mark.parametrize("text", ["", STATISTICS * 2])
def test_statistics_are_those_of_one_kernel(text: str) -> None:
    with pytest.raises(UnknownListing, match=f"{2 if text else 0} lines of statistics"):
        read_statistics(text)


def test_blocks_hold_the_kernel_without_its_preamble() -> None:
    blocks = read_blocks(NESTED)
    assert [block.number for block in blocks] == [0, 1, 2, 3, 4, 5]
    assert [block.successors for block in blocks] == [(1,), (2,), (2, 3), (4,), (1, 5), ()]
    assert [i.operation for i in blocks[2].instructions][:3] == ["device_load", "wait", "device_load"]
    assert blocks[2].instructions[3].operation == "ffma", "a modifier is no part of the name"


def test_what_an_instruction_writes_is_counted_in_bytes() -> None:
    blocks = read_blocks(NESTED)
    written = {i.operation: i.written for block in (*blocks[3:5], blocks[0]) for i in block.instructions}
    assert written == {"iadd": 8, "simd_matrix": 8, "local_store": 0, "mov_imm": 4}
    assert [i.written for i in blocks[2].instructions] == [8, 0, 16, 4, 4, 0]
    assert [i.written for i in blocks[1].instructions] == [0, 2]


def test_a_loop_has_what_is_not_in_the_loops_inside_it() -> None:
    outer, inner = find_loops(read_blocks(NESTED))
    assert (outer.inner, inner.inner) == (1, 0)
    assert (outer.loaded, inner.loaded) == (2, 24)
    assert inner.kinds == Counter({"device load": 2, "wait": 1, "fma": 1, "reduce": 1, "control": 1})
    assert outer.kinds == Counter({"control": 1, "device load": 1, "integer": 2, "matrix": 1, "threadgroup": 1}), (
        "of block 1, 3 and 4"
    )


def test_an_instruction_of_no_class_is_not_passed_over() -> None:
    with pytest.raises(UnknownListing, match="'frobnicate' is in no class"):
        read_blocks(NESTED.replace("simd_reduce", "frobnicate"))


def test_output_without_a_kernel_or_with_two_is_refused() -> None:
    for text, count in (("", 0), (NESTED * 2, 2)):
        with pytest.raises(UnknownListing, match=f"printed {count} kernels"):
            read_blocks(text)
