"""ModelPool: models that are loaded when a request needs them, within one memory budget, on a thread of its own."""

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
from cortexmlx.protocols.request import Defaults
from cortexmlx.server.residency import LoadModel, Residency, Retries, State, Ticket, UnloadModel
from cortexmlx.system.machine import give_back_freed
from cortexmlx.system.waits import LONGEST_SECONDS
from cortexmlx.types.progress import OnProgress, Progress

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


log = logging.getLogger("cortexmlx")

_LONGEST_WAIT = 3600.0
"""Seconds after which the pool's thread looks again, whatever the clock says."""


@dataclass(frozen=True)
class ServedModel:
    """A model that a pool can load."""

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
    defaults: Callable[[Engine], Defaults] | None = None
    """Returns what a body does not set. Called when the model is loaded, which fails with it. None: as the server's
    settings say.
    """


class ModelPool:
    """Loads models on demand, and unloads the least recently used ones before, so that all fit into the budget.

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
        """`memory` is the budget: bytes, or a text like "40GB"; None: any number. Models in `keep` are never unloaded.
        Others are unloaded after `idle` seconds without a request; None: only for room. `tell` gets a line for each
        load, failed load and unload, on the pool's thread; None: the log does.

        Raises InvalidRequest if two models have one name, or if a model can never be loaded.
        """
        listed = tuple(models)
        self._models = {model.name: model for model in listed}
        budget = None if memory is None else parse_size(memory)
        if not listed or len(self._models) < len(listed):
            raise InvalidRequest("a pool needs models, and each needs a name of its own")
        if unknown := set(keep) - set(self._models):
            raise InvalidRequest(f"{sorted(unknown)[0]!r} is to be kept, but is no model of the pool")
        if idle is not None and not idle > 0:
            raise InvalidRequest(f"idle is {idle!r}, but must be above 0 seconds or None")
        if budget is not None:
            _check_room(listed, budget, keep)
        self.memory = budget
        """The budget in bytes; None: any number."""
        self._residency = Residency({m.name: m.memory for m in listed}, budget, keep, idle)
        self._retries = Retries()
        self._contexts = {m.name: m.context_length for m in listed}
        self._tell = tell or log.info
        self._complain = tell or log.warning
        self._clock = clock
        self._on_progress: OnProgress | None = None
        self._loaded: dict[str, tuple[Engine, Defaults | None]] = {}
        self._waits: dict[int, _Wait] = {}
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="cortexmlx-models", daemon=True)
        self._thread.start()

    # -- what a server asks -------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(self._models)

    def context_length(self, name: str) -> int | None:
        """Return how many tokens a prompt and its answer may have; None before the first load, if nobody said so."""
        return self._contexts[name]

    def memory_of(self, name: str) -> int:
        """Return the bytes that a model takes when it is loaded."""
        return self._models[name].memory

    def adapters(self, name: str) -> tuple[str, ...]:
        """Return the names of the adapters that requests for a model may name."""
        loaded = self._loaded.get(name)
        return self._models[name].adapters if loaded is None else tuple(loaded[0].adapters)

    def is_loaded(self, name: str) -> bool:
        """Return whether a model is in memory."""
        return name in self._loaded

    def loaded(self) -> list[tuple[str, Engine]]:
        """Return the engines of the models that are in memory, by name. One may be closed meanwhile."""
        with self._changed:
            return [(name, engine) for name, (engine, _) in self._loaded.items()]

    def is_ready(self, name: str) -> bool:
        """Return whether a request would get the model at once."""
        with self._changed:
            self._notice(name)
            return self._residency.would_grant(name)

    def ask(self, name: str, settled: Callable[[], None] = lambda: None) -> _Wait:
        """Ask for a model. `settled` is called on any thread when the wait is settled, unless it is so at once. Raises
        EngineClosed.
        """
        with self._changed:
            if self._closing:
                raise _closed()
            self._notice(name)
            wait = _Wait(self, self._residency.ask(name), settled)
            if (refusal := self._refusal(name)) is not None:
                self._residency.leave(wait.ticket, self._clock())
                wait.error, wait.cause = refusal
                return wait
            self._waits[wait.ticket.number] = wait
            self._settle(self._residency.grant(), but=wait)
            self._changed.notify()
            return wait

    def take(self, name: str, on_progress: OnProgress | None = None) -> Lease:
        """Wait for a model on this thread, and return it; release it. `on_progress` is called while it is loaded, on
        other threads. Raises what loading raises, with the paths, and EngineClosed.
        """
        there = threading.Event()
        self._on_progress = on_progress
        wait = self.ask(name, there.set)
        try:
            while not wait.settled:
                there.wait(LONGEST_SECONDS)
            if wait.cause is not None:
                raise wait.cause
            return wait.lease()
        except BaseException:
            wait.leave()
            raise
        finally:
            self._on_progress = None

    def look(self) -> None:
        """Look at the clock now. For a clock that is not the machine's."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Close all engines, also one that is being loaded, and wait for that. Requests in flight fail with
        EngineClosed. Safe to call again.
        """
        with self._changed:
            self._closing = True
            for wait in list(self._waits.values()):
                if not wait.settled:
                    wait.fail(_closed())
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> ModelPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- waits, under the lock ----------------------------------------------------------------------------------------

    def left(self, wait: _Wait) -> None:
        """End a request, or take it back."""
        with self._changed:
            if self._waits.pop(wait.ticket.number, None) is not None:
                self._notice(wait.ticket.model)
                if self._residency.users(wait.ticket.model) and not self._residency.has_failed(wait.ticket.model):
                    self._retries.served(wait.ticket.model)
                self._residency.leave(wait.ticket, self._clock())
                self._settle(self._residency.grant())
                self._changed.notify()

    def _notice(self, name: str) -> None:
        """Note it if a loaded model's engine has failed for good. It is then unloaded, and loaded again when it is
        asked for.
        """
        engine = self._loaded[name][0] if name in self._loaded else None
        loaded = self._residency.state(name) is State.LOADED and not self._residency.has_failed(name)
        if engine is not None and engine.closed and loaded:
            self._residency.fail(name)
            if not self._retries.serves(name):
                self._retries.failed(name, EngineClosed("it failed before it had answered a request"), self._clock())
            self._changed.notify()

    def _refusal(self, name: str) -> tuple[CannotLoad, BaseException] | None:
        """Return why a model is not tried now, and what its last load raised; None if it may be loaded."""
        if self._residency.state(name) is not State.UNLOADED and not self._residency.has_failed(name):
            return None
        refusal = self._retries.refusal(name, self._clock())
        return None if refusal is None else (cannot_load(name, *refusal), refusal[0])

    def _settle(self, granted: Iterable[Ticket], but: _Wait | None = None) -> None:
        """Hand out the models of requests that are granted."""
        for ticket in granted:
            wait = self._waits[ticket.number]
            engine, defaults = self._loaded[ticket.model]
            wait.take(Lease(engine, ticket.model, defaults, end=wait.leave), quiet=wait is but)

    # -- the pool's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (action := self._next()) is not None:
            if isinstance(action, LoadModel):
                self._load(self._models[action.model])
            else:
                self._unload(action.model)
                with self._changed:
                    self._residency.unloaded()
                    self._settle(self._residency.grant())
        for name in list(self._loaded):
            self._unload(name)

    def _next(self) -> LoadModel | UnloadModel | None:
        """Wait for something to do. Return None at the end."""
        with self._changed:
            while not self._closing:
                action = self._residency.begin(self._clock())
                if action is not None:
                    return action
                due = self._residency.due()
                wait = _LONGEST_WAIT if due is None else due - self._clock()
                self._changed.wait(min(max(wait, 0.0), _LONGEST_WAIT))
            return None

    def _load(self, model: ServedModel) -> None:
        began = self._clock()
        engine: Engine | None = None
        try:
            engine = model.open(self._report)
            defaults = None if model.defaults is None else model.defaults(engine)
            longest = engine.longest_request
        except BaseException as error:  # whatever it is, the other models go on
            cause = error.with_traceback(None)
            if engine is not None:
                _close(engine, model.name)
            self._failed(model.name, cause)
            return
        with self._changed:
            if self._contexts[model.name] is None:
                self._contexts[model.name] = longest
            self._loaded[model.name] = (engine, defaults)
            self._settle(self._residency.loaded(self._clock()))
            self._settle(self._residency.grant())
        self._say(f"loaded {model.name} in {self._clock() - began:.1f} s")

    def _failed(self, name: str, cause: BaseException) -> None:
        with self._changed:
            says = cannot_load(name, cause, self._retries.failed(name, cause, self._clock()))
            for ticket in self._residency.failed():
                if (wait := self._waits.pop(ticket.number, None)) is not None and not wait.settled:
                    wait.fail(says, cause)
            self._settle(self._residency.grant())
        if not self._closing:
            self._say(f"{name} cannot be loaded: {cause or type(cause).__name__}", wrong=True)

    def _unload(self, name: str) -> None:
        with self._changed:
            engine, _ = self._loaded.pop(name)
            self._retries.unloaded(name)
        _close(engine, name)
        del engine
        give_back_freed()
        if not self._closing:
            self._say(f"unloaded {name}")

    def _say(self, text: str, *, wrong: bool = False) -> None:
        try:
            (self._complain if wrong else self._tell)(text)
        except Exception:  # nobody reads any more: the models go on
            log.info(text)

    def _report(self, progress: Progress) -> None:
        """Pass the progress of a load on. Raises EngineClosed if the pool is closed, which ends the load."""
        if self._closing:
            raise _closed()
        if (told := self._on_progress) is not None:
            told(progress)


class _Wait:
    """A request for a model, and the lease that comes of it."""

    def __init__(self, pool: ModelPool, ticket: Ticket, settled: Callable[[], None]) -> None:
        self.ticket = ticket
        self.error: CortexError | None = None
        self.cause: BaseException | None = None
        """What loading raised, with the paths."""
        self._pool = pool
        self._settled = settled
        self._lease: Lease | None = None

    @property
    def settled(self) -> bool:
        """Whether `lease` returns or raises now."""
        return self._lease is not None or self.error is not None

    def lease(self) -> Lease:
        """Return the lease. Raises CannotLoad or EngineClosed."""
        if self.error is not None:
            raise self.error
        assert self._lease is not None
        return self._lease

    def leave(self) -> None:
        """End the request, or take it back."""
        self._pool.left(self)

    def take(self, lease: Lease, *, quiet: bool) -> None:
        """Settle it with a lease."""
        self._lease = lease
        if not quiet:
            self._settled()

    def fail(self, error: CortexError, cause: BaseException | None = None) -> None:
        """Settle it with an error."""
        self.error, self.cause = error, cause
        self._settled()


def _check_room(models: Iterable[ServedModel], budget: int, keep: Collection[str]) -> None:
    """Raise InvalidRequest for a model that can never be loaded, with the numbers."""
    held = sum(model.memory for model in models if model.name in keep)
    for model in models:
        others = held - (model.memory if model.name in keep else 0)
        if model.memory + others > budget:
            beside = f", of which those that are kept loaded take {format_bytes(others)}" if others else ""
            raise InvalidRequest(
                f"{model.name} takes {format_bytes(model.memory)} when it is loaded, but the models may take "
                f"{format_bytes(budget)} in all{beside}: give them more (--memory), or less for keys and values "
                "(--kv-memory)"
            )


def _close(engine: Engine, name: str) -> None:
    try:
        engine.close()
    except Exception:
        log.exception("%s did not close properly", name)


def _closed() -> EngineClosed:
    return EngineClosed("the server ends: its models are closed")


# OpenEngines: models whose engines a program has opened. They stay the program's to close.


class OpenEngines:
    """One engine, which has the name of its model, or several by their names."""

    def __init__(self, engines: Engine | Mapping[str, Engine]) -> None:
        self._given = engines
        self._context: dict[str, int] = {}

    @cached_property
    def _engines(self) -> Mapping[str, Engine]:
        given = self._given
        return dict(given) if isinstance(given, Mapping) else {public_name(given.info.name): given}

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(self._engines)

    def context_length(self, name: str) -> int:
        """Return how many tokens a prompt and its answer may have."""
        return self._context.setdefault(name, self._engines[name].longest_request)

    def adapters(self, name: str) -> tuple[str, ...]:
        """Return the names of the adapters that are loaded now."""
        return tuple(self._engines[name].adapters)

    def is_loaded(self, name: str) -> bool:
        """Return True."""
        return True

    def loaded(self) -> list[tuple[str, Engine]]:
        """Return all engines by name."""
        return list(self._engines.items())

    def is_ready(self, name: str) -> bool:
        """Return True."""
        return True

    def ask(self, name: str, settled: Callable[[], None]) -> _ReadyWait:
        """Return a wait that is settled."""
        return _ReadyWait(Lease(self._engines[name], name))


class _ReadyWait:
    settled = True

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def lease(self) -> Lease:
        return self._lease

    def leave(self) -> None:
        """Nothing ends: the engine is the program's."""


