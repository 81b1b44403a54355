"""The cost sheet as text: what each kernel spends, what share of a chip's bandwidth that leaves, what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from cortexmlx.metal.cost.chips import CHIPS
from cortexmlx.metal.cost.cycles import Kind
from cortexmlx.metal.cost.kernels import HELD, Cost, beside, mlx
from cortexmlx.metal.cost.published import MEASURED, SHARED, Measured
from cortexmlx.metal.mlx_decode import has_two_pass_gqa
from cortexmlx.metal.rules import Variant

SHAPES = tuple(Variant("float16", "float16", dim, dim, 32, group) for dim in (64, 128) for group in (1, 2, 4, 8))
"""The head_dims and query heads per KV head that most models have."""

SHOWN = ("M2 Max", "M4 Max", "M5")
_COLUMNS = (
    ("loads", 6, (Kind.LOAD,)),
    ("reduce", 7, (Kind.REDUCTION,)),
    ("fixed", 6, (Kind.SHUFFLE_FIXED,)),
    ("lane", 6, (Kind.SHUFFLE_SAME, Kind.SHUFFLE_ANY)),
    ("votes", 6, (Kind.VOTE,)),
    ("matrix", 7, (Kind.MATRIX_HALF, Kind.MATRIX_FLOAT)),
    ("arith", 7, (Kind.ARITHMETIC, Kind.MOVE, Kind.ADD64, Kind.MULTIPLY, Kind.SHIFT, Kind.CONVERT, Kind.CONTROL)),
    ("exp", 6, (Kind.EXPONENT, Kind.RECIPROCAL, Kind.RECIPROCAL_ROOT)),
    ("barrier", 8, (Kind.BARRIER,)),
)

EPILOGUE = """\
A model. What lanes exchange and what memory is asked for is counted in the simulator; arithmetic is counted from the
kernels' text, a lower bound without addresses, moves and masks. Cycles are those measured on an M1, for every chip;
bfloat16 counts as half. The model knows nothing of latency, of how many simdgroups fit, of caches, nor of a launch's
fixed cost: a share is what arithmetic leaves when enough work is in flight. Nothing in it is tuned to fit."""


def chips() -> Iterator[str]:
    """The chips, and their budgets for a token of one KV head in halves."""
    yield "chip       cores    GHz   GB/s   budget d = 64    128   clock"
    for chip in CHIPS.values():
        budgets = f"{chip.budget(4 * 64):>16.0f}{chip.budget(4 * 128):>7.0f}"
        yield f"{chip.name:<9}{chip.cores:>7}{chip.clock:>7.3f}{chip.bandwidth:>7.0f}{budgets}   {chip.clock_from}"


def costs(variants: Iterable[Variant]) -> Iterator[str]:
    """A line for each kernel of each shape: instructions of a simdgroup per token and KV head, cycles, shares."""
    yield f"{'':<26}{'bytes':>6}{'':>12}{'shuffles':>13}{'':>27}{'group':>6}{'':>7}{'cycles':>7}  share of bandwidth"
    titles = "".join(f"{title:>{width}}" for title, width, _ in _COLUMNS)
    yield f"{'':<26}{'/ live':>6}{titles}{'bytes':>6}{'cycles':>7}{'/ byte':>7}" + "".join(f"{c:>7}" for c in SHOWN)
    for variant in variants:
        yield variant.label
        yield from (_line(cost) for cost in beside(variant))


def _line(cost: Cost) -> str:
    numbers = "".join(f"{sum(cost.work.get(k, 0.0) for k in kinds):>{width}.1f}" for _, width, kinds in _COLUMNS)
    shares = "".join(f"{CHIPS[name].share(cost.live_bytes, cost.cycles):>7.2f}" for name in SHOWN)
    return (
        f"  {cost.kernel:<24}{cost.counted.amplification:>6.2f}{numbers}{cost.counted.threadgroup_bytes:>6.0f}"
        f"{cost.cycles:>7.0f}{cost.cycles / cost.live_bytes:>7.2f}{shares}"
    )


def modelled(measured: Measured) -> float:
    """GB/s that the model gives for a published measurement, on a machine that streams what that one does."""
    cost = mlx(measured.kernel, "float16", measured.dim, measured.group)
    return CHIPS[measured.chip].gigabytes(cost.live_bytes, cost.cycles, measured.stream)


def comparable() -> list[Measured]:
    """The published measurements of kernels that the installed MLX has."""
    return [m for m in MEASURED if m.kernel != SHARED or (m.dim in HELD and has_two_pass_gqa())]


def calibration() -> Iterator[str]:
    """The model beside what was published."""
    yield "chip      kernel                    heads    d   measured   model   measured / model   source"
    for m in comparable():
        rate = modelled(m)
        bound = " (memory)" if rate == m.stream else ""
        yield (
            f"{m.chip:<10}{m.kernel:<26}{m.group:>5}{m.dim:>5}{m.bandwidth:>11.0f}{rate:>8.0f}"
            f"{m.bandwidth / rate:>10.2f}{bound:<9}   {m.source}"
        )


def ranking() -> tuple[int, int, int]:
    """Of all pairs of measurements on one chip: how many the model orders as measured, how many it cannot tell apart
    because memory bounds both, and how many it orders the other way.
    """
    outcome = []
    for a, b in combinations(comparable(), 2):
        if a.chip == b.chip:
            difference = modelled(a) - modelled(b)
            outcome.append((difference > 0) - (difference < 0) if a.bandwidth > b.bandwidth else 0)
    return outcome.count(1), outcome.count(0), outcome.count(-1)


def sheet(variants: Iterable[Variant] = SHAPES) -> Iterator[str]:
    """The whole sheet, line by line."""
    yield from costs(variants)
    yield ""
    yield from chips()
    yield ""
    yield from calibration()
    same, tied, other = ranking()
    yield f"pairs on one chip: {same} in the measured order, {tied} that memory bounds both ways, {other} the other way"
    yield ""
    yield EPILOGUE
