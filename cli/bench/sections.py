"""The sections of `cortexmlx bench`, and the options that each takes. Other options are refused, not ignored."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

import typer


class Suite(str, Enum):
    """What to measure."""

    basic = "basic"
    serving = "serving"
    trace = "trace"
    pool = "pool"
    allocator = "allocator"
    kernel = "kernel"
    all = "all"


class Section(Enum):
    """A group of measurements that are taken together."""

    ROWS = "basic"
    RATIOS = "basic or serving"
    TRACE = "trace"
    POOL = "pool"
    ALLOCATOR = "allocator"
    KERNEL = "kernel"
    SPECULATION = "speculate"


_ENGINES = {Section.ROWS, Section.RATIOS, Section.TRACE, Section.SPECULATION}

TAKEN: dict[str, Collection[Section]] = {
    "model": _ENGINES,
    "model_option": _ENGINES,
    "adapter": _ENGINES,
    "draft": _ENGINES,
    "hosts": {Section.ROWS, Section.TRACE},
    "prompt": {Section.ROWS, Section.RATIOS},
    "generate": {Section.ROWS, Section.RATIOS},
    "batch": {Section.ROWS, Section.RATIOS, Section.SPECULATION},
    "depth": {Section.ROWS, Section.RATIOS},
    "block_size": set(Section),
    "repetitions": set(Section),
    "case": {Section.RATIOS},
    "requests": {Section.TRACE},
    "request_rate": {Section.TRACE},
    "goodput": {Section.TRACE},
    "kv_memory": _ENGINES,
    "kv_bits": _ENGINES,
    "kv_group_size": _ENGINES,
    "attention": {*_ENGINES, Section.KERNEL},
    "seed": {*_ENGINES, Section.ALLOCATOR},
}
"""The sections to which an option applies. An option that is not listed applies to all."""


def sections(suite: Suite, against: bool, speculate: bool = False) -> list[Section]:
    """Return the sections of a suite, or of `speculate`. Raises typer.BadParameter if the suite is empty with, or
    without, a peer.
    """
    if speculate:
        if against or suite is not Suite.basic:
            other = "--against" if against else f"--suite {suite.value}"
            raise typer.BadParameter(f"is measured alone: leave {other} out", param_hint="--speculate")
        return [Section.SPECULATION]
    speed = Section.RATIOS if against else Section.ROWS
    if suite is Suite.all:
        return [speed, Section.TRACE, Section.POOL, Section.ALLOCATOR, Section.KERNEL]
    if suite is Suite.serving and not against:
        raise typer.BadParameter("these cases are comparisons: add --against mlx-lm", param_hint="--suite serving")
    found = {Suite.basic: speed, Suite.serving: speed}.get(suite)
    chosen = Section[suite.value.upper()] if found is None else found
    if against and chosen not in (Section.RATIOS, Section.TRACE):
        raise typer.BadParameter(f"--suite {suite.value} has no peer to run: leave it out", param_hint="--against")
    return [chosen]


def check_options(names: Iterable[str], chosen: Collection[Section], suite: Suite, against: bool) -> None:
    """Raise typer.BadParameter for an option that applies to none of the sections."""
    names = list(names)
    if against and "hosts" in names:
        raise typer.BadParameter("no peer shares weights that are in other processes", param_hint="--hosts")
    for name in names:
        if name not in TAKEN or set(TAKEN[name]) & set(chosen):
            if name in ("prompt", "generate", "batch", "depth") and suite is Suite.serving:
                raise typer.BadParameter("the cases of --suite serving have sizes of their own", param_hint=_hint(name))
            continue
        suited = f"--suite {suite.value}" + (" with --against" if against else "")
        asked = "--speculate" if Section.SPECULATION in chosen else suited
        raise typer.BadParameter(f"says nothing to {asked}: leave it out", param_hint=_hint(name))


def _hint(name: str) -> str:
    return "MODEL" if name == "model" else "--model" if name == "model_option" else f"--{name.replace('_', '-')}"
