"""What tests of several hosts share."""

from __future__ import annotations

import pytest

from cortexmlx.kv import sizing


@pytest.fixture
def small_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas begin with a few blocks, so that they grow soon."""
    monkeypatch.setattr(sizing, "_FIRST_TOKENS", 96)
