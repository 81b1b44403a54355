"""What the environment sets about hosts, and what is refused by name."""

from __future__ import annotations

import pytest

from cortexmlx.distributed.group import COMPARE_SWITCH, read_compare_interval, read_hang_limits
from cortexmlx.distributed.overdue import DEFAULT_HANG_LIMITS, HANG_SWITCH, HangLimits
from cortexmlx.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "limits"),
    [("2.5", HangLimits(2.5, 300.0)), ("90", HangLimits(90.0, 900.0)), ("0", HangLimits(0.0, 300.0))],
)
def test_the_seconds_after_which_a_worker_hangs(monkeypatch: pytest.MonkeyPatch, text: str, limits: HangLimits) -> None:
    monkeypatch.delenv(HANG_SWITCH, raising=False)
    assert read_hang_limits() == DEFAULT_HANG_LIMITS
    monkeypatch.setenv(HANG_SWITCH, text)
    assert read_hang_limits() == limits


def test_how_often_plans_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPARE_SWITCH, raising=False)
    assert read_compare_interval() == 64
    monkeypatch.setenv(COMPARE_SWITCH, "1")
    assert read_compare_interval() == 1


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf", "1e999"])
def test_seconds_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(HANG_SWITCH, text)
    with pytest.raises(InvalidRequest, match=rf"CORTEXMLX_HANG_SECONDS={text}: give a number"):
        read_hang_limits()


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "²", "always"])
def test_numbers_of_steps_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(COMPARE_SWITCH, text)
    with pytest.raises(InvalidRequest, match=f"CORTEXMLX_COMPARE_EVERY={text}: give a number"):
        read_compare_interval()
