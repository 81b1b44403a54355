"""Lease: a model while a request needs it, and what hands them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cortexmlx.protocols.request import Defaults

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


@dataclass(frozen=True)
class Lease:
    """A model while a request needs it."""

    engine: Engine
    name: str
    """The name that replies say."""
    defaults: Defaults | None = None
    """What a body does not set; None: as the server's settings say."""
    adapter: str | None = None
    """The name of the adapter that answers; None: the model alone does."""
    end: Callable[[], None] = lambda: None

    def release(self) -> None:
        """Say that the request has ended. Safe to call again, from any thread."""
        self.end()


class Wait(Protocol):
    """A request for a model, until it is `settled`."""

    @property
    def settled(self) -> bool:
        """Whether `lease` returns or raises now."""

    def lease(self) -> Lease:
        """Return the lease. Raises CortexError if the model cannot be had."""

    def leave(self) -> None:
        """End the request, or take it back. Safe to call again, from any thread."""


class Served(Protocol):
    """The models of a server, by name."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order. The first model answers requests that name none."""

    def context_length(self, name: str) -> int | None:
        """Return how many tokens a prompt and its answer may have. It does not change once it is known; None: it is
        not.
        """

    def adapters(self, name: str) -> tuple[str, ...]:
        """Return the names of the adapters that requests for a model may name."""

    def is_loaded(self, name: str) -> bool:
        """Return whether a model is in memory."""

    def loaded(self) -> list[tuple[str, Engine]]:
        """Return the engines of the models that are in memory, by name. One may be closed meanwhile."""

    def is_ready(self, name: str) -> bool:
        """Return whether a request would get the model at once."""

    def ask(self, name: str, settled: Callable[[], None]) -> Wait:
        """Ask for a model. `settled` is called on any thread when the wait is settled, unless it is so at once."""
