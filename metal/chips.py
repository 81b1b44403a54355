"""Core counts, clocks and memory bandwidths of Apple's GPUs, and the scheduler cycles that a kernel may spend before
memory waits for it.

Cores and bandwidth are Apple's published figures for the largest GPU of the name. Apple publishes no clocks:
`clock_from` names the source of each.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULERS = 4
"""Schedulers of a core. Each issues one instruction of one simdgroup a cycle: 128 lanes of arithmetic a core
(philipturner/metal-benchmarks, "ALU Layout").
"""


@dataclass(frozen=True)
class Chip:
    """A GPU."""

    name: str
    cores: int
    clock: float
    """Highest clock in GHz."""
    bandwidth: float
    """Memory bandwidth in GB/s (10^9 bytes)."""
    clock_from: str
    """The source of the clock."""

    @property
    def scheduler_cycles(self) -> float:
        """Cycles of all schedulers together, in 10^9 per second."""
        return self.cores * SCHEDULERS * self.clock

    def budget(self, live_bytes: float) -> float:
        """Return the scheduler cycles that pass while memory delivers `live_bytes` of keys and values. With this many
        cycles, arithmetic takes as long as memory.
        """
        return live_bytes * self.scheduler_cycles / self.bandwidth

    def share(self, live_bytes: float, cycles: float) -> float:
        """Return the share of the bandwidth, at most 1, that a kernel reaches if it spends `cycles` on `live_bytes`."""
        return min(1.0, self.budget(live_bytes) / cycles)

    def gigabytes(self, live_bytes: float, cycles: float, stream: float | None = None) -> float:
        """Return the GB/s that a kernel reaches if it spends `cycles` on `live_bytes`. Memory gives at most `stream`
        GB/s (None: the published bandwidth).
        """
        return min(stream or self.bandwidth, live_bytes * self.scheduler_cycles / cycles)


# The clock is that of the highest GPU state that powermetrics lists or reaches.
_POWERMETRICS = "powermetrics"
_AS_MAX = "taken to be the M5 Max's"

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("M1", 8, 1.278, 68.25, "philipturner/metal-benchmarks"),
        Chip("M1 Ultra", 64, 1.296, 800.0, "philipturner/metal-benchmarks"),
        Chip("M2 Max", 38, 1.398, 400.0, "philipturner/applegpuinfo#10"),
        Chip("M3 Max", 40, 1.380, 400.0, f"{_POWERMETRICS}: philipturner/applegpuinfo#4"),
        Chip("M4", 10, 1.578, 120.0, f"{_POWERMETRICS}: published listings of its states end there"),
        Chip("M4 Max", 40, 1.578, 546.0, f"{_POWERMETRICS}: published logs under load"),
        Chip("M5", 10, 1.620, 153.0, _AS_MAX),
        Chip("M5 Pro", 20, 1.620, 307.0, _AS_MAX),
        Chip("M5 Max", 40, 1.620, 614.0, f"{_POWERMETRICS}: feedback-assistant/reports#830"),
    )
}
"""The chips of the sheet, by name."""
