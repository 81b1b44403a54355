"""A reader of what Mesa's compiler prints for a kernel: its instructions in blocks, the loops, and the statistics.

A listing is a sequence of blocks. Each block names the blocks that may follow it:

    block1 {
       r4l...r5h = device_load u0:u1, r4.abs, xyzw, #0, slot 0
       r4 = simd_reduce r4, #1
    } -> block1 block2  from block0
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from cortexmlx.errors import CortexError

_BLOCK = re.compile(r"^block(\d+) \{\n(.*?)^\}([^\n]*)$", re.M | re.S)
_REGISTER = re.compile(r"\br(\d+)([lh]?)\b")
_STATISTICS = re.compile(
    r"(?P<instructions>\d+) inst, .*? (?P<code_bytes>\d+) bytes, (?P<half_registers>\d+) regs, "
    r"(?P<uniforms>\d+) uniforms, \d+ scratch, (?P<resident_threads>\d+) threads, \d+ loops, "
    r"(?P<spills>\d+):(?P<fills>\d+) spills"
)
_MAIN = re.compile(r"^=== FINAL (?P<name>\S+) main$\n(?P<text>.*?)^=== END$", re.M | re.S)

CLASSES: dict[str, tuple[str, ...]] = {
    "fma": ("ffma", "hfma"),
    "float": (
        *("fadd", "fmul", "hadd", "hmul", "fcmpsel", "fcmp", "floor", "ceil", "trunc", "roundeven", "rcp", "rsqrt"),
        *("srsqrt", "log2", "exp2", "sin_pt_1", "sin_pt_2"),
    ),
    "integer": (
        *("iadd", "imad", "bfi", "bfeil", "extr", "asr", "bitop", "and", "or", "xor", "not", "intl", "icmp", "icmpsel"),
        *("bitrev", "popcount", "ffs", "signext"),
    ),
    "convert": ("convert",),
    "shuffle": (
        *("shuffle", "shuffle_xor", "shuffle_up", "shuffle_down", "quad_shuffle", "quad_shuffle_xor"),
        *("quad_shuffle_up", "quad_shuffle_down", "ballot", "icmp_ballot", "fcmp_ballot"),
    ),
    "reduce": ("simd_reduce", "simd_prefix", "quad_reduce", "quad_prefix"),
    "matrix": ("simd_matrix",),
    "device load": ("device_load",),
    "device store": ("device_store",),
    "threadgroup": ("local_load", "local_store", "threadgroup_barrier"),
    "spill": ("stack_load", "stack_store", "stack_map", "stack_unmap", "stack_adjust"),
    "control": (
        *("if_icmp", "else_icmp", "while_icmp", "if_fcmp", "else_fcmp", "while_fcmp", "break", "break_if_icmp"),
        *("break_if_fcmp", "jmp_exec_any", "jmp_exec_none", "jmp_exec_none_after", "pop_exec", "begin_cf", "stop"),
    ),
    "move": ("mov", "mov_imm", "get_sr", "get_sr_barrier", "swap", "uniform_store"),
    "wait": ("wait", "memory_barrier", "memory_barrier_2", "memory_barrier_3"),
}
"""The classes of instructions that the table counts, each with the compiler's names of its instructions."""

_CLASS_OF = {operation: name for name, operations in CLASSES.items() for operation in operations}


class UnknownListing(CortexError):
    """The compiler printed something that this reader does not know. Perhaps it is another version."""


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    operation: str
    written: int
    """Bytes that it writes to a lane's registers."""

    @property
    def kind(self) -> str:
        """The class that counts this instruction."""
        return _CLASS_OF[self.operation]


@dataclass(frozen=True)
class BasicBlock:
    """Instructions that run in order, and the numbers of the blocks that may follow."""

    number: int
    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A loop."""

    inner: int
    """The number of loops inside it."""
    instructions: tuple[Instruction, ...]
    """The instructions of one turn, with both sides of a branch, without the loops inside."""

    @property
    def kinds(self) -> Counter[str]:
        """The number of instructions of each class."""
        return Counter(i.kind for i in self.instructions)

    @property
    def loaded(self) -> int:
        """Bytes that a lane loads from device memory in one turn."""
        return sum(i.written for i in self.instructions if i.operation == "device_load")


@dataclass(frozen=True)
class Statistics:
    """What the compiler says of a kernel."""

    instructions: int
    code_bytes: int
    half_registers: int
    """Registers of 16 bits per thread, at most 256."""
    uniforms: int
    resident_threads: int
    """Threads that the register file of a GPU core holds at once, at most 1024."""
    spills: int
    """Stores of spilled registers."""
    fills: int
    """Loads of spilled registers."""


def read_statistics(text: str) -> Statistics:
    """Return the statistics from the compiler's line of them.

    Raises:
        UnknownListing: the text has no such line, or more than one.
    """
    found = list(_STATISTICS.finditer(text))
    if len(found) != 1:
        raise UnknownListing(f"the compiler printed {len(found)} lines of statistics for one kernel: {text[:200]!r}")
    return Statistics(**{name: int(found[0][name]) for name in Statistics.__dataclass_fields__})


def read_blocks(text: str) -> tuple[BasicBlock, ...]:
    """Return the blocks of the one kernel in the compiler's output, in order, without its preamble, which runs once.

    Raises:
        UnknownListing: the output has no kernel, several kernels, or an instruction that belongs to no class.
    """
    kernels = list(_MAIN.finditer(text))
    if len(kernels) != 1:
        raise UnknownListing(f"the compiler printed {len(kernels)} kernels, not one")
    blocks = tuple(
        BasicBlock(
            int(match[1]),
            tuple(_instruction(line.strip()) for line in match[2].splitlines() if line.strip()),
            tuple(map(int, re.findall(r"block(\d+)", match[3].partition(" from ")[0]))),
        )
        for match in _BLOCK.finditer(kernels[0]["text"])
    )
    if not blocks:
        raise UnknownListing("the compiler printed a kernel without blocks")
    return blocks


def _instruction(line: str) -> Instruction:
    targets, _, rest = line.rpartition(" = ")
    operation = rest.split()[0].rstrip(",").split(".")[0]
    if operation not in _CLASS_OF:
        raise UnknownListing(f"instruction '{operation}' is in no class of metal/lab/agx/listing.py: {line!r}")
    return Instruction(operation, sum(_bytes(target) for target in targets.split(", ")) if targets else 0)


def _bytes(registers: str) -> int:
    """Return the bytes of a register or of a range of registers, `r4l...r5h`."""
    found = [(int(m[1]), m[2]) for m in _REGISTER.finditer(registers)]
    if not found:
        return 0
    (first, half), (last, last_half) = found[0], found[-1]
    return 2 * ((2 * last + (last_half != "l") + 1) - (2 * first + (half == "h")))


def find_loops(blocks: tuple[BasicBlock, ...]) -> tuple[Loop, ...]:
    """Return loops, outer first. Each goes from a block to the last block, itself or later, that jumps back to it."""
    at = {block.number: place for place, block in enumerate(blocks)}
    ends: dict[int, int] = {}
    for place, block in enumerate(blocks):
        for successor in block.successors:
            if at[successor] <= place:
                ends[at[successor]] = place
    spans = sorted(ends.items())

    def loop(first: int, last: int) -> Loop:
        inside = [(a, z) for a, z in spans if (a, z) != (first, last) and first <= a and z <= last]
        own = [b for p, b in enumerate(blocks) if first <= p <= last and not any(a <= p <= z for a, z in inside)]
        return Loop(len(inside), tuple(i for block in own for i in block.instructions))

    return tuple(loop(*span) for span in spans)
