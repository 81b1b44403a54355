"""The study of streams: every stream gets every event, and the figures are of one run."""

from __future__ import annotations

import pytest

from cortexmlx.bench.studies.serving.streams import measured


def test_all_streams_get_all_events() -> None:
    """`measured` itself checks that no reader lost one."""
    figures = measured(3, 50.0, 0.4)
    assert figures["steps_per_second"] > 0
    per_second = figures["steps_per_second"] * 3
    assert figures["us_per_event"] == pytest.approx(figures["core"] / per_second * 1e6)
