"""ModelPool: loads models on demand and unloads them, within one memory budget, on a thread of its own."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from cortexmlx.errors import (
    CortexError,
    EngineClosed,
    InvalidRequest,
    KVCacheFull,
    ModelCorrupt,
    ModelNotFound,
    ModelUnsupported,
    OutOfMemory,
)
from cortexmlx.kv.sizing import format_bytes, parse_size
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.server.residency import LoadBackoff, LoadModel, ModelState, ModelTicket, Residency, UnloadModel
from cortexmlx.system.waits import LONGEST_SECONDS
from cortexmlx.types.progress import OnProgress, Progress

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


log = logging.getLogger("cortexmlx")

_MAX_WAIT_SECONDS = 3600.0
"""Seconds after which the pool's thread looks again, whatever the clock says."""


@dataclass(frozen=True)
class ServedModel:
    """A model that a pool can load: its name, how to open its engine, and the memory that it takes."""

    name: str
    open: Callable[[OnProgress], Engine]
    """Loads the model. It is called on the pool's thread, each time with a function for the progress, which raises if
    the pool is closed meanwhile.
    """
    memory: int = 0
    """Bytes that it takes when it is loaded: weights, keys and values."""
    context_length: int | None = None
    """Tokens that a prompt and its answer may have, as clients are told. None: what the engine says when the model is
    first loaded.
    """
    adapters: tuple[str, ...] = ()
    """The names of the adapters that it is loaded with."""
    defaults: Callable[[Engine], RequestDefaults] | None = None
    """Returns what a body does not set. Called when the model is loaded, which fails with it. None: as the server's
    settings say.
    """


