"""What a rank knows of its identity, before and after its weights are hashed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cortexmlx.distributed.disk.rank_store import PartIdentity
from cortexmlx.distributed.wire.messages import Joined


class Setup:
    """Hashes when a test says so."""

    def __init__(self, known: bytes | None, settled: bytes | str = b"") -> None:
        self.identity = known
        self.share = 0.5
        self.settled = settled
        self.calls: list[Callable[[], None]] = []
        self.times = 0

    def when_known(self, model: Any, call: Callable[[], None]) -> None:
        """As `StoreSetup.when_known`."""
        assert model == "a model"
        self.calls.append(call)

    def settle(self, model: Any) -> bytes | str:
        """As `StoreSetup.settle`."""
        self.times += 1
        if isinstance(self.settled, bytes):
            self.identity = self.settled
        return self.settled


def test_a_kept_hash_is_known_at_once() -> None:
    setup = Setup(b"me")
    identity = PartIdentity(setup, "a model")
    identity.when_known(lambda: None)
    assert identity.joined() == Joined(b"me", "", 1.0) and not setup.calls


def test_weights_are_compared_once_when_they_are_hashed() -> None:
    setup, told = Setup(None, b"me"), []
    identity = PartIdentity(setup, "a model")
    identity.when_known(lambda: told.append(1))
    assert identity.joined() == Joined(None, "", 0.5) and setup.times == 0
    setup.calls[0]()
    assert told == [1]
    assert [identity.joined() for _ in range(2)] == [Joined(b"me", "", 1.0)] * 2 and setup.times == 1


def test_weights_that_have_no_hash_have_none_for_good() -> None:
    setup = Setup(None, "they were changed")
    identity = PartIdentity(setup, "a model")
    identity.when_known(lambda: None)
    setup.calls[0]()
    assert [identity.joined() for _ in range(2)] == [Joined(None, "they were changed", 1.0)] * 2 and setup.times == 1
