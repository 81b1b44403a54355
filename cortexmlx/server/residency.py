"""Decides which models of a pool are loaded and unloaded, and for whom. Plain data, without threads and mlx."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum


class ModelState(Enum):
    """Whether a model is unloaded, loading, loaded or unloading."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(frozen=True)
class ModelTicket:
    """A queued or granted request for a model. A smaller `number` came first."""

    number: int
    model: str


@dataclass(frozen=True)
class LoadModel:
    """An action: load this model now."""

    model: str


@dataclass(frozen=True)
class UnloadModel:
    """An action: unload this model now."""

    model: str


@dataclass
class _ModelEntry:
    """A model's state, memory and use."""

    memory: int
    state: ModelState = ModelState.UNLOADED
    users: int = 0
    newest_ticket: int = 0
    """The number of the newest ticket that was granted."""
    last_used: float = 0.0
    """When the last user left, or when it was loaded."""
    has_failed: bool = False
    """Whether its engine has failed for good."""

    @property
    def is_ready(self) -> bool:
        """Whether the model can serve requests."""
        return self.state is ModelState.LOADED and not self.has_failed


class Residency:
    """Decides which models are in memory: grants requests, and picks the next load or unload within a memory budget.

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
        kept_models: Collection[str] = (),
        idle: float | None = None,
    ) -> None:
        """`memory` has the bytes of each model, `budget` those of all together (None: no limit). Models in
        `kept_models` are never unloaded. Others are unloaded after `idle` seconds without a request; None: only to
        make room.
        """
        self._models = {name: _ModelEntry(size) for name, size in memory.items()}
        self._budget = budget
        self._kept_models = frozenset(kept_models)
        self._idle = idle
        self._numbers = itertools.count(1)
        self._waiting_tickets: dict[int, ModelTicket] = {}
        self._granted_tickets: dict[int, ModelTicket] = {}
        self._changing_model: str | None = None

    def add_model(self, name: str, memory: int) -> None:
        """Add a model, which is unloaded and takes `memory` bytes."""
        self._models[name] = _ModelEntry(memory)

    # -- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, model: str) -> ModelTicket:
        """Queue a request for a model. `grant_requests` or `finish_load` returns it once it is granted."""
        ticket = ModelTicket(next(self._numbers), model)
        self._waiting_tickets[ticket.number] = ticket
        return ticket

    def grant_requests(self) -> list[ModelTicket]:
        """Grant all requests that can be granted, and return them. Call it after every change."""
        granted_tickets = []
        for ticket in list(self._waiting_tickets.values()):
            model = self._models[ticket.model]
            if model.is_ready and not self._must_yield(ticket):
                self._grant_ticket(ticket)
                granted_tickets.append(ticket)
        return granted_tickets

    def end_request(self, ticket: ModelTicket, now: float) -> None:
        """Withdraw a waiting request, or end one that was granted. Safe to call again."""
        self._waiting_tickets.pop(ticket.number, None)
        if self._granted_tickets.pop(ticket.number, None) is not None:
            model = self._models[ticket.model]
            model.users -= 1
            model.last_used = max(model.last_used, now)

    def would_grant(self, model: str) -> bool:
        """Whether a request for a model would be granted at once."""
        return self._models[model].is_ready and model not in self._models_to_unload()

    def has_failed(self, model: str) -> bool:
        """Whether a loaded model's engine has failed for good."""
        return self._models[model].has_failed

    def mark_failed(self, model: str) -> None:
        """Record that a loaded model's engine has failed for good. Safe to call again."""
        if self._models[model].state is ModelState.LOADED:
            self._models[model].has_failed = True

    # -- loading and unloading ----------------------------------------------------------------------------------------

    def begin_action(self, now: float) -> LoadModel | UnloadModel | None:
        """Return the next load or unload, and count it as begun; None if there is nothing to do."""
        if self._changing_model is not None:
            return None
        action = self._choose_action(now)
        if action is not None:
            state = ModelState.LOADING if isinstance(action, LoadModel) else ModelState.UNLOADING
            self._changing_model, self._models[action.model].state = action.model, state
        return action

    def finish_load(self, now: float) -> list[ModelTicket]:
        """Record that the model is loaded. Grant and return the requests that waited for it."""
        model = self._finish_action(ModelState.LOADED)
        self._models[model].last_used = now
        tickets = [ticket for ticket in self._waiting_tickets.values() if ticket.model == model]
        for ticket in tickets:
            self._grant_ticket(ticket)
        return tickets

    def fail_load(self) -> list[ModelTicket]:
        """Record that the model cannot be loaded. Drop and return the requests that waited for it."""
        model = self._finish_action(ModelState.UNLOADED)
        tickets = [ticket for ticket in self._waiting_tickets.values() if ticket.model == model]
        for ticket in tickets:
            del self._waiting_tickets[ticket.number]
        return tickets

    def finish_unload(self) -> None:
        """Record that the model is unloaded."""
        self._finish_action(ModelState.UNLOADED)

    def next_idle_unload(self) -> float | None:
        """Return the time at which the next idle model is to be unloaded; None: there is none."""
        if self._idle is None:
            return None
        return min((self._models[name].last_used + self._idle for name in self._idle_models()), default=None)

    # -- looking ------------------------------------------------------------------------------------------------------

    def state_of_model(self, model: str) -> ModelState:
        """Return whether a model is unloaded, loading, loaded or unloading."""
        return self._models[model].state

    def user_count(self, model: str) -> int:
        """Return how many granted requests use a model."""
        return self._models[model].users

    # -- the choice ---------------------------------------------------------------------------------------------------

    def _choose_action(self, now: float) -> LoadModel | UnloadModel | None:
        """Return the next load or unload, or None."""
        for name, model in self._models.items():
            if model.has_failed and not model.users:
                return UnloadModel(name)
        head = self._oldest_unserved()
        if head is not None:
            victims = self._models_to_unload()
            if not victims and self._missing_bytes(head) <= 0:
                return LoadModel(head.model)
            if victims and all(not self._models[name].users for name in victims):
                return UnloadModel(victims[0])
        if self._idle is not None:
            for name in self._idle_models():
                if now - self._models[name].last_used >= self._idle:
                    return UnloadModel(name)
        return None

    def _oldest_unserved(self) -> ModelTicket | None:
        """Return the oldest request whose model is neither loaded nor loading."""
        waiting, unloaded_states = self._waiting_tickets.values(), (ModelState.UNLOADED, ModelState.UNLOADING)
        return next((ticket for ticket in waiting if self._models[ticket.model].state in unloaded_states), None)

    def _missing_bytes(self, head: ModelTicket) -> int:
        """Return how many bytes must still be freed to load the model of `head`; 0 or less if it fits."""
        if self._budget is None:
            return 0
        loaded_states = (ModelState.LOADING, ModelState.LOADED)
        used_bytes = sum(model.memory for model in self._models.values() if model.state in loaded_states)
        return used_bytes + self._models[head.model].memory - self._budget

    def _models_to_unload(self) -> list[str]:
        """Return models to unload for the oldest request, longest unused first; none if its model fits, or must wait
        for one that is being loaded.
        """
        head = self._oldest_unserved()
        missing_bytes = 0 if head is None else self._missing_bytes(head)
        if missing_bytes <= 0:
            return []
        loaded = [
            (n, m) for n, m in self._models.items() if m.state is ModelState.LOADED and n not in self._kept_models
        ]
        # Those in use are ordered by their newest grant: a model that makes room gets none, and so stays the first.
        order = sorted(
            loaded, key=lambda item: (item[1].users > 0, item[1].newest_ticket if item[1].users else item[1].last_used)
        )
        model_names: list[str] = []
        for name, model in order:
            if missing_bytes > 0:
                model_names.append(name)
                missing_bytes -= model.memory
        if missing_bytes > 0:
            return []
        for name in list(model_names):
            if missing_bytes + self._models[name].memory <= 0:  # what the others free is enough
                model_names.remove(name)
                missing_bytes += self._models[name].memory
        return model_names

    def _must_yield(self, ticket: ModelTicket) -> bool:
        """Whether a request may not be granted, since its model is to be unloaded for an older request."""
        head = self._oldest_unserved()
        return head is not None and head.number < ticket.number and ticket.model in self._models_to_unload()

    def _idle_models(self) -> list[str]:
        """Return the loaded models that nobody uses or waits for, and that may be unloaded."""
        requested_models = {ticket.model for ticket in self._waiting_tickets.values()}
        return [
            name
            for name, model in self._models.items()
            if model.state is ModelState.LOADED
            and not model.users
            and name not in self._kept_models
            and name not in requested_models
        ]

    def _grant_ticket(self, ticket: ModelTicket) -> None:
        del self._waiting_tickets[ticket.number]
        self._granted_tickets[ticket.number] = ticket
        model = self._models[ticket.model]
        model.users += 1
        model.newest_ticket = ticket.number

    def _finish_action(self, state: ModelState) -> str:
        """End the running load or unload, give its model this state, and return the model's name."""
        assert self._changing_model is not None
        model, self._changing_model = self._changing_model, None
        self._models[model].state, self._models[model].has_failed = state, False
        return model


