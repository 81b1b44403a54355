"""What the kernels are to reach is reached, but for what the README says is not."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import pytest

from cortexmlx.metal.cost import goals
from cortexmlx.metal.cost.compiled import Record, kept_record
from cortexmlx.metal.cost.goals import Goal, compiled_goals, counted_goals, of_partition, table
from cortexmlx.metal.rules import VARIANTS

fresh = pytest.mark.skipif(
    bool(kept_record().stale()), reason=f"changed since it was compiled: {', '.join(kept_record().stale())}"
)


def changed(threads: int, spills: int) -> Record:
    """The record with another kernel for the last variant that it has."""
    record, last = kept_record(), of_partition(VARIANTS[-1])
    assert last is not None
    others = tuple(kernel for kernel in record.kernels if kernel is not last)
    return replace(record, kernels=(*others, replace(last, threads=threads, spills=spills)))


def test_a_goal_is_met_on_its_side_of_the_limit() -> None:
    sides = [(1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
    assert [Goal("", 2, found, "", side).met for found, side in sides] == [True, True, False, False, True, True]
    assert "NO" in Goal("a", 2, 3, "there").line() and "yes" in Goal("a", 2, 2, "there").line()


@fresh
def test_no_variant_of_doctor_spills_and_a_core_holds_as_many_threadgroups_as_with_448_threads() -> None:
    assert [v.label for v in VARIANTS if of_partition(v) is None] == []
    spills, threads, threadgroups = compiled_goals()
    assert (spills.found, spills.met, threadgroups.met) == (0, True, True)
    assert (threads.found, threads.met) == (384, False) and threads.where.endswith("matrix kernel")


@fresh
def test_a_variant_that_spills_or_crowds_a_core_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    record = changed(threads=128, spills=3)
    monkeypatch.setattr(goals, "kept_record", lambda: record)
    spills, threads, threadgroups = compiled_goals()
    assert (spills.found, threads.found) == (3, 128) and not (spills.met or threads.met or threadgroups.met)
    assert spills.where == threads.where == threadgroups.where == VARIANTS[-1].label


@fresh
@pytest.mark.slow
def test_bandwidth_traffic_and_cycles_are_as_they_should_be() -> None:
    found = list(counted_goals())
    assert len(found) == 4 and all(goal.met for goal in found)
    readme = (files("cortexmlx.metal") / "README.md").read_text().splitlines()
    assert [line for line in table() if line not in readme] == []
