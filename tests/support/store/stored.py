"""Cores with a KV store: their greedy answers, with the store filled, damaged, or taken away in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.stats import StoreStats
from support.engine.core_driver import Driver
from support.patience import PATIENCE


def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in a store is read, however fast computing is, and however slow the disk."""
    monkeypatch.setattr("cortexmlx.disk.tier._READING_SECONDS", -1e9)
    monkeypatch.setattr("cortexmlx.disk.connector.MIN_DISK_WAIT_SECONDS", PATIENCE)


class Stored(Driver):
    """A driver whose core has a store in a folder. Leaving its context closes it as an engine does."""

    def __init__(self, model: Path, folder: Path, **config: Any) -> None:
        super().__init__(model, kv_store=folder, **config)

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *args: object) -> None:
        self.core.release()

    def ask(self, prompt: Sequence[int], tokens: int = 10, **params: Any) -> tuple[list[int], int]:
        """The answer, and how much of the prompt was not computed."""
        done = self.result_of(prompt, tokens, **params)
        return list(done.token_ids), done.usage.cached_tokens

    def rest(self) -> None:
        """What an idle engine does, until all that is cached is stored."""
        while self.core.tidy():
            pass
        assert self.core.disk is not None and self.core.disk.flush()

    def forget(self) -> None:
        """Nothing is left in memory."""
        self.rest()
        self.core.relieve(critical=True)

    @property
    def counts(self) -> StoreStats:
        assert self.core.disk is not None
        return self.core.disk.stats()
