"""Intervals of changes, against tables of Student's t and against many runs of known noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cortexmlx.bench.changes.compared import log_change, round_medians, student_quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "table"),
    [(0.975, 4, 2.776), (0.975, 8, 2.306), (0.995, 4, 4.604), (0.995, 8, 3.355), (0.995, 30, 2.750), (0.999, 8, 4.501)],
)
def test_quantiles_are_those_of_the_tables(probability: float, freedom: float, table: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(table, rel=0.02)


@pytest.mark.parametrize("runs", [4, 10])
def test_an_interval_holds_the_truth_as_often_as_it_says(runs: int) -> None:
    random = np.random.default_rng(runs)
    missed = 0
    for _ in range(2_000):
        old, new = np.exp(random.normal(0, 0.05, runs)), 0.9 * np.exp(random.normal(0, 0.08, runs))
        change = log_change(old.tolist(), new.tolist()).to_figure_change(0.05)
        missed += not change.low <= -0.1 <= change.high
    assert 0.03 < missed / 2_000 < 0.07


def test_a_burst_in_one_of_ten_repetitions_moves_little() -> None:
    random = np.random.default_rng(1)
    old = np.exp(random.normal(0, 0.01, 10)).tolist()
    new = [*np.exp(random.normal(0, 0.01, 9)).tolist(), 0.2]
    change = log_change(old, new).to_figure_change(0.01)
    assert abs(change.estimate) < 0.02 and change.high - change.low < 0.08


def test_what_the_machine_changed_is_taken_off_with_its_doubt() -> None:
    engine = log_change([100.0, 101.0, 99.0, 100.5], [80.0, 81.0, 79.0, 80.5])
    machine = log_change([1.0, 1.02, 0.98, 1.0], [0.8, 0.81, 0.79, 0.8])
    left = engine.subtract(machine)
    assert math.expm1(left.mean) == pytest.approx(0, abs=0.01)
    assert left.variance == pytest.approx(engine.variance + machine.variance)


def test_a_round_counts_once_by_its_median() -> None:
    assert round_medians([1.0, 9.0, 2.0, 5.0, 7.0], [0, 0, 0, 3, 3]) == [2.0, 6.0]
    assert round_medians([3.0, 1.0], ()) == [3.0, 1.0]
