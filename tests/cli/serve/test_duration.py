"""Durations as people write them."""

from __future__ import annotations

import pytest

from cortexmlx.cli.serve.duration import seconds_of
from cortexmlx.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("10m", 600), ("1h", 3600), ("1.5H", 5400), ("2d", 172800), (" 45 ", 45), ("never", None)],
)
def test_a_duration(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1m", "m", "10 minutes", "nan", "inf", "1e3", "1h30m", "9" * 400])
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is no duration: write 30s, 10m, 1h, or never"):
        seconds_of(text)
