"""A step taken apart: the arithmetic, and that the mute workers exchange nothing and compute all else."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.bench.studies.hosts.parts_of_a_step import (
    EngineClocks,
    StepBreakdown,
    StepParts,
    main,
    open_both_engines,
    report,
)
from support.hosts.environment import with_mpi
from support.models.tiny import tokens_of, write_tiny

REAL = StepParts(total=20.0, plan=1.0, send=2.0, wait=15.0, commit=0.5, ranks=(12.0, 14.0))


def test_a_step_is_the_average_between_two_readings() -> None:
    before = EngineClocks(10, 100.0, 1.0, 2.0, 3.0, 4.0, (5.0, 6.0))
    after = EngineClocks(20, 101.0, 1.1, 2.2, 3.3, 4.4, (5.5, 6.6))
    step = StepParts.mean_between(before, after)
    assert (step.total, step.plan, step.send) == pytest.approx((100.0, 10.0, 20.0))
    assert (step.wait, step.commit) == pytest.approx((30.0, 40.0))
    assert step.ranks == pytest.approx((50.0, 60.0))


def test_what_is_between_and_what_is_exchanging() -> None:
    taken = StepBreakdown(REAL, (9.0, 13.0))
    assert taken.exchange_times == pytest.approx((3.0, 1.0))
    assert (taken.round_trip, taken.other_time) == pytest.approx((1.0, 1.5))
    lines = report(taken, "title").splitlines()
    assert "| wait for the workers | 15.000 | 75.0 |" in lines and "| a step | 20.000 | 100.0 |" in lines
    assert lines[-2:] == ["| 0 | 9.000 | 3.000 | 25.0 |", "| 1 | 13.000 | 1.000 | 7.1 |"]


@pytest.mark.slow
def test_mute_workers_exchange_nothing_and_take_as_many_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_tiny(tmp_path / "m"))
    with with_mpi(tmp_path / "bin"):
        with open_both_engines(model, "2:mpi") as both:
            answers = [each.generate(tokens_of(9), max_tokens=20, ignore_eos=True).token_ids for each in both]
            assert answers[0] != answers[1] and len(answers[0]) == len(answers[1]) == 20
            assert both[0].stats().steps == both[1].stats().steps
        main([model, "--hosts", "2:mpi", "--rows", "2", "--tokens", "12", "--rounds", "2"])
    printed = capsys.readouterr().out
    assert "2 rows, the median of 2 rounds" in printed and printed.count("\n| ") == 11
