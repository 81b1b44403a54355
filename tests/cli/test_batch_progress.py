"""How far a batch is, in words."""

from __future__ import annotations

from cortexmlx.cli.batch_progress import duration


def test_duration_is_short() -> None:
    assert [duration(s) for s in (0.4, 59, 185, 3750)] == ["0 s", "59 s", "3:05", "1:02:30"]
