"""What a kernel does per token and KV head beside arithmetic, counted in the simulator: `Counted`.

The counts are of instructions of a simdgroup. What is done once for many tokens (the queries, the merging of slices,
the partial results) is in them as the fraction that falls on a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cortexmlx.metal.cost.cycles import Kind, Work
from cortexmlx.metal.sim.report import BufferReport, LaunchReport

LANE_BYTES = 16
"""What a lane loads at most with one instruction: four numbers of 32 bits."""
_UNIFORM_BYTES = 8


@dataclass(frozen=True)
class Counted:
    """Per token and KV head: `live_bytes` of keys and values that must be read, `loaded` that are (repeats included),
    `threadgroup_bytes` read and written, and the instructions that `work` counts.
    """

    live_bytes: float
    loaded: float
    threadgroup_bytes: float
    work: Work

    @property
    def amplification(self) -> float:
        """How often a live byte is loaded."""
        return self.loaded / self.live_bytes


def count(
    report: LaunchReport, slabs: Iterable[str], tokens: float, row_bytes: float, apart: Iterable[str] = ()
) -> Counted:
    """Counts of a launch for `tokens` tokens times KV heads.

    Args:
        report: a launch that was recorded with coalescing, which counts accesses of simdgroups.
        slabs: the names of the buffers that hold keys and values.
        row_bytes: bytes of a key or value of a token, the mean of the two.
        apart: buffers that hold a part of them in loads of their own: scales and biases.
    """
    names = set(slabs)
    apart = set(apart)
    wide = sum(report.buffers[name].bytes_read for name in names)
    loaded = wide + sum(report.buffers[name].bytes_read for name in apart)
    # Neighbouring loads of a lane are merged by every GPU compiler; the simulator's may leave them apart.
    row_loads = wide / min(row_bytes, 32 * LANE_BYTES)
    others = sum(b.simd_accesses for b in report.buffers.values() if b.name not in names and not _uniform(b))
    in_group = report.threadgroup_bytes_read + report.threadgroup_bytes_written
    simdgroups = report.threads / report.threadgroups / 32
    counted = {
        **_exchanges(report),
        Kind.LOAD: row_loads + others,
        Kind.THREADGROUP: in_group / (32 * 4),
        Kind.BARRIER: report.barriers * simdgroups + report.simdgroup_barriers,
    }
    work = {kind: number / tokens for kind, number in counted.items() if number}
    return Counted(2 * row_bytes, loaded / tokens, in_group / tokens, work)


_EXCHANGES = {
    "reduce": Kind.REDUCTION,
    "prefix": Kind.REDUCTION,
    "shuffle_indexed": Kind.SHUFFLE_ANY,
    "shuffle_uniform": Kind.SHUFFLE_SAME,
    "shuffle_xor": Kind.SHUFFLE_FIXED,
    "shuffle_shift": Kind.SHUFFLE_FIXED,
    "broadcast": Kind.SHUFFLE_FIXED,
    "broadcast_first": Kind.SHUFFLE_FIXED,
    "vote": Kind.VOTE,
    "active": Kind.VOTE,
    "matrix_multiply": Kind.MATRIX_HALF,
}
"""What the simulator calls the operations of simdgroups. Loads and stores of matrices are counted by their bytes."""


def _exchanges(report: LaunchReport) -> dict[Kind, int]:
    """What the lanes of simdgroups did together."""
    counted: dict[Kind, int] = {}
    for name, kind in _EXCHANGES.items():
        counted[kind] = counted.get(kind, 0) + report.simd_instructions[name]
    return counted


def _uniform(buffer: BufferReport) -> bool:
    """A single number, which a GPU reads once and keeps where all simdgroups see it."""
    return buffer.bytes <= _UNIFORM_BYTES
