"""The hash over all plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cortexmlx.distributed.wire.plan_digest import PlanDigest
from cortexmlx.scheduling.plan import StepPlan
from tests.distributed.wire.test_window_step import plans


def digests(made: list[StepPlan], every: int, blocks: int = 3) -> list[bytes | None]:
    digest, found = PlanDigest(every), []
    for number, plan in enumerate(made):
        digest.add(b"%d" % number)
        found.append(digest.take(plan, (blocks,)))
    return found


@pytest.mark.parametrize("every", [1, 5])
def test_it_is_told_after_every_so_many_steps(every: int) -> None:
    made = plans([20, 9], pipeline=True)
    found = digests(made, every)
    assert found == digests(made, every) and len(made) > 10
    assert [digest is not None for digest in found] == [number % every == 0 for number in range(1, len(made) + 1)]


def test_it_depends_on_plans_tables_in_force_and_sizes() -> None:
    made = plans([20, 9], pipeline=True)
    last = digests(made, len(made))[-1]
    first = next(i for i, plan in enumerate(made) if plan.column == 1)
    groups = tuple(replace(group, lengths=group.lengths + 1) for group in made[first - 1].groups or ())
    tables = [*made[: first - 1], replace(made[first - 1], groups=groups), *made[first:]]
    assert digests(tables, first + 1)[first] != digests(made, first + 1)[first], "a window's tables are in force in it"
    assert digests([*made[:-1], replace(made[-1], column=9)], len(made))[-1] != last
    assert digests(made, len(made), blocks=4)[-1] != last
