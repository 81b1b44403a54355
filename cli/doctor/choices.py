"""What computes attention, and how long its candidates take: the lines of `cortexmlx doctor`, and `doctor --time`."""

from __future__ import annotations

from collections.abc import Iterator

from cortexmlx.cli.doctor.check import Check, Verdict
from cortexmlx.stats import ChoiceSource, TimedChoice

NAME = "choice"

_SECONDS = 30.0
"""How long `doctor --time` times at most."""


def kept_choices() -> Iterator[Check]:
    """Yield the choices of earlier runs on this machine."""
    from cortexmlx.attention.autotuning import identity_here
    from cortexmlx.attention.backends import automatic
    from cortexmlx.autotune.chooser import kept
    from cortexmlx.autotune.table import ChoiceTable

    if automatic() != "metal":
        yield Check(NAME, Verdict.OK, "by the rules on a CPU; --time MODEL times the candidates")
        return
    choices = kept(ChoiceTable(identity_here()))
    if not choices:
        yield Check(NAME, Verdict.OK, "nothing is timed yet: an engine does so when it opens, --time MODEL does so now")
    yield from map(line, choices)


def timed_choices(model: str) -> Iterator[Check]:
    """Open a model, time all candidates, and yield the choices. The times are kept for the next engine."""
    from cortexmlx.cpu import blas
    from cortexmlx.mlx_lm.package import enter_mlx_lm

    blas.preload()
    enter_mlx_lm()
    from cortexmlx.core.config import EngineConfig
    from cortexmlx.core.in_process_model import InProcessModel

    opened = InProcessModel(EngineConfig(model), lambda call: None)
    try:
        opened.choose(seconds=_SECONDS, again=True)
        choices = opened.choices
    finally:
        opened.release()
    if not choices:
        detail = "nothing to choose: the model runs on mlx-lm's own caches, or a warning says what failed"
        yield Check(NAME, Verdict.WARN, detail)
    yield from map(line, choices)


def line(choice: TimedChoice) -> Check:
    """Return a choice in a line, its candidates with the fastest first."""
    times = sorted(choice.seconds.items(), key=lambda each: each[1])
    told = [f"{name} {seconds * 1e6:,.0f} us" for name, seconds in times]
    told += [f"{name} cannot serve: {why}" for name, why in choice.refused.items()]
    if choice.source is ChoiceSource.RULE and not choice.seconds:
        told.append("not timed")
    return Check(NAME, Verdict.OK, f"{choice.job}; {choice.batch}: {choice.chosen} ({', '.join(told)})")
