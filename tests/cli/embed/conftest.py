"""What the tests of `cortexmlx embed` share."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.cli import engine as engines
from cortexmlx.core.config import EngineConfig
from support.cli.cli_fakes import FakeEngine
from support.fakes.numbers import MadeUpNumbers


@pytest.fixture
def embedders(monkeypatch: pytest.MonkeyPatch) -> list[MadeUpNumbers]:
    """The engines that commands of this test have opened. Their embeddings are made up."""
    opened: list[MadeUpNumbers] = []

    def load(options: EngineConfig) -> Any:
        opened.append(MadeUpNumbers(FakeEngine(options)))
        return opened[-1]

    monkeypatch.setattr(engines, "load_engine", load)
    return opened
