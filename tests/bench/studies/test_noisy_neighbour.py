"""The bench of what one client's request does to another's."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.bench.studies import noisy_neighbour
from cortexmlx.bench.studies.noisy_neighbour import ATTACKS, Outcome, measure, table


def test_every_attack_is_a_request_that_is_served(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noisy_neighbour, "MOST_STOP_TOKENS", 200)
    with Engine(tiny("one layer"), kv_memory="4MB", max_rows=17) as engine:
        for attack in ATTACKS:
            outcome = measure(engine, attack)
            assert outcome.attack == attack and outcome.gap > 0 < outcome.submitting


def test_the_table_has_a_line_for_each() -> None:
    assert table([Outcome("it", 0.001, 0.25)]).splitlines()[-1] == "| it | 1.0 ms | 250.0 ms |"
