"""What a launch did: traffic per buffer, barriers, simdgroup operations, and what was wrong with it."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Fault(Enum):
    """Things that a GPU does not define. The values are the runtime's (shim/sim/abi.h)."""

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
    """One fault: the sentence names kernel, buffer, index and threads; `count` says how often it happened there.

    For a divergent operation, `lanes` are masks: who took part, and who was elsewhere in the program, not returned.
    """

    fault: Fault
    message: str
    count: int = 1
    line: int | None = None
    lanes: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class BufferReport:
    """Traffic of one buffer, in bytes unless it says otherwise.

    `group_distinct_*` counts each byte once per threadgroup that touched it, summed over threadgroups. `simd_accesses`
    are instructions executed by up to 32 lanes at once, `simd_segments` the 128-byte lines that they touched, and
    `simd_ideal_segments` the lines that the same bytes would fill if they lay side by side.
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
        """1.0 when every line that was fetched was used whole (0.0 when nothing was measured)."""
        return self.simd_ideal_segments / self.simd_segments if self.simd_segments else 0.0


@dataclass(frozen=True)
class LaunchReport:
    """One launch of one kernel, out of `library`.

    `simd_instructions` counts operations of whole simdgroups by kind, quad operations among them: shuffles with a lane
    that is the same everywhere (`shuffle_uniform`) or not (`shuffle_indexed`), by xor, up and down (`shuffle_shift`),
    and so on; `simd_ops` sums them up. `divergent_simd_ops` are those that some lanes took no part in, for whatever
    reason. `notes` are divergent operations whose result cannot depend on it: they never raise.
    """

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    checked: bool
    threadgroups: int
    threads: int
    barriers: int
    simdgroup_barriers: int
    simd_instructions: dict[str, int]
    divergent_simd_ops: int
    benign_races: int
    threadgroup_memory: int
    threadgroup_bytes_read: int
    threadgroup_bytes_written: int
    buffers: dict[str, BufferReport]
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    library: Path

    @property
    def simd_ops(self) -> dict[str, int]:
        """Operations of simdgroups by family."""
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
        """The counters as text, one buffer a line."""
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