def public_name(model: str | Path) -> str:
    """Return what clients call a model: of a folder or a file the last part of its path, since the rest is nobody's
    business.
    """
    path = Path(os.path.expanduser(model))
    if path.is_absolute() or os.path.exists(path):  # which is False for what no path can be
        return Path(os.path.abspath(path)).name.removesuffix(".gguf") or "model"
    return str(model)


# Lease: a model while a request needs it, and what hands them out.


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


class ModelSource(Protocol):
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


# CannotLoad: what clients are told of a model that cannot be loaded.


_WHY = (
    (ModelNotFound, "its files are not there"),
    (ModelCorrupt, "its files are damaged"),
    (ModelUnsupported, "this version cannot run it"),
    (OutOfMemory, "memory was refused"),
    (KVCacheFull, "memory was refused"),
    (InvalidRequest, "it does not fit the server's options"),
)


class CannotLoad(CortexError):
    """A model cannot be loaded now. The message names it without its path: clients read it. It may be tried again after
    `seconds`.
    """

    def __init__(self, message: str, seconds: float = 1.0) -> None:
        super().__init__(message)
        self.seconds = seconds


def cannot_load(name: str, cause: BaseException, seconds: float) -> CannotLoad:
    """Return the error that clients get for what loading a model raised, and the seconds until it is tried again."""
    why = next((words for kind, words in _WHY if isinstance(cause, kind)), "see the server's log")
    again = math.ceil(seconds)
    return CannotLoad(f"the model {name!r} cannot be loaded: {why}. Ask again in {again} s", again)