class ModelPool:
    """Loads models on demand and unloads the least recently used ones, so that all fit into a memory budget.

    Use it as a context manager, or call `close`. Any thread may call everything here.
    """

    def __init__(
        self,
        models: Iterable[ServedModel],
        *,
        memory: int | str | None = None,
        keep: Collection[str] = (),
        idle: float | None = None,
        tell: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory` is the budget: bytes, or a text like "40GB"; None: no limit. Models in `keep` are never unloaded.
        Others are unloaded after `idle` seconds without a request; None: only to make room. `tell` gets a line for each
        load, failed load (unless `acquire` raises it) and unload, on the pool's thread; None: they are logged.

        Raises InvalidRequest if two models have one name, or if a model can never be loaded.
        """
        served_models = tuple(models)
        self._models = {model.name: model for model in served_models}
        budget = None if memory is None else parse_size(memory)
        if not served_models or len(self._models) < len(served_models):
            raise InvalidRequest("a pool needs models, and each needs a name of its own")
        if unknown_names := set(keep) - set(self._models):
            raise InvalidRequest(f"{sorted(unknown_names)[0]!r} is to be kept, but is no model of the pool")
        if idle is not None and not idle > 0:
            raise InvalidRequest(f"idle is {idle!r}, but must be above 0 seconds or None")
        if budget is not None:
            _check_budget(served_models, budget, keep)
        self.memory = budget
        """The budget in bytes; None: no limit."""
        self._keep = frozenset(keep)
        self._residency = Residency({m.name: m.memory for m in served_models}, budget, keep, idle)
        self._retries = LoadBackoff()
        self._contexts = {m.name: m.context_length for m in served_models}
        self._tell = tell or log.info
        self._complain = tell or log.warning
        self._clock = clock
        self._on_progress: OnProgress | None = None
        self._loaded: dict[str, tuple[Engine, RequestDefaults | None]] = {}
        self._waits: dict[int, _PoolWait] = {}
        self._is_closing = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="cortexmlx-models", daemon=True)
        self._thread.start()

    # -- what a server asks -------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models, in order."""
        return tuple(self._models)

    def context_length(self, name: str) -> int | None:
        """Return how many tokens a prompt and its answer may have; None if that is not known before the first load."""
        return self._contexts[name]

    def model_memory(self, name: str) -> int:
        """Return the bytes that a model takes when it is loaded."""
        return self._models[name].memory

    @property
    def kept_memory(self) -> int:
        """The bytes of the models that are never unloaded."""
        return sum(self._models[name].memory for name in self._keep)

    def adapters(self, name: str) -> tuple[str, ...]:
        """Return the names of the adapters that requests for a model may name."""
        loaded = self._loaded.get(name)
        return self._models[name].adapters if loaded is None else tuple(loaded[0].adapters)

    def is_loaded(self, name: str) -> bool:
        """Whether a model is in memory."""
        return name in self._loaded

    def loaded_engines(self) -> list[tuple[str, Engine]]:
        """Return the engines of the models in memory, each with its name. One may be closed meanwhile."""
        with self._condition:
            return [(name, engine) for name, (engine, _) in self._loaded.items()]

    def is_ready(self, name: str) -> bool:
        """Whether a request for a model would be granted at once."""
        with self._condition:
            self._check_engine(name)
            return self._residency.would_grant(name)

    def request_model(self, name: str, on_settled: Callable[[], None] = lambda: None) -> _PoolWait:
        """Request a model. Unless settled at once, `on_settled` runs later, on any thread. Raises EngineClosed."""
        with self._condition:
            if self._is_closing:
                raise _pool_closed_error()
            self._check_engine(name)
            wait = _PoolWait(self, self._residency.add_request(name), on_settled)
            if (refusal := self._load_refusal(name)) is not None:
                self._residency.end_request(wait.ticket, self._clock())
                wait.error, wait.cause = refusal
                return wait
            self._waits[wait.ticket.number] = wait
            self._hand_out_leases(self._residency.grant_requests(), excluded_wait=wait)
            self._condition.notify()
            return wait

    def acquire(self, name: str, on_progress: OnProgress | None = None) -> ModelLease:
        """Wait for a model on this thread and return its lease, to be released. `on_progress` is called while it is
        loaded, on other threads. Raises what loading raises, with the paths, and EngineClosed.
        """
        settled_event = threading.Event()
        self._on_progress = on_progress
        with self._condition:
            wait = self.request_model(name, settled_event.set)
            wait.raises_cause = True
        try:
            while not wait.settled:
                settled_event.wait(LONGEST_SECONDS)
            if wait.cause is not None:
                raise wait.cause
            return wait.lease()
        except BaseException:
            wait.end()
            raise
        finally:
            self._on_progress = None

    def add(self, model: ServedModel) -> None:
        """Add a model, unless there is one of its name. Raises InvalidRequest if it can never be loaded."""
        with self._condition:
            if model.name in self._models:
                return
            if self.memory is not None:
                _check_budget((*(self._models[name] for name in self._keep), model), self.memory, self._keep)
            self._contexts = {**self._contexts, model.name: model.context_length}
            self._residency.add_model(model.name, model.memory)
            self._models = {**self._models, model.name: model}  # a new one: others may go through the old one

    def check_clock(self) -> None:
        """Have the pool's thread read the clock now, for tests with a clock of their own."""
        with self._condition:
            self._condition.notify()

    def close(self) -> None:
        """Close all engines, also one being loaded, and wait. Running requests fail with EngineClosed. Idempotent."""
        with self._condition:
            self._is_closing = True
            for wait in list(self._waits.values()):
                if not wait.settled:
                    wait.fail(_pool_closed_error())
            self._condition.notify()
        self._thread.join()

    def __enter__(self) -> ModelPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- waits, under the lock ----------------------------------------------------------------------------------------

    def end_wait(self, wait: _PoolWait) -> None:
        """End a granted request for a model, or withdraw a waiting one."""
        with self._condition:
            if self._waits.pop(wait.ticket.number, None) is not None:
                self._check_engine(wait.ticket.model)
                if self._residency.user_count(wait.ticket.model) and not self._residency.has_failed(wait.ticket.model):
                    self._retries.record_success(wait.ticket.model)
                self._residency.end_request(wait.ticket, self._clock())
                self._hand_out_leases(self._residency.grant_requests())
                self._condition.notify()

    def _check_engine(self, name: str) -> None:
        """Mark a loaded model as failed if its engine has closed for good. A later request for it reloads it."""
        engine = self._loaded[name][0] if name in self._loaded else None
        loaded = self._residency.state_of_model(name) is ModelState.LOADED and not self._residency.has_failed(name)
        if engine is not None and engine.closed and loaded:
            self._residency.mark_failed(name)
            if not self._retries.has_served(name):
                self._retries.record_failure(
                    name, EngineClosed("it failed before it had answered a request"), self._clock()
                )
            self._condition.notify()

    def _load_refusal(self, name: str) -> tuple[CannotLoad, BaseException] | None:
        """Return the error for a model that may not be loaded again yet, and its last exception; None if it may."""
        if self._residency.state_of_model(name) is not ModelState.UNLOADED and not self._residency.has_failed(name):
            return None
        refusal = self._retries.current_failure(name, self._clock())
        return None if refusal is None else (cannot_load_error(name, *refusal), refusal[0])

    def _hand_out_leases(self, tickets: Iterable[ModelTicket], excluded_wait: _PoolWait | None = None) -> None:
        """Give granted requests their leases, and notify them, except `excluded_wait`."""
        for ticket in tickets:
            wait = self._waits[ticket.number]
            engine, defaults = self._loaded[ticket.model]
            wait.grant(ModelLease(engine, ticket.model, defaults, on_release=wait.end), quiet=wait is excluded_wait)

    # -- the pool's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Carry out loads and unloads until the pool is closed: the target of the pool's thread."""
        while (action := self._next_action()) is not None:
            if isinstance(action, LoadModel):
                self._load(self._models[action.model])
            else:
                self._unload(action.model)
                with self._condition:
                    self._residency.finish_unload()
                    self._hand_out_leases(self._residency.grant_requests())
        for name in list(self._loaded):
            self._unload(name)

    def _next_action(self) -> LoadModel | UnloadModel | None:
        """Wait for the next load or unload; None when the pool is closed."""
        with self._condition:
            while not self._is_closing:
                action = self._residency.begin_action(self._clock())
                if action is not None:
                    return action
                unload_time = self._residency.next_idle_unload()
                wait = _MAX_WAIT_SECONDS if unload_time is None else unload_time - self._clock()
                self._condition.wait(min(max(wait, 0.0), _MAX_WAIT_SECONDS))
            return None

    def _load(self, model: ServedModel) -> None:
        """Load a model and grant the requests that wait for it, or record its failure."""
        start_time = self._clock()
        engine: Engine | None = None
        try:
            engine = model.open(self._on_load_progress)
            defaults = None if model.defaults is None else model.defaults(engine)
            context_length = engine.longest_request
        except BaseException as error:  # whatever it is, the other models go on
            cause = error.with_traceback(None)
            if engine is not None:
                _close_engine(engine, model.name)
            self._fail_load(model.name, cause)
            return
        with self._condition:
            if self._contexts[model.name] is None:
                self._contexts[model.name] = context_length
            self._loaded[model.name] = (engine, defaults)
            self._hand_out_leases(self._residency.finish_load(self._clock()))
            self._hand_out_leases(self._residency.grant_requests())
        self._report_event(f"loaded {model.name} in {self._clock() - start_time:.1f} s")

    def _fail_load(self, name: str, cause: BaseException) -> None:
        """Record a failed load and fail the requests that wait for the model."""
        with self._condition:
            client_error = cannot_load_error(name, cause, self._retries.record_failure(name, cause, self._clock()))
            waits = [self._waits.pop(ticket.number, None) for ticket in self._residency.fail_load()]
            failed_waits = [wait for wait in waits if wait is not None and not wait.settled]
            for wait in failed_waits:
                wait.fail(client_error, cause)
            self._hand_out_leases(self._residency.grant_requests())
        if not self._is_closing and not any(wait.raises_cause for wait in failed_waits):
            self._report_event(f"{name} cannot be loaded: {cause or type(cause).__name__}", is_failure=True)

    def _unload(self, name: str) -> None:
        """Close a model's engine and free its memory."""
        with self._condition:
            engine, _ = self._loaded.pop(name)
            self._retries.record_unload(name)
        _close_engine(engine, name)
        del engine
        if not self._is_closing:
            self._report_event(f"unloaded {name}")

    def _report_event(self, text: str, *, is_failure: bool = False) -> None:
        """Report a load, failed load or unload to the pool's owner, or else to the log."""
        try:
            (self._complain if is_failure else self._tell)(text)
        except Exception:  # nobody reads any more: the models go on
            log.info(text)

    def _on_load_progress(self, progress: Progress) -> None:
        """Pass on the progress of a load. Raises EngineClosed, which ends the load, if the pool is closed."""
        if self._is_closing:
            raise _pool_closed_error()
        if (on_progress := self._on_progress) is not None:
            on_progress(progress)


class _PoolWait:
    """A request to a pool for a model. It ends in a lease or an error."""

    def __init__(self, pool: ModelPool, ticket: ModelTicket, on_settled: Callable[[], None]) -> None:
        self.ticket = ticket
        self.error: CortexError | None = None
        self.cause: BaseException | None = None
        """What loading raised, with the paths."""
        self.raises_cause = False
        """Whether whoever waits raises it, so that it is not told, too."""
        self._pool = pool
        self._on_settled = on_settled
        self._lease: ModelLease | None = None

    @property
    def settled(self) -> bool:
        """Whether the request was granted or has failed. Only then may `lease` be called: it does not wait."""
        return self._lease is not None or self.error is not None

    def lease(self) -> ModelLease:
        """Return the lease that was granted. Raises CannotLoad or EngineClosed if the request failed."""
        if self.error is not None:
            raise self.error
        assert self._lease is not None
        return self._lease

    def end(self) -> None:
        """End the request, or withdraw it if it still waits."""
        self._pool.end_wait(self)

    def grant(self, lease: ModelLease, *, quiet: bool) -> None:
        """Settle the request with a lease. `quiet`: without notifying its owner."""
        self._lease = lease
        if not quiet:
            self._on_settled()

    def fail(self, error: CortexError, cause: BaseException | None = None) -> None:
        """Settle the request with an error."""
        self.error, self.cause = error, cause
        self._on_settled()


def _check_budget(models: Iterable[ServedModel], budget: int, keep: Collection[str]) -> None:
    """Raise InvalidRequest if a model does not fit into the budget beside those that are always loaded."""
    kept_bytes = sum(model.memory for model in models if model.name in keep)
    for model in models:
        other_bytes = kept_bytes - (model.memory if model.name in keep else 0)
        if model.memory + other_bytes > budget:
            others_note = (
                f", of which those that are kept loaded take {format_bytes(other_bytes)}" if other_bytes else ""
            )
            raise InvalidRequest(
                f"{model.name} takes {format_bytes(model.memory)} when it is loaded, but the models may take "
                f"{format_bytes(budget)} in all{others_note}: give them more (--memory), or less for keys and values "
                "(--kv-memory)"
            )


def _close_engine(engine: Engine, name: str) -> None:
    """Close an engine; an error is logged."""
    try:
        engine.close()
    except Exception:
        log.exception("%s did not close properly", name)


def _pool_closed_error() -> EngineClosed:
    return EngineClosed("the server ends: its models are closed")


# OpenEngines: models whose engines a program has opened. They stay the program's to close.


class OpenEngines:
    """Serves engines that the program itself has opened: one under its model's name, or several by name."""

    def __init__(self, engines: Engine | Mapping[str, Engine]) -> None:
        self._source = engines
        self._context: dict[str, int] = {}

    @cached_property
    def _engines(self) -> Mapping[str, Engine]:
        source = self._source
        return dict(source) if isinstance(source, Mapping) else {client_model_name(source.info.name): source}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models, in order."""
        return tuple(self._engines)

    def context_length(self, name: str) -> int:
        """Return how many tokens a prompt and its answer may have."""
        return self._context.setdefault(name, self._engines[name].longest_request)

    def model_memory(self, name: str) -> int:
        """Return 0: what an open engine takes is not planned here."""
        return 0

    def adapters(self, name: str) -> tuple[str, ...]:
        """Return the names of the adapters that are loaded now."""
        return tuple(self._engines[name].adapters)

    def is_loaded(self, name: str) -> bool:
        """Return True: an open engine's model is always loaded."""
        return True

    def loaded_engines(self) -> list[tuple[str, Engine]]:
        """Return all engines, each with its name."""
        return list(self._engines.items())

    def is_ready(self, name: str) -> bool:
        """Return True: an open engine can be used at once."""
        return True

    def request_model(self, name: str, on_settled: Callable[[], None]) -> _ReadyWait:
        """Return a request that is already granted."""
        return _ReadyWait(ModelLease(self._engines[name], name))


class _ReadyWait:
    """A request for a model that was granted at once."""

    settled = True

    def __init__(self, lease: ModelLease) -> None:
        self._lease = lease

    def lease(self) -> ModelLease:
        return self._lease

    def end(self) -> None:
        """Do nothing: the engine belongs to the program."""


def client_model_name(model: str | Path) -> str:
    """Return the name of a model for clients: of a local path only the last part, since the rest is private."""
    path = Path(os.path.expanduser(model))
    if path.is_absolute() or os.path.exists(path):  # which is False for what no path can be
        return Path(os.path.abspath(path)).name.removesuffix(".gguf") or "model"
    return str(model)


# ModelLease: a model while a request needs it, and what hands them out.


@dataclass(frozen=True)
class ModelLease:
    """The right of one request to use a loaded model. It ends with `release`."""

    engine: Engine
    name: str
    """The name that replies say."""
    defaults: RequestDefaults | None = None
    """What a body does not set; None: as the server's settings say."""
    adapter: str | None = None
    """The name of the adapter that answers; None: the model alone does."""
    on_release: Callable[[], None] = lambda: None

    def release(self) -> None:
        """Give the model back: the request has ended. Safe to call again, from any thread."""
        self.on_release()


class ModelWait(Protocol):
    """A request for a model: first it waits, then it has a lease or an error."""

    @property
    def settled(self) -> bool:
        """Whether the request was granted or has failed. Only then may `lease` be called: it does not wait."""

    def lease(self) -> ModelLease:
        """Return the lease. Raises CortexError if the model cannot be loaded."""

    def end(self) -> None:
        """End the request, or withdraw it if it still waits. Safe to call again, from any thread."""


class ModelProvider(Protocol):
    """What a server gets its models from: a ModelPool, or OpenEngines."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models, in order. The first model answers requests that name none."""

    def context_length(self, name: str) -> int | None:
        """Return how many tokens a prompt and its answer may have; None while unknown. Once known, it never changes."""

    def model_memory(self, name: str) -> int:
        """Return the bytes that a model takes when it is loaded, if that is planned; else 0."""

    def adapters(self, name: str) -> tuple[str, ...]:
        """Return the names of the adapters that requests for a model may name."""

    def is_loaded(self, name: str) -> bool:
        """Whether a model is in memory."""

    def loaded_engines(self) -> list[tuple[str, Engine]]:
        """Return the engines of the models in memory, each with its name. One may be closed meanwhile."""

    def is_ready(self, name: str) -> bool:
        """Whether a request for a model would be granted at once."""

    def request_model(self, name: str, on_settled: Callable[[], None]) -> ModelWait:
        """Request a model. If that is not settled at once, `on_settled` is called later, on any thread."""


# CannotLoad: what clients are told of a model that cannot be loaded.


_PUBLIC_REASONS = (
    (ModelNotFound, "its files are not there"),
    (ModelCorrupt, "its files are damaged"),
    (ModelUnsupported, "this version cannot run it"),
    (OutOfMemory, "memory was refused"),
    (KVCacheFull, "memory was refused"),
    (InvalidRequest, "it does not fit the server's options"),
)


class CannotLoad(CortexError):
    """A model cannot be loaded now; it may be tried again after `seconds`. Clients read the message: no path in it."""

    def __init__(self, message: str, seconds: float = 1.0) -> None:
        super().__init__(message)
        self.seconds = seconds


def cannot_load_error(name: str, cause: BaseException, seconds: float) -> CannotLoad:
    """Return the error for clients when loading a model raised `cause`. `seconds`: when it is tried again."""
    reason = next(
        (reason_text for kind, reason_text in _PUBLIC_REASONS if isinstance(cause, kind)), "see the server's log"
    )
    retry_seconds = math.ceil(seconds)
    return CannotLoad(f"the model {name!r} cannot be loaded: {reason}. Ask again in {retry_seconds} s", retry_seconds)
