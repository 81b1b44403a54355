"""PartIdentity: what names a rank's part in its store, while threads may still hash the files of its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cortexmlx.distributed.wire.disk import Joined


class Hashing(Protocol):
    """Hashes the weights of a model in this process: `StoreSetup`."""

    identity: bytes | None

    @property
    def share(self) -> float:
        """Which part of the weights is hashed, from 0 to 1."""

    def when_known(self, model: Any, call: Callable[[], None]) -> None:
        """Have `call` called when `settle` would wait for nothing."""

    def settle(self, model: Any) -> bytes | str:
        """Return the identity, or why there is none."""


class PartIdentity:
    """The identity of a `model` that is a part. See `Identity` of `rank_store.py`."""

    def __init__(self, setup: Hashing, model: Any) -> None:
        self._setup = setup
        self._model = model
        self._hashed = False
        self._why = ""

    def joined(self) -> Joined:
        """Return what is known now. The first call after the hash is known compares the model with the hashed one."""
        setup = self._setup
        if setup.identity is None and self._hashed and not self._why:
            settled = setup.settle(self._model)
            self._why = settled if isinstance(settled, str) else ""
        known = setup.identity is not None or bool(self._why)
        return Joined(setup.identity, self._why, 1.0 if known else setup.share)

    def when_known(self, call: Callable[[], None]) -> None:
        """Have `call` called when the weights are hashed, unless they are."""

        def hashed() -> None:
            self._hashed = True
            call()

        if self._setup.identity is None:
            self._setup.when_known(self._model, hashed)
