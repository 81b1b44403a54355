"""Requests through small and huge pools: all of them are served, also where prefixes must be evicted for them."""

from __future__ import annotations

import pytest

from cortexmlx.bench.studies import pool


@pytest.mark.parametrize(("blocks", "cached"), [(300, 0), (300, 300)], ids=["empty", "full of prefixes"])
def test_every_request_is_served_and_every_step_counted(
    blocks: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed: list[int] = []
    commit = pool.Scheduler.commit

    def counted(self: pool.Scheduler, plan: object, tokens: list[int]) -> object:
        committed.append(len(tokens))
        return commit(self, plan, tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(pool.Scheduler, "commit", counted)
    cost = pool.measure(blocks, cached, requests=20)
    assert sum(committed) == 20 * pool.ANSWER
    assert len(cost.milliseconds) >= len(committed) and 0 < cost.median <= cost.worst
    assert (cost.rows, cost.blocks, cost.cached_blocks) == (pool.ROWS, blocks, cached)


def test_the_table_sets_each_pool_beside_the_first() -> None:
    costs = [pool.StepCost(16, 1000, 100, (1.0, 3.0)), pool.StepCost(16, 1_000_000, 0, (3.0, 3.0))]
    assert pool.report(costs).splitlines()[-2:] == [
        "| 1,000 | 100 | 2.000 | 2.000 | 1.00x |",
        "| 1,000,000 | 0 | 3.000 | 3.000 | 1.50x |",
    ]