# LoadBackoff: when a model whose load failed may be tried again. Plain data, without threads and mlx.


FIRST_SECONDS, MAX_SECONDS = 5.0, 300.0


@dataclass(frozen=True)
class _LoadFailure:
    """A model's last failure: the exception, the delay after it, and the time until which it is not tried."""

    cause: BaseException
    seconds: float
    retry_time: float


class LoadBackoff:
    """Exponential backoff for models that fail to load, or that fail before they have served a request.

    Each try makes room for the model, so it may unload good ones. After a failure a model is not tried for
    `FIRST_SECONDS`, after each further one in a row for twice as long, up to `MAX_SECONDS`.
    """

    def __init__(self) -> None:
        self._failures: dict[str, _LoadFailure] = {}
        self._served_models: set[str] = set()

    def record_failure(self, model: str, cause: BaseException, now: float) -> float:
        """Record a failure. Return in how many seconds the model may be tried again."""
        self._served_models.discard(model)
        last = self._failures.get(model)
        seconds = FIRST_SECONDS if last is None else min(2 * last.seconds, MAX_SECONDS)
        self._failures[model] = _LoadFailure(cause, seconds, now + seconds)
        return seconds

    def record_success(self, model: str) -> None:
        """Record that a model has served a request, and forget its failures."""
        self._served_models.add(model)
        self._failures.pop(model, None)

    def has_served(self, model: str) -> bool:
        """Whether a model has served a request since it was loaded."""
        return model in self._served_models

    def record_unload(self, model: str) -> None:
        """Record that a model was unloaded."""
        self._served_models.discard(model)

    def current_failure(self, model: str, now: float) -> tuple[BaseException, float] | None:
        """Return the last failure's exception and the seconds until the next try; None if it may be tried now."""
        last = self._failures.get(model)
        return None if last is None or now >= last.retry_time else (last.cause, last.retry_time - now)
