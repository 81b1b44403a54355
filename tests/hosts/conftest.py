"""What tests of several hosts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cortexmlx.kv import sizing
from support.hosts.thread_workers import ThreadWorkers, thread_workers
from support.store.stored import reading_pays


@pytest.fixture
def small_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas begin with a few blocks, so that they grow soon."""
    monkeypatch.setattr(sizing, "_FIRST_TOKENS", 96)


@pytest.fixture
def reading_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is on disk is read."""
    reading_pays(monkeypatch)


@pytest.fixture
def workers() -> Iterator[list[ThreadWorkers]]:
    """Engines with hosts have workers in this process."""
    with thread_workers() as made:
        yield made
