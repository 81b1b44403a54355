"""The goals of the decode kernels, and what the record, the simulator and the sheet say of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cortexmlx.metal.chips import CHIPS
from cortexmlx.metal.compare.traffic import measure
from cortexmlx.metal.cost.compiled import CompiledKernel, kept_record
from cortexmlx.metal.cost.cycles import cycles
from cortexmlx.metal.cost.kernels import paged
from cortexmlx.metal.cost.sheet import SHOWN
from cortexmlx.metal.rules import THREADS, VARIANTS, Variant
from cortexmlx.metal.shape import Kernel

SERVED = tuple(Variant("float16", "float16", dim, dim, 32, group) for dim in (64, 128) for group in (4, 8))
"""The shapes of most models."""

SIXTEEN = tuple(replace(SERVED[0], key_dim=dim, value_dim=dim, group=16) for dim in (64, 128))
"""The shapes with the most heads for which the share of partial results is a goal."""

VECTOR = Variant("float16", "float16", 128, 128, 32, 8, forced=Kernel.VECTOR)
TOKENS = 1024


@dataclass(frozen=True)
class Goal:
    """A limit, and the worst value among the kernels."""

    what: str
    """The name of the value."""
    limit: float
    found: float
    where: str
    """The variant with the worst value."""
    at_least: bool = False
    """Whether `found` must be at least `limit`. Otherwise it must be at most `limit`."""

    @property
    def met(self) -> bool:
        """Whether `found` keeps the limit."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def line(self) -> str:
        """Return the goal's line of the table."""
        limit = f"{'>=' if self.at_least else '<='} {self.limit:g}"
        return f"{self.what:<58}{limit:>8}{self.found:>8.4g}  {'yes' if self.met else 'NO':<4}{self.where}"


def of_partition(variant: Variant) -> CompiledKernel | None:
    """Return the record of the kernel that computes a variant's partitions, or None. It is the same with and without
    sinks.
    """
    return kept_record().find(variant.geometry.name, replace(variant, sinks=False).label)


def compiled_goals() -> Iterator[Goal]:
    """Yield what the record of compiled kernels says of all doctor variants in it."""
    known = [(v, kernel) for v in VARIANTS if (kernel := of_partition(v)) is not None]
    if not known:
        return

    def groups(v: Variant, kernel: CompiledKernel) -> int:
        return kernel.threads // v.geometry.threads - THREADS // v.geometry.threads

    spilled, kernel = max(known, key=lambda pair: pair[1].spills)
    yield Goal("stores and loads of spilled registers", 0, kernel.spills, spilled.label)
    fewest, kernel = min(known, key=lambda pair: pair[1].threads)
    yield Goal("threads that a core holds", THREADS, kernel.threads, fewest.label, at_least=True)
    fewest, kernel = min(known, key=lambda pair: groups(*pair))
    what = f"threadgroups that a core holds, less those of {THREADS} threads"
    yield Goal(what, 0, groups(fewest, kernel), fewest.label, at_least=True)


def counted_goals() -> Iterator[Goal]:
    """Yield the goals that follow from counts in the simulator."""
    heads = VECTOR.group
    yield Goal("cycles of the vector kernel per token and head", 26, cycles(paged(VECTOR).work) / heads, VECTOR.label)
    bounds = {
        (chip, v): CHIPS[chip].share(paged(v).live_bytes, cycles(paged(v).work)) for chip in SHOWN for v in SERVED
    }
    chip, variant = min(bounds, key=lambda key: bounds[key])
    where = f"{chip}, {variant.label}"
    yield Goal("share of bandwidth, 4 and 8 heads of 64 and 128", 0.9, bounds[chip, variant], where, at_least=True)
    traffic = {v: measure(v, TOKENS, tail_tokens=7) for v in (*SERVED, *SIXTEEN)}
    worst = max(traffic, key=lambda v: traffic[v].distinct)
    yield Goal("distinct bytes loaded / bytes needed", 1.05, traffic[worst].distinct, worst.label)
    worst = max(traffic, key=lambda v: traffic[v].partials)
    yield Goal("partial results / bytes needed", 0.1, traffic[worst].partials, worst.label)


def table() -> Iterator[str]:
    """Yield the goals, line by line."""
    yield f"{'':<58}{'goal':>8}{'found':>8}  met where (the worst)"
    for goal in (*compiled_goals(), *counted_goals()):
        yield goal.line()
    for text in kept_record().stale():
        yield f"{text} has changed since it was compiled"
