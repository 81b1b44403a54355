"""The cycles that one simdgroup's instruction costs its scheduler, measured on an M1 by philipturner/metal-benchmarks.

Two pipelines run in parallel. One does floats, 32-bit additions, comparisons and moves. The other does integer
multiplication, shifts, conversions and transcendentals. An instruction of the second pipeline keeps it busy for its
published throughput and takes two issue slots of the scheduler. So a transcendental or a multiplication takes 4 cycles
with two additions and 5 with three, as in the mixed workloads published there (tests/metal/cost/test_cycles.py).

For operations among lanes, no mixed workload is published. `cycles` assumes that they keep the scheduler busy,
`cycles_beside` that they run in parallel with arithmetic. Loads, stores, barriers and branches are not published at
all. They cost one issue slot here. Both functions give too few cycles where an instruction is not counted or costs
more.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Kind(Enum):
    """A kind of instruction: what it is, its issue slots, and the cycles for which it keeps the second pipeline
    busy.
    """

    ARITHMETIC = ("float and 32-bit integer: fma, add, multiply, compare, select, bitwise", 1.0, 0.0)
    MOVE = ("moves between registers and constants into them", 1.0, 0.0)
    ADD64 = ("64-bit addition", 4.68, 0.0)
    MULTIPLY = ("32-bit integer multiplication", 2.0, 4.0)
    SHIFT = ("shifts and bit fields", 2.0, 4.0)
    CONVERT = ("conversion between float and integer, rounding", 2.0, 4.0)
    EXPONENT = ("exp2, log2", 2.0, 4.0)
    RECIPROCAL = ("reciprocal", 2.0, 6.0)
    RECIPROCAL_ROOT = ("reciprocal square root", 2.0, 8.0)
    REDUCTION = ("simd_sum, simd_max and the like", 14.54, 0.0)
    SHUFFLE_FIXED = ("simd_broadcast; shuffles by a lane or distance known to the compiler", 2.04, 0.0)
    SHUFFLE_SAME = ("simd_shuffle by a lane known at run time, the same in all lanes", 28.25, 0.0)
    SHUFFLE_ANY = ("simd_shuffle by a lane that differs from lane to lane", 32.32, 0.0)
    VOTE = ("simd_ballot, simd_any, simd_all", 2.02, 0.0)
    MATRIX_HALF = ("8x8 matrix product of halves", 20.87, 0.0)
    MATRIX_FLOAT = ("8x8 matrix product of floats", 20.14, 0.0)
    LOAD = ("device loads and stores", 1.0, 0.0)
    THREADGROUP = ("threadgroup loads and stores", 1.0, 0.0)
    BARRIER = ("barriers", 1.0, 0.0)
    CONTROL = ("branches, masks of active lanes, waits", 1.0, 0.0)

    def __init__(self, meaning: str, issue: float, second: float) -> None:
        self.meaning = meaning
        self.issue = issue
        self.second = second


Work = Mapping[Kind, float]
"""The number of instructions of each kind. A fraction is an instruction that runs once for several tokens."""


def together(*parts: Work) -> dict[Kind, float]:
    """Return the sum of several works."""
    return {kind: total for kind in Kind if (total := sum(part.get(kind, 0.0) for part in parts))}


def cycles(work: Work) -> float:
    """Return the cycles of one scheduler when enough simdgroups are ready to hide every latency."""
    issue = sum(kind.issue * count for kind, count in work.items())
    second = sum(kind.second * count for kind, count in work.items())
    return max(issue, second)


_AMONG_LANES = (Kind.SHUFFLE_FIXED, Kind.SHUFFLE_SAME, Kind.SHUFFLE_ANY, Kind.REDUCTION, Kind.VOTE)


def cycles_beside(work: Work) -> float:
    """Return the same for exchanges among lanes that run in parallel with arithmetic: the longer of the two."""
    exchanges = {kind: count for kind, count in work.items() if kind in _AMONG_LANES}
    return max(cycles(exchanges), cycles({kind: count for kind, count in work.items() if kind not in exchanges}))
