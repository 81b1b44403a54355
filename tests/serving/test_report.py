"""What an engine says of itself."""

from __future__ import annotations

from typing import Any

from support.core_driver import Driver
from support.tiny import tokens_of


def test_preemption_says_so_in_the_statistics(tiny: Any) -> None:
    driver = Driver(tiny("llama"), tokens=104, max_rows=4)
    handles = [driver.add(tokens_of(20, seed=i), 50) for i in range(4)]
    lines: set[str] = set()
    while not driver.core.idle:
        driver.step()
        lines |= set(driver.core.stats().sequences)
    assert all(len(driver.result(h).token_ids) == 50 for h in handles)
    assert any("preempted: " in line and "preempted 1 times" in line for line in lines)
    assert driver.core.stats().preemptions > 0
