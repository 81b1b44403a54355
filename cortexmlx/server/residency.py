"""Residency: which models are loaded, in use, waited for, and to be unloaded. Plain data, without threads and mlx."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a model is."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(frozen=True)
class Ticket:
    """A request for a model. A smaller `number` came first."""

    number: int
    model: str


@dataclass(frozen=True)
class LoadModel:
    """Load this model now."""

    model: str


@dataclass(frozen=True)
class UnloadModel:
    """Unload this model now."""

    model: str


@dataclass
class _Model:
    memory: int
    state: State = State.UNLOADED
    users: int = 0
    granted: int = 0
    """The number of the newest ticket that was granted."""
    used: float = 0.0
    """When the last user left, or when it was loaded."""
    failed: bool = False
    """Whether its engine has failed for good."""

    @property
    def ready(self) -> bool:
        """Whether it can serve requests."""
        return self.state is State.LOADED and not self.failed


class Residency:
    """The models of one memory budget.

    - A request for a loaded model is granted at once.
    - The oldest waiting request decides what is loaded next. If there is no room, the least recently used models are
      unloaded before: idle ones first, then those in use as soon as their requests have ended.
    - Later requests for a model that must make room wait behind the one that needs the room, so that nobody waits for
      ever.
    - One model is loaded or unloaded at a time. Every request that waits when a model is loaded is granted.
    - A loaded model that fails is granted to nobody. It is unloaded when its requests have ended, and then loaded again
      for those that wait.
    """

    def __init__(
        self,
        memory: Mapping[str, int],
        budget: int | None = None,
        kept: Collection[str] = (),
        idle: float | None = None,
    ) -> None:
        """`memory` has the bytes of each model, `budget` those of all together (None: any number). Models in `kept` are
        never unloaded. Others are unloaded after `idle` seconds without a request; None: only for room.
        """
        self._models = {name: _Model(size) for name, size in memory.items()}
        self._budget = budget
        self._kept = frozenset(kept)
        self._idle = idle
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Ticket] = {}
        self._running: dict[int, Ticket] = {}
        self._changing: str | None = None

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(self, model: str) -> Ticket:
        """Ask for a model. `grant` says when the request has it."""
        ticket = Ticket(next(self._numbers), model)
        self._waiting[ticket.number] = ticket
        return ticket

    def grant(self) -> list[Ticket]:
        """Grant what can be granted, and return it. Call it after every change."""
        granted = []
        for ticket in list(self._waiting.values()):
            model = self._models[ticket.model]
            if model.ready and not self._makes_room(ticket):
                self._grant(ticket)
                granted.append(ticket)
        return granted

    def leave(self, ticket: Ticket, now: float) -> None:
        """Take back a request that waits, or end one that was granted. Safe to call again."""
        self._waiting.pop(ticket.number, None)
        if self._running.pop(ticket.number, None) is not None:
            model = self._models[ticket.model]
            model.users -= 1
            model.used = max(model.used, now)

    def would_grant(self, model: str) -> bool:
        """Return whether a request for a model would be granted at once."""
        return self._models[model].ready and model not in self._victims()

    def has_failed(self, model: str) -> bool:
        """Return whether a loaded model has failed for good."""
        return self._models[model].failed

    def fail(self, model: str) -> None:
        """Say that a loaded model has failed for good. Safe to call again."""
        if self._models[model].state is State.LOADED:
            self._models[model].failed = True

    # -- loading and unloading ----------------------------------------------------------------------------------------

    def begin(self, now: float) -> LoadModel | UnloadModel | None:
        """Return what to do now, which has begun with that; None for nothing."""
        if self._changing is not None:
            return None
        action = self._next(now)
        if action is not None:
            self._changing = action.model
            self._models[action.model].state = State.LOADING if isinstance(action, LoadModel) else State.UNLOADING
        return action

    def loaded(self, now: float) -> list[Ticket]:
        """Say that the model is loaded. Return the requests that waited for it, which are granted."""
        model = self._end(State.LOADED)
        self._models[model].used = now
        mine = [ticket for ticket in self._waiting.values() if ticket.model == model]
        for ticket in mine:
            self._grant(ticket)
        return mine

    def failed(self) -> list[Ticket]:
        """Say that the model cannot be loaded. Return the requests that waited for it, which end."""
        model = self._end(State.UNLOADED)
        mine = [ticket for ticket in self._waiting.values() if ticket.model == model]
        for ticket in mine:
            del self._waiting[ticket.number]
        return mine

    def unloaded(self) -> None:
        """Say that the model is unloaded."""
        self._end(State.UNLOADED)

    def due(self) -> float | None:
        """Return when a model will have been idle for long enough to be unloaded; None: none will."""
        if self._idle is None:
            return None
        return min((self._models[name].used + self._idle for name in self._idle_models()), default=None)

    # -- looking ------------------------------------------------------------------------------------------------------

    def state(self, model: str) -> State:
        """Return where a model is."""
        return self._models[model].state

    def users(self, model: str) -> int:
        """Return how many requests have a model."""
        return self._models[model].users

    @property
    def waiting(self) -> tuple[Ticket, ...]:
        """The requests that wait, the oldest first."""
        return tuple(self._waiting.values())

    @property
    def memory(self) -> int:
        """Bytes of the models that are loaded, or that are being loaded or unloaded."""
        return sum(model.memory for model in self._models.values() if model.state is not State.UNLOADED)

    # -- the choice ---------------------------------------------------------------------------------------------------

    def _next(self, now: float) -> LoadModel | UnloadModel | None:
        for name, model in self._models.items():
            if model.failed and not model.users:
                return UnloadModel(name)
        head = self._head()
        if head is not None:
            victims = self._victims()
            if not victims and self._short_of(head) <= 0:
                return LoadModel(head.model)
            if victims and all(not self._models[name].users for name in victims):
                return UnloadModel(victims[0])
        if self._idle is not None:
            for name in self._idle_models():
                if now - self._models[name].used >= self._idle:
                    return UnloadModel(name)
        return None

    def _head(self) -> Ticket | None:
        """Return the oldest request for a model that is not there, nor on its way."""
        gone = (State.UNLOADED, State.UNLOADING)
        return next((ticket for ticket in self._waiting.values() if self._models[ticket.model].state in gone), None)

    def _short_of(self, head: Ticket) -> int:
        """Return how many bytes must become free before the oldest request's model fits. What is being unloaded counts
        as free, since nothing else begins meanwhile.
        """
        if self._budget is None:
            return 0
        there = (State.LOADING, State.LOADED)
        taken = sum(model.memory for model in self._models.values() if model.state in there)
        return taken + self._models[head.model].memory - self._budget

    def _victims(self) -> list[str]:
        """Return the models that must be unloaded for the oldest request, the least recently used first. Empty if it
        fits, or if it cannot fit before a model that is being loaded is there.
        """
        head = self._head()
        short = 0 if head is None else self._short_of(head)
        if short <= 0:
            return []
        loaded = [(n, m) for n, m in self._models.items() if m.state is State.LOADED and n not in self._kept]
        # Those in use are ordered by their newest grant: a model that makes room gets none, and so stays the first.
        order = sorted(loaded, key=lambda item: (item[1].users > 0, item[1].granted if item[1].users else item[1].used))
        chosen: list[str] = []
        for name, model in order:
            if short > 0:
                chosen.append(name)
                short -= model.memory
        if short > 0:
            return []
        for name in list(chosen):
            if short + self._models[name].memory <= 0:  # what the others free is enough
                chosen.remove(name)
                short += self._models[name].memory
        return chosen

    def _makes_room(self, ticket: Ticket) -> bool:
        """Return whether a request's model must make room for an older request."""
        head = self._head()
        return head is not None and head.number < ticket.number and ticket.model in self._victims()

    def _idle_models(self) -> list[str]:
        """Return the loaded models that nobody uses or waits for, and that may be unloaded."""
        asked = {ticket.model for ticket in self._waiting.values()}
        return [
            name
            for name, model in self._models.items()
            if model.state is State.LOADED and not model.users and name not in self._kept and name not in asked
        ]

    def _grant(self, ticket: Ticket) -> None:
        del self._waiting[ticket.number]
        self._running[ticket.number] = ticket
        model = self._models[ticket.model]
        model.users += 1
        model.granted = ticket.number

    def _end(self, state: State) -> str:
        assert self._changing is not None
        model, self._changing = self._changing, None
        self._models[model].state, self._models[model].failed = state, False
        return model


