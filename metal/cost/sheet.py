"""The cost sheet as text: what each kernel spends, its share of a chip's bandwidth, and published measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations

from cortexmlx.metal.chips import CHIPS
from cortexmlx.metal.compare.mlx_decode import HELD, has_two_pass_gqa
from cortexmlx.metal.cost.compiled import RECORD_AGAIN, kept_record
from cortexmlx.metal.cost.cycles import Kind, Work, cycles, cycles_beside
from cortexmlx.metal.cost.kernels import Cost, beside, mlx
from cortexmlx.metal.cost.published import MEASURED, SHARED, Measured
from cortexmlx.metal.rules import Variant

SHAPES = tuple(Variant("float16", "float16", dim, dim, 32, group) for dim in (64, 128) for group in (1, 2, 4, 8))
"""The head_dims and query heads per KV head that most models have."""

WIDE_SHAPES = (
    *(Variant("float16", "float16", 512, 512, 32, group) for group in (8, 16)),
    *(Variant("float16", "float16", 576, 512, 32, group, latent=True) for group in (8, 16, 128)),
)
"""Heads of 512, and latent attention."""

QUANTIZED = tuple(
    Variant("float16", "float16", dim, dim, 32, group, kv_bits=bits, quant_group=64)
    for bits in (8, 4)
    for dim in (64, 128)
    for group in (1, 2, 4, 8)
)
"""The shapes of `SHAPES` with quantized keys and values."""

SHOWN = ("M2 Max", "M4 Max", "M5")
_COMPUTING = (Kind.ARITHMETIC, Kind.MOVE, Kind.ADD64, Kind.MULTIPLY, Kind.SHIFT, Kind.CONVERT, Kind.CONTROL)
_TRANSCENDENTAL = (Kind.EXPONENT, Kind.RECIPROCAL, Kind.RECIPROCAL_ROOT)
_COLUMNS = (
    ("loads", 6, (Kind.LOAD,)),
    ("reduce", 7, (Kind.REDUCTION,)),
    ("fixed", 6, (Kind.SHUFFLE_FIXED,)),
    ("lane", 6, (Kind.SHUFFLE_SAME, Kind.SHUFFLE_ANY)),
    ("votes", 6, (Kind.VOTE,)),
    ("matrix", 7, (Kind.MATRIX_HALF, Kind.MATRIX_FLOAT)),
    ("barrier", 8, (Kind.BARRIER,)),
)

EPILOGUE = """\
A model. What lanes exchange and what memory is asked for is counted in the simulator; arithmetic in the kernels' text
("least": no addresses, moves, masks) and in the output of a compiler for the M1 ("code": both sides of a branch count).
Cycles are those measured on an M1, for every chip, and its compiler is the M1's: later chips have instructions that it
has not. Shares are of the cycles of the code, or of the least where it was not compiled, with lanes' exchanges keeping
the scheduler busy ("beside": if they run beside the arithmetic of the code). The model knows nothing of latency, of how
many simdgroups fit, of caches, nor of a launch's fixed cost: it says what is possible when enough work is in flight.
Nothing in it is tuned to fit."""


def chips() -> Iterator[str]:
    """Yield the chips, and their budgets in cycles for a token of one KV head in halves."""
    yield "chip       cores    GHz   GB/s   budget d = 64    128   clock"
    for chip in CHIPS.values():
        budgets = f"{chip.budget(4 * 64):>16.0f}{chip.budget(4 * 128):>7.0f}"
        yield f"{chip.name:<9}{chip.cores:>7}{chip.clock:>7.3f}{chip.bandwidth:>7.0f}{budgets}   {chip.clock_from}"


def costs(variants: Iterable[Variant]) -> Iterator[str]:
    """Yield a line for each kernel of each shape: instructions of a simdgroup per token and KV head, cycles, shares."""
    titles = "".join(f"{title:>{width}}" for title, width, _ in _COLUMNS)
    shuffles = titles.index("fixed")
    above = f"{'':<27}bytes{'':<{shuffles}}{'shuffles':<{len(titles) - shuffles}}"
    yield f"{above}  group  arithmetic        cycles          share of bandwidth"
    rest = "".join(f"{title:>7}" for title in ("bytes", "least", "code", "least", "beside", "code", *SHOWN))
    yield f"{'':<26}/ live{titles}{rest}"
    for variant in variants:
        yield variant.label
        yield from (_line(cost) for cost in beside(variant))


def _line(cost: Cost) -> str:
    counted = "".join(f"{_sum(cost.counted.work, kinds):>{width}.1f}" for _, width, kinds in _COLUMNS)
    computing = _COMPUTING + _TRANSCENDENTAL
    code = f"{_sum(cost.compiled, computing):.1f}" if cost.compiled else "-"
    spent = [cycles(cost.least), cycles_beside(cost.work), *([cycles(cost.work)] if cost.compiled else [])]
    numbers = "".join(f"{number:>7.0f}" for number in spent)
    shares = "".join(f"{CHIPS[name].share(cost.live_bytes, cycles(cost.work)):>7.2f}" for name in SHOWN)
    return (
        f"  {cost.kernel:<24}{cost.counted.amplification:>6.2f}{counted}{cost.counted.threadgroup_bytes:>7.0f}"
        f"{_sum(cost.text, computing):>7.1f}{code:>7}{numbers:<21}{shares}"
    )


def _sum(work: Work, kinds: Iterable[Kind]) -> float:
    return sum(work.get(kind, 0.0) for kind in kinds)


def compiler() -> Iterator[str]:
    """Yield the compiler of the record, and the texts that have changed since. The sheet shows those as not
    compiled.
    """
    record = kept_record()
    yield f"code: {record.compiler}"
    for text in record.stale():
        yield f"{text} has changed since: it is shown as not compiled. {RECORD_AGAIN}"


def modelled(measured: Measured, spent: Callable[[Cost], float] = lambda cost: cycles(cost.work)) -> float:
    """Return the GB/s that the model predicts for a published measurement, on a machine with the measured stream."""
    cost = mlx(measured.kernel, "float16", measured.dim, measured.group)
    return CHIPS[measured.chip].gigabytes(cost.live_bytes, spent(cost), measured.stream)


def comparable() -> list[Measured]:
    """Return the published measurements of kernels that the installed MLX has."""
    return [m for m in MEASURED if m.kernel != SHARED or (m.dim in HELD and has_two_pass_gqa())]


def calibration() -> Iterator[str]:
    """Yield a line for each published measurement, with what the model predicts."""
    yield "chip      kernel                    heads    d   measured   least  beside    code   measured / code   source"
    for m in comparable():
        least = modelled(m, lambda cost: cycles(cost.least))
        beside = modelled(m, lambda cost: cycles_beside(cost.work))
        rate = modelled(m)
        bound = " (memory)" if rate == m.stream else ""
        yield (
            f"{m.chip:<10}{m.kernel:<26}{m.group:>5}{m.dim:>5}{m.bandwidth:>11.0f}{least:>8.0f}{beside:>8.0f}{rate:>8.0f}"
            f"{m.bandwidth / rate:>9.2f}{bound:<9} {m.source}"
        )


def ranking() -> tuple[int, int, int]:
    """Count pairs of measurements on one chip: those that the model orders as measured, those that it cannot tell apart
    because memory bounds both, and those that it orders the other way.
    """
    outcome = []
    for a, b in combinations(comparable(), 2):
        if a.chip == b.chip:
            difference = modelled(a) - modelled(b)
            outcome.append((difference > 0) - (difference < 0) if a.bandwidth > b.bandwidth else 0)
    return outcome.count(1), outcome.count(0), outcome.count(-1)


def sheet(variants: Iterable[Variant] = (*SHAPES, *WIDE_SHAPES, *QUANTIZED)) -> Iterator[str]:
    """Yield the whole sheet, line by line."""
    yield from costs(variants)
    yield from compiler()
    yield ""
    yield from chips()
    yield ""
    yield from calibration()
    same, tied, other = ranking()
    yield f"pairs on one chip: {same} in the measured order, {tied} that memory bounds both ways, {other} the other way"
    yield ""
    yield EPILOGUE
