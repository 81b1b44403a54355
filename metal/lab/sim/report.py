"""What a launch did: traffic per buffer, barriers, simdgroup operations and faults."""

from dataclasses import dataclass
from enum import Enum


class Fault(Enum):
    """Behaviour that a GPU does not define. The values are the runtime's (shim/sim/abi.h)."""

    OUT_OF_BOUNDS = 1
    WRITE_TO_INPUT = 2
    UNINITIALISED = 3
    RACE = 4
    BARRIER_DIVERGENCE = 5
    INACTIVE_LANE = 6
    THREADGROUP_MEMORY = 7
    MISALIGNED = 8
    STACK_OVERFLOW = 9
    UNWRITTEN = 10
    CRASH = 11
    ARITHMETIC = 12
    LIMITS = 13
    TRUNCATION = 14
    ENDLESS = 15
    DIVERGENT = 16
    NOT_UNIFORM = 17


@dataclass(frozen=True)
class Finding:
    """One fault. The message names kernel, buffer, index and threads."""

    fault: Fault
    message: str
    count: int = 1
    """How often it happened in the same place."""
    line: int | None = None
    """Line of the kernel's text, if known."""
    lanes: tuple[int, int] | None = None
    """For a divergent operation, two masks: lanes that took part, and lanes elsewhere in the program or at its end.
    Lanes that returned earlier are in neither.
    """

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class BufferReport:
    """The memory traffic of one buffer. Fields with `bytes` or `distinct` in their names count bytes.

    `group_distinct_*` counts a byte once for each threadgroup that touched it. `simd_accesses` counts instructions that
    up to 32 lanes execute at once, `simd_segments` the 128-byte lines that these touched. `simd_ideal_segments` counts
    the lines that the same bytes would fill side by side.
    """

    name: str
    bytes: int
    reads: int
    writes: int
    bytes_read: int
    bytes_written: int
    distinct_read: int
    distinct_written: int
    group_distinct_read: int
    group_distinct_written: int
    simd_accesses: int
    simd_segments: int
    simd_ideal_segments: int
    unwritten_elements: int
    first_unwritten: int

    @property
    def coalescing(self) -> float:
        """Lines that the bytes would fill, over lines fetched: 1.0 is ideal, 0.0 means that nothing was measured."""
        return self.simd_ideal_segments / self.simd_segments if self.simd_segments else 0.0


@dataclass(frozen=True)
class LaunchReport:
    """One launch of one kernel."""

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    checked: bool
    threadgroups: int
    threads: int
    barriers: int
    divergent_simd_ops: int
    """Operations that some lanes took no part in, for any reason."""
    benign_races: int
    threadgroup_memory: int
    buffers: dict[str, BufferReport]
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    """Divergent operations whose result cannot depend on the divergence. They never raise."""