# Retries: when a model whose load failed may be tried again. Plain data, without threads and mlx.


FIRST_SECONDS, MOST_SECONDS = 5.0, 300.0


@dataclass(frozen=True)
class _Failure:
    cause: BaseException
    seconds: float
    until: float


class Retries:
    """The failures of a server's models: of their loads, and of engines before they have served a request.

    Each try makes room for the model, so it may unload good ones. After a failure a model is not tried for
    `FIRST_SECONDS`, after each further one in a row for twice as long, up to `MOST_SECONDS`.
    """

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}
        self._serving: set[str] = set()

    def failed(self, model: str, cause: BaseException, now: float) -> float:
        """Note a failure. Return in how many seconds the model may be tried again."""
        self._serving.discard(model)
        last = self._failures.get(model)
        seconds = FIRST_SECONDS if last is None else min(2 * last.seconds, MOST_SECONDS)
        self._failures[model] = _Failure(cause, seconds, now + seconds)
        return seconds

    def served(self, model: str) -> None:
        """Note that a model has served a request. Its failures are forgotten."""
        self._serving.add(model)
        self._failures.pop(model, None)

    def serves(self, model: str) -> bool:
        """Return whether a model has served a request since it was loaded."""
        return model in self._serving

    def unloaded(self, model: str) -> None:
        """Note that a model is unloaded."""
        self._serving.discard(model)

    def refusal(self, model: str, now: float) -> tuple[BaseException, float] | None:
        """Return why a model must not be tried now, and the seconds until it may; None if it may."""
        last = self._failures.get(model)
        return None if last is None or now >= last.until else (last.cause, last.until - now)
