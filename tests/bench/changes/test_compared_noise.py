"""How often `--compare` is wrong, and how often it finds what is there, on machines whose noise is known: other
programs in bursts, hours that differ, repetitions with heavy tails, engines that differ from one opening to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cortexmlx.bench.changes import compared
from cortexmlx.bench.changes.saved import SavedRun
from support.cli.noisy_runs import Noise, noisy_run

KINDS = {
    "even": Noise(),
    "heavy tails": Noise(tails=3),
    "another hour": Noise(hour=0.2),
    "bursts": Noise(bursts=0.3),
    "engines that differ": Noise(engines=0.05),
    "all of it": Noise(each=0.02, tails=4, engines=0.02, hour=0.03, bursts=0.2),
}
PAIRS = 80


def called(
    noise: Noise,
    engine: float = 1.0,
    change: Callable[[SavedRun], SavedRun] = lambda saved: saved,
    now: dict[str, int] | None = None,
    **options: int,
) -> float:
    """How many of the pairs are called slower; both of a pair have these options, or the second those of `now`."""
    runs = (
        (noisy_run(2 * i, noise, **options), noisy_run(2 * i + 1, noise, engine=engine, **(now or options)))
        for i in range(PAIRS)
    )
    return (
        sum(compared.has_slower_figure(compared.compare_figures(change(old), change(new))) for old, new in runs) / PAIRS
    )


def alone(saved: SavedRun) -> SavedRun:
    """Without what the yardstick showed around each repetition."""
    return replace(saved, series=tuple(replace(s, beside=()) for s in saved.series))


def as_one(saved: SavedRun) -> SavedRun:
    """As if every repetition were by itself."""
    return replace(saved, series=tuple(replace(s, rounds=()) for s in saved.series))


@pytest.mark.parametrize("kind", KINDS)
def test_an_unchanged_engine_is_hardly_ever_called_slower(kind: str) -> None:
    assert called(KINDS[kind]) <= 3 / PAIRS  # half of 1 % are slower by chance: four of 80 in one of a thousand tests


@pytest.mark.parametrize("kind", ["even", "bursts", "all of it"])
def test_an_engine_that_is_a_tenth_slower_is_found(kind: str) -> None:
    assert called(KINDS[kind], engine=0.9) >= 0.9


def test_repetitions_with_one_engine_are_not_counted_as_rounds() -> None:
    """Who takes them for independent is sure of what he does not know."""
    kind = KINDS["engines that differ"]
    assert called(kind, change=as_one, repetitions=5) > 0.1 and called(kind, repetitions=5) <= 3 / PAIRS


def test_what_stood_beside_each_repetition_finds_more() -> None:
    """Of a machine that is a third slower at the end of a run. Where it is faster now by more than the engine is
    slower, nothing is called slower.
    """
    noise = Noise(each=0.02, hour=0.3)
    assert called(noise, engine=0.9) > 0.5 and called(noise, engine=0.9, change=alone) < 0.1


def test_runs_of_other_lengths_are_compared() -> None:
    kind, now = KINDS["all of it"], {"rounds": 5, "repetitions": 3}
    assert called(kind, now=now) <= 3 / PAIRS and called(kind, engine=0.85, now=now) > 0.8
