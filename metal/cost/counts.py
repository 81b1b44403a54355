"""What a kernel does besides arithmetic, per token and KV head, counted in the simulator.

The counts are instructions of a simdgroup. Some work is done once for many tokens: the queries, the merging of slices,
the partial results. A token's count contains its fraction of that work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cortexmlx.metal.cost.cycles import Kind, Work
from cortexmlx.metal.sim.report import BufferReport, LaunchReport

LANE_BYTES = 16
"""The most bytes that a lane loads with one instruction: four numbers of 32 bits."""
_UNIFORM_BYTES = 8


@dataclass(frozen=True)
class Counted:
    """Counts per token and KV head."""

    live_bytes: float
    """Bytes of keys and values that must be read."""
    loaded: float
    """Bytes of keys and values that are read, repeats included."""
    threadgroup_bytes: float
    """Bytes of threadgroup memory that are read and written."""
    work: Work
    """The number of instructions of each kind."""

    @property
    def amplification(self) -> float:
        """Loads of each live byte."""
        return self.loaded / self.live_bytes


def count(
    report: LaunchReport, slabs: Iterable[str], tokens: float, row_bytes: float, apart: Iterable[str] = ()
) -> Counted:
    """Return the counts of a launch that computes `tokens`, the product of tokens and KV heads.

    Args:
        report: a launch that was recorded with coalescing, which counts accesses of simdgroups.
        slabs: the names of the buffers that hold keys and values.
        row_bytes: bytes of a token's key or value: the mean of the two.
        apart: the names of buffers that hold a part of the keys and values and are loaded separately: scales and
            biases.
    """
    names = set(slabs)
    apart = set(apart)
    wide = sum(report.buffers[name].bytes_read for name in names)
    loaded = wide + sum(report.buffers[name].bytes_read for name in apart)
    # Every GPU compiler merges neighbouring loads of a lane. The simulator's compiler may leave them separate.
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
"""The simulator's names for the operations of simdgroups. Loads and stores of matrices are counted by their bytes."""


def _exchanges(report: LaunchReport) -> dict[Kind, int]:
    """Return the counts of the operations among the lanes of simdgroups."""
    counted: dict[Kind, int] = {}
    for name, kind in _EXCHANGES.items():
        counted[kind] = counted.get(kind, 0) + report.simd_instructions[name]
    return counted


def _uniform(buffer: BufferReport) -> bool:
    """Whether a buffer is a single number. A GPU reads it once and keeps it where all simdgroups see it."""
    return buffer.bytes <= _UNIFORM_BYTES
