"""The engine's thread: it owns mlx, and carries out what other threads ask of it between two steps."""

from __future__ import annotations

import atexit
import logging
import queue
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cortexmlx.errors import CortexError, EngineClosed
from cortexmlx.request import SamplingParams, TokenEvent
from cortexmlx.serving.handle import RequestHandle
from cortexmlx.serving.threads import Task

if TYPE_CHECKING:
    from cortexmlx.serving.answers import NewRequest
    from cortexmlx.serving.config import EngineConfig
    from cortexmlx.serving.core import EngineCore

log = logging.getLogger("cortexmlx")


@dataclass(frozen=True)
class Submission:
    """A request that was checked and is not queued yet. `submitted` is when it came, on the performance counter;
    `listener`, `client` and `patient` are those of `Engine.submit`.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    submitted: float
    listener: Callable[[TokenEvent | None], None] | None = None
    client: str | None = None
    patient: bool = False


class Worker:
    """The engine's thread and the queue of what others want from it."""

    def __init__(self, config: EngineConfig) -> None:
        self.core: EngineCore
        self._config = config
        self._calls: queue.SimpleQueue[Callable[[EngineCore], None] | None] = queue.SimpleQueue()
        self._loaded = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._stopping = False
        self._requests = 0
        self._handles: weakref.WeakValueDictionary[int, RequestHandle] = weakref.WeakValueDictionary()
        self._task = Task(self._run)

    def start(self) -> None:
        """Start the thread and wait until the model is loaded; raises what loading raised."""
        _open_workers.add(self)
        self._task.start()
        try:
            self._loaded.wait()
        except BaseException:
            self._stopping = True
            self._calls.put(None)
            raise
        if self._error is not None:
            self._task.join()
            raise self._error

    def submit(self, submissions: Iterable[Submission], handles: list[RequestHandle]) -> None:
        """Queue requests and append their handles to `handles`. Those of one call reach the scheduler together, so
        that their prompts share the first step.
        """
        from cortexmlx.serving.answers import NewRequest

        with self._lock:
            self._check_open()
            requests = []
            for new in submissions:
                self._requests += 1
                handle = RequestHandle(self._requests, self.cancel, new.listener)
                self._handles[handle.id] = handle
                handles.append(handle)
                seed = secrets.randbits(62) if new.params.seed is None else new.params.seed
                requests.append(
                    NewRequest(handle.id, new.prompt, new.params, seed, new.submitted, handle, new.client, new.patient)
                )
            self._calls.put(lambda core: _add(core, requests))

    def cancel(self, request: int) -> None:
        self._calls.put(lambda core: core.cancel(request))

    def ask(self, question: Callable[[EngineCore], Any]) -> Any:
        """Run `question` on the engine's thread between two steps and return its answer."""
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run(core: EngineCore) -> None:
            try:
                answer.put((question(core), None))
            except BaseException as error:
                answer.put((None, error))

        with self._lock:
            self._check_open()
            self._calls.put(run)
        while True:
            try:
                value, error = answer.get(timeout=0.5)
            except queue.Empty:
                if not self._task.running:
                    raise EngineClosed("the engine is closed: make a new one") from None
                continue
            if error is not None:
                raise error
            return value

    def stop(self) -> None:
        """End the thread and wait for it. Safe to call again, from any thread but the engine's own."""
        with self._lock:
            self._stopping = True
            self._calls.put(None)
        if self._task.running and not self._task.here():
            self._task.join()
        _open_workers.discard(self)

    def _check_open(self) -> None:
        if self._stopping:
            raise EngineClosed("the engine is closed: make a new one")

    def _run(self) -> None:
        try:
            from cortexmlx.serving.core import EngineCore

            self.core = EngineCore(self._config)
        except BaseException as error:
            self._error = error
            self._stopping = True
            return
        finally:
            self._loaded.set()
        try:
            while self._take_calls():
                self._step()
        finally:
            self._shut_down()

    def _take_calls(self) -> bool:
        """Carry out what others asked for; wait for something if the core is idle. False: stop."""
        block = self.core.idle
        while True:
            if block and self._calls.empty():
                self.core.tidy()
            try:
                call = self._calls.get(block=block)
            except queue.Empty:
                return True
            if call is None:
                return False
            call(self.core)
            block = self.core.idle

    def _step(self) -> None:
        try:
            self.core.step()
        except Exception as error:
            log.exception("a step failed; its requests fail with it")
            self.core.fail_all(_as_cortex_error("the step failed", error))

    def _shut_down(self) -> None:
        with self._lock:
            self._stopping = True
        closed = EngineClosed("the engine was closed before the request could finish")
        self.core.fail_all(closed)
        for handle in list(self._handles.values()):
            handle.fail(closed)
        self.core.release()


_open_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop what is still running before the interpreter tears mlx down under it."""
    for worker in list(_open_workers):
        worker.stop()


def _add(core: EngineCore, requests: Iterable[NewRequest]) -> None:
    for request in requests:
        try:
            core.add(request)
        except Exception as error:
            log.exception("request %d could not be queued", request.id)
            request.handle.fail(_as_cortex_error("the request could not be queued", error))


def _as_cortex_error(what: str, error: Exception) -> CortexError:
    return error if isinstance(error, CortexError) else CortexError(f"{what}: {error}")
