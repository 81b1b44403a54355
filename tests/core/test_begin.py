"""Who drafts is what the options say."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.core import make_speculation
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.speculation.drafter import HeadDrafter


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["forced", "suffix", "head"]),
        ({"speculate": False}, ["forced", "head"]),
        ({"forced_tokens": False}, ["suffix", "head"]),
    ],
)
def test_the_options_say_who_drafts(options: dict[str, Any], names: list[str]) -> None:
    config = EngineConfig("a model", **options)
    head = HeadDrafter(Mock(), Mock())
    assert list(make_speculation(config, Mock(Scheduler), None, head).counts) == names
    without = make_speculation(config, Mock(Scheduler), None, None)
    assert without is not None and list(without.counts) == names[:-1]
