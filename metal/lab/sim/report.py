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
    """Traffic of one buffer. The names with `bytes` or `distinct` count bytes.

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
    simdgroup_barriers: int
    simd_instructions: dict[str, int]
    """Operations of whole simdgroups and quads, by kind. A shuffle is `shuffle_uniform` if its lane is the same
    everywhere, else `shuffle_indexed`; `shuffle_xor` and `shuffle_shift` (up and down) are kinds of their own.
    """
    divergent_simd_ops: int
    """Operations that some lanes took no part in, for any reason."""
    benign_races: int
    threadgroup_memory: int
    threadgroup_bytes_read: int
    threadgroup_bytes_written: int
    buffers: dict[str, BufferReport]
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    """Divergent operations whose result cannot depend on the divergence. They never raise."""

    @property
    def simd_ops(self) -> dict[str, int]:
        """`simd_instructions` summed by family: reduce, shuffle, vote, matrix, barrier."""
        families = {"reduce": ("reduce", "prefix"), "shuffle": ("shuffle", "broadcast"), "vote": ("vote", "active")}
        return {
            family: sum(n for kind, n in self.simd_instructions.items() if kind.startswith(kinds))
            for family, kinds in {**families, "matrix": ("matrix",), "barrier": ("barrier",)}.items()
        }

    @property
    def bytes_read(self) -> int:
        """Device and constant bytes loaded, repeats included."""
        return sum(b.bytes_read for b in self.buffers.values())

    @property
    def bytes_written(self) -> int:
        """Device bytes stored, repeats included."""
        return sum(b.bytes_written for b in self.buffers.values())

    def table(self) -> str:
        """Return the counters as text, one line per buffer."""
        head = (
            f"{'buffer':<24}{'bytes':>12}{'read':>12}{'distinct':>12}{'per group':>12}{'written':>12}{'coalesced':>10}"
        )
        rows = [
            f"{b.name:<24}{b.bytes:>12}{b.bytes_read:>12}{b.distinct_read:>12}{b.group_distinct_read:>12}"
            f"{b.bytes_written:>12}{b.coalescing:>10.2f}"
            for b in self.buffers.values()
        ]
        ops = ", ".join(f"{count} {kind}" for kind, count in self.simd_ops.items() if count) or "none"
        tail = (
            f"{self.threadgroups} threadgroups of {self.threadgroup}, {self.barriers} barriers, "
            f"simdgroup operations: {ops}, {self.threadgroup_memory} bytes of threadgroup memory"
        )
        return "\n".join([f"{self.kernel}  grid {self.grid}", head, *rows, tail])
