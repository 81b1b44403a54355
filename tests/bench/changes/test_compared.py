"""What changed since a saved run: an engine that is slower is named, a machine that is slower is not the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cortexmlx.bench.changes import compared
from cortexmlx.bench.changes.compared import FigureChange, FigureVerdict
from cortexmlx.bench.changes.saved import SavedRun
from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.bench.measure.pairs import BetterDirection
from cortexmlx.bench.report.section import FigureSeries
from cortexmlx.bench.report.text import section_markdown
from cortexmlx.errors import InvalidRequest

FILE = Path("then.json")
NAMES = ("pp512, block 32", "tg128, block 32")


def run(seed: int, *, engine: float = 1.0, machine: float = 1.0, noise: float = 0.01, runs: int = 10) -> SavedRun:
    """A run of an engine and on a machine of such speeds."""
    random = np.random.default_rng(seed)

    def noisy(mean: float, count: int) -> tuple[float, ...]:
        return tuple((mean * np.exp(random.normal(0, noise, count))).tolist())

    series = tuple(
        FigureSeries(n, "t/s", BetterDirection.HIGHER, noisy(100 * engine * machine, runs), "products") for n in NAMES
    )
    yardstick = {"products, wall": noisy(1 / machine, 2 * runs)}
    return SavedRun(
        BenchMachine.detect(), {"files": "a", "dtype": "float32", "name": "m"}, {"attention": "auto"}, yardstick, series
    )


def verdicts(then: SavedRun, now: SavedRun) -> list[FigureVerdict]:
    return [outcome.verdict for outcome in compared.compare_figures(then, now)]


def test_unchanged_engines_are_called_slower_as_rarely_as_is_said() -> None:
    found = [compared.has_slower_figure(compared.compare_figures(run(2 * i), run(2 * i + 1))) for i in range(80)]
    assert sum(found) <= 2  # 1 % of doubt, both sides together


def test_a_slower_engine_is_named_and_a_faster_one_too() -> None:
    assert verdicts(run(0), run(1, engine=0.95)) == [FigureVerdict.SLOWER] * 2
    assert verdicts(run(0), run(1, engine=1.06)) == [FigureVerdict.FASTER] * 2
    assert verdicts(run(0), run(1)) == [FigureVerdict.SAME] * 2


def test_a_slower_machine_is_not_the_engine() -> None:
    assert verdicts(run(0), run(1, machine=0.8)) == [FigureVerdict.SAME] * 2
    assert verdicts(run(0), run(1, machine=0.8, engine=0.9)) == [FigureVerdict.SLOWER] * 2


def test_a_faster_machine_does_not_hide_a_slower_engine_as_the_same() -> None:
    assert FigureVerdict.SAME not in verdicts(run(0), run(1, machine=1.25, engine=0.85))


def test_only_what_the_machine_explains_is_the_machines() -> None:
    """By the clock it is a fifth slower, without the machine's share 2 or 15 %, and of neither can anybody be sure."""
    clock = FigureChange(-0.2, -0.3, -0.1)
    assert compared._judge(clock, FigureChange(-0.02, -0.1, 0.06)) is FigureVerdict.MACHINE
    assert compared._judge(clock, FigureChange(-0.15, -0.3, 0.02)) is FigureVerdict.UNCLEAR


def test_noise_and_few_runs_are_admitted() -> None:
    assert verdicts(run(0, noise=0.2), run(1, noise=0.2, engine=0.95)) == [FigureVerdict.UNCLEAR] * 2
    assert verdicts(run(0, runs=2), run(1, runs=2, engine=0.5)) == [FigureVerdict.FEW] * 2


def test_of_times_less_is_better() -> None:
    def timed(values: tuple[float, ...]) -> SavedRun:
        return replace(run(0), series=(FigureSeries("TTFT", "s", BetterDirection.LOWER, values),))

    slow = verdicts(timed((1.0, 1.01, 0.99, 1.0)), timed((1.5, 1.51, 1.49, 1.5)))
    assert slow == [FigureVerdict.SLOWER]


@pytest.mark.parametrize("change", [{"chip": "Another"}, {"cpus": 99}, {"blas": "none"}, {"device": "Metal GPU"}])
def test_other_machines_are_not_compared(change: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="cannot be compared"):
        compared.check_machine(run(0), replace(BenchMachine.detect(), **change), FILE)
    compared.check_machine(run(0), BenchMachine.detect(), FILE)


@pytest.mark.parametrize("change", [{"model": {"files": "b"}}, {"settings": {"attention": "reference"}}])
def test_other_models_and_settings_are_not_compared(change: dict[str, dict[str, str]]) -> None:
    with pytest.raises(InvalidRequest, match="cannot be compared"):
        compared.check_model(run(0), replace(run(1), **change), FILE)
    compared.check_model(run(0), run(1), FILE)


def test_the_report_says_what_differs_and_what_has_no_counterpart() -> None:
    then, now = run(0), run(1, engine=0.9)
    then = replace(then, machine=replace(then.machine, mlx="0.1", load=99.0), series=then.series[:1])
    part = compared.changes_section(then, now, compared.compare_figures(then, now), FILE)
    text = " ".join(section_markdown(part).split())
    assert "slower beyond the noise: pp512, block 32" in text and "| SLOWER |" in text
    assert "mlx was 0.1 then" in text and "load 99.0 then" in text and "only now: tg128, block 32" in text
    assert part.records[0]["verdict"] == "SLOWER" and max(map(len, section_markdown(part).splitlines())) <= 80


def test_long_names_fit_80_columns() -> None:
    def named(saved: SavedRun) -> SavedRun:
        return replace(
            saved, series=tuple(replace(s, name="tg128 @ d16384 x16, block 128", clock="CPU") for s in saved.series[:1])
        )

    then, now = named(run(0)), named(run(1, engine=0.9))
    text = section_markdown(compared.changes_section(then, now, compared.compare_figures(then, now), FILE))
    assert max(map(len, text.splitlines())) <= 80 and "block 128 (CPU) |" in text
