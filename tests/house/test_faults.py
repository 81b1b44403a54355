"""Every fault of `tests/faults` can still be planted, and the tests that are to notice it exist."""

from __future__ import annotations

from tests.faults.__main__ import fault_lists, unusable


def test_every_fault_can_be_planted_and_has_its_tests() -> None:
    lists = fault_lists()
    assert list(unusable(lists)) == []
    assert sum(len(each.faults) for each in lists) > 950
