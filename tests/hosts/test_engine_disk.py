"""Engines with workers and a disk tier: each worker keeps its part, and a block is there only if all have theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.hosts.thread_workers import HostedStore, ThreadWorkers, thread_workers
from support.models.tiny import tokens_of
from support.store.stored import reading_pays

LONG = tokens_of(90, seed=4)


@pytest.fixture(autouse=True)
def _reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    reading_pays(monkeypatch)


@pytest.fixture
def workers() -> Iterator[list[ThreadWorkers]]:
    with thread_workers() as made:
        yield made


def test_a_restart_finds_what_was_computed(tiny: Any, theirs: Any, tmp_path: Path, workers: Any) -> None:
    prompts = [LONG, [*LONG, *tokens_of(12, seed=1)], [*LONG[:50], *tokens_of(30, seed=2)]]
    found = []
    for _ in range(2):
        for prompt in prompts:
            with HostedStore(tiny("llama"), tmp_path) as driver:
                answer, cached = driver.join().ask(prompt)
                assert answer == theirs("llama", prompt, 10)
                driver.core.check_invariants()
                found.append(cached)
    assert found == [0, 88, 48, 88, 96, 72]
