"""Worker: the engine's thread, which owns mlx. Between two steps it carries out calls of other threads."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, TypeVar

from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.text import StopConditions
from cortexmlx.core.threads import MlxTask, forked_process_error, require_mlx_threads
from cortexmlx.errors import CortexError, EngineClosed, OutOfMemory, with_causes
from cortexmlx.system.machine import is_memory_refusal
from cortexmlx.system.waits import take_next
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import QueuedRequest, RequestId, TokenEvent

if TYPE_CHECKING:
    from cortexmlx.core.config import EngineConfig
    from cortexmlx.core.core import EngineCore
    from cortexmlx.core.prompt_history import PromptTrace
    from cortexmlx.structured.matcher import Grammar

log = logging.getLogger("cortexmlx")

T = TypeVar("T")

_Answer = queue.SimpleQueue[tuple[Any, BaseException | None]]

_CALLS_SHARE = 0.05
"""The share of a step's time that calls of other threads get before the next step."""

_CALLS_SECONDS = 0.0002
"""Seconds that these calls get at least."""

_TOGETHER_SECONDS = 0.05
"""Seconds for which an idle engine collects calls before its first step, so that prompts that come together share that
step. All calls that are already queued are taken.
"""

_AHEAD = 64
"""How many submissions may wait for the engine's thread. A further one waits until one of them is taken."""


@dataclass(frozen=True)
class Submission:
    """A request that is ready to be queued, and has no handle yet. Its answers end at `stops` and follow `grammar`.
    `listener` is that of `Engine.submit`. `owner` is kept alive until the request has ended. `trace` makes
    the prompt's cache report (None: no report).
    """

    request: QueuedRequest
    stops: StopConditions
    listener: Callable[[TokenEvent], None] | None = None
    owner: object = None
    grammar: Grammar | None = None
    trace: PromptTrace | None = None


class Worker:
    """The engine's thread, and the queue of calls that other threads make to it."""

    def __init__(self, config: EngineConfig) -> None:
        self.core: EngineCore
        self._config = replace(config, on_progress=self._report)
        self._on_progress = config.on_progress
        self._calls: queue.SimpleQueue[Callable[[EngineCore], None] | None] = queue.SimpleQueue()
        self._load_signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._loaded = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._permits = _make_permits()
        self._step_seconds = 0.0
        self._pending_answers: set[_Answer] = set()
        self._stopping = self._closing = False
        self._forked = False
        self._requests = 0
        self._handles: weakref.WeakValueDictionary[RequestId, RequestHandle] = weakref.WeakValueDictionary()
        self._task = MlxTask(self._run)

    def start(self) -> None:
        """Start the thread and wait until the model is loaded. Raises the error of loading."""
        require_mlx_threads()
        _workers.add(self)
        self._task.start()
        take_next(self._load_signals)
        if self._error is not None:
            self._task.join()
            raise self._error

    def submit(self, submissions: Iterable[Submission], handles: list[RequestHandle]) -> None:
        """Queue requests and append their handles to `handles`. The requests of one call reach the scheduler together,
        so that their prompts share the first step.

        Waits while too many submissions are queued: a loop of submissions would take the interpreter from the engine's
        thread, and delay every cancel.
        """
        uses_permit = not self._task.is_current_thread()  # which would wait for itself
        try:
            if uses_permit:
                take_next(self._permits)
            self._queue_requests(submissions, handles, uses_permit)
        except BaseException:
            if uses_permit:
                self._return_permit()  # an engine that is closed wakes all who wait, one after the other
            raise

    def _return_permit(self) -> None:
        """Let one more caller submit. Keep at most `_AHEAD` permits: an interrupted thread may return one too many."""
        if self._permits.qsize() < _AHEAD:
            self._permits.put(None)

    def _queue_requests(
        self, submissions: Iterable[Submission], handles: list[RequestHandle], uses_permit: bool
    ) -> None:
        """Make handles for the submissions, and queue a call that adds their requests to the core."""
        with self._lock:
            self.check_open()
            queued_requests = []
            for submission in submissions:
                self._requests += 1
                number = RequestId(self._requests)
                handle = RequestHandle(
                    number, self.cancel, submission.listener, submission.owner, self.check_not_own_thread
                )
                handle.trace = submission.trace
                self._handles[number] = handle
                handles.append(handle)
                queued_requests.append((submission, handle))
            self._calls.put(lambda core: self._add_requests(core, queued_requests, uses_permit))

    @property
    def would_wait(self) -> bool:
        """Whether `submit` would wait now, because too many submissions are queued."""
        return self._permits.empty()

    @property
    def _is_awaited(self) -> bool:
        """Whether a caller already waits: for an answer, or for the engine's end."""
        return self._stopping or self._requests > 0

    def cancel(self, request: RequestId) -> None:
        """Have the engine's thread cancel a request, without waiting."""
        self._calls.put(lambda core: core.cancel(request))

    def ask(
        self,
        question: Callable[[EngineCore], T],
        *,
        any_error: bool = False,
    ) -> T:
        """Run `question(core)` on the engine's thread between two steps, and return its result. Raises what it raises,
        and CortexError on the engine's own thread. With `any_error`, even a SystemExit only reaches the caller.
        """
        self.check_not_own_thread()
        answer: _Answer = queue.SimpleQueue()
        error_class = BaseException if any_error else Exception

        def answer_question(core: EngineCore) -> None:
            try:
                answer.put((question(core), None))
            except error_class as error:
                answer.put((None, error))

        try:
            with self._lock:
                self.check_open()
                self._pending_answers.add(answer)
                self._calls.put(answer_question)
            value: T
            value, error = take_next(answer)
        finally:
            self._pending_answers.discard(answer)
        if error is not None:
            raise error
        return value

    def stop(self) -> None:
        """End the thread and wait for it, unless this is the engine's own thread. Safe to call again, from any thread.

        It takes no lock: a dropped engine is collected wherever Python collects garbage, also while the lock is held.
        The thread notifies callers who submit meanwhile, at its end.
        """
        self.request_stop()
        if self._task.running and not self._task.is_current_thread():
            self._task.join()

    def request_stop(self) -> None:
        """Ask the thread to end, without waiting. Safe to call again, from any thread."""
        self._stopping = True
        self._calls.put(None)

    @property
    def closed(self) -> bool:
        """Whether the engine takes no more requests."""
        return self._stopping or self._closing

    def check_open(self) -> None:
        """Raise EngineClosed if the engine takes no more requests."""
        self.check_process()
        if self._stopping:
            raise EngineClosed("the engine is closed: make a new one")

    def check_not_own_thread(self) -> None:
        """Raise CortexError on the engine's own thread, which would wait for itself."""
        if self._task.is_current_thread():
            raise CortexError(
                "the engine's own thread cannot ask the engine, which would wait for itself: listeners and logits "
                "processors run there, so ask from another thread, or use on_event"
            )

    def check_process(self) -> None:
        """Raise ForkedProcess in a forked child of the process that made the engine."""
        if self._forked:
            raise forked_process_error()

    def abandon(self) -> None:
        """Close the engine in a forked child, which does not have its thread. Other threads may have held the locks."""
        self._lock = threading.Lock()
        self._calls = queue.SimpleQueue()
        self._permits = _make_permits()
        self._forked = self._stopping = True
        self._task.abandon()
        for handle in list(self._handles.values()):
            handle.abandon(forked_process_error())

    def _run(self, previous_error: BaseException | None) -> None:
        """Run the engine from loading to closing. Called again with an exception that ends it early (see `threads`)."""
        if not self._closing:
            self._serve(previous_error)
        self._shut_down()

    def _serve(self, previous_error: BaseException | None) -> None:
        """Load the model or recover, then carry out calls and steps until the engine is closed."""
        if not self._loaded:
            self._load(previous_error)
        elif previous_error is not None:
            self._recover(previous_error)
        self._load_signals.put(None)
        while not self._closing and self._take_calls():
            self._step()
        self._closing = True

    def _load(self, previous_error: BaseException | None) -> None:
        """Load the model. An error is kept for `start`, which raises it."""
        try:
            if previous_error is not None:
                raise previous_error
            from cortexmlx.core.core import EngineCore

            self.core = EngineCore(self._config, lambda call: self._calls.put(call), lambda: self._is_awaited)
            self._loaded = True
        except BaseException as error:
            _clear_frames(error)
            memory_error = next((e for e in (error, error.__cause__) if e is not None and is_memory_refusal(e)), None)
            self._error = (
                error
                if memory_error is None or isinstance(memory_error, CortexError)
                else _out_of_memory_error(memory_error)
            )
            self._closing = True

    def _report(self, progress: Progress) -> None:
        """Pass on the progress of loading. Raises EngineClosed if the engine was closed meanwhile."""
        if self._stopping:
            raise EngineClosed("the engine was closed while its model was loaded")
        if self._on_progress is not None:
            self._on_progress(progress)

    def _recover(self, previous_error: BaseException) -> None:
        """Reset the core after an exception anywhere; close the engine if it cannot. Waiting callers get an error."""
        log.error("the engine's thread was interrupted; all requests fail with it", exc_info=previous_error)
        _clear_frames(previous_error)
        failure = CortexError(f"the engine's thread was interrupted by {previous_error!r}: ask again")
        try:
            self.core.reset()
        except Exception as error:
            log.exception("the engine cannot begin anew, and closes")
            self._closing = True
            kind = OutOfMemory if is_memory_refusal(error) else EngineClosed
            failure = kind(
                f"the engine's thread was interrupted by {previous_error!r}; it cannot begin anew, and closes: {error}"
            )
        self._fail_all(failure)
        self._return_permit()  # it may have been interrupted before it gave one back
        if self._stopping:
            self._calls.put(None)

    def _fail_all(self, error: CortexError) -> None:
        """Fail every request and every waiting `ask`, also queued ones."""
        with self._lock:
            handles, pending_answers = list(self._handles.values()), list(self._pending_answers)
        for handle in handles:
            handle.fail(error)
        for answer in pending_answers:
            answer.put((None, error))

    def _take_calls(self) -> bool:
        """Carry out queued calls, for as long as the next step may wait. If the core is idle, wait for a call and carry
        it out with all queued ones, or wait until a request times out. Return False if the engine is to stop.
        """
        wait = max(_CALLS_SECONDS, _CALLS_SHARE * self._step_seconds)
        deadline, remaining_calls = time.perf_counter() + wait, 0
        while (idle := self.core.idle) or remaining_calls or time.perf_counter() < deadline:
            has_more_work = idle and self._calls.empty() and self.core.tidy()
            try:
                call = self._calls.get(
                    block=idle and not has_more_work, timeout=self.core.seconds_to_deadline if idle else None
                )
            except queue.Empty:
                if has_more_work:
                    continue
                return True
            if call is None:
                return False
            if idle:
                deadline = time.perf_counter() + max(wait, _TOGETHER_SECONDS)
                remaining_calls = self._calls.qsize()
            else:
                remaining_calls = max(0, remaining_calls - 1)
            call(self.core)
        return True

    def _add_requests(
        self, core: EngineCore, queued_requests: Iterable[tuple[Submission, RequestHandle]], uses_permit: bool
    ) -> None:
        """Add submitted requests to the core. If adding one raises, that request fails."""
        if uses_permit:
            self._return_permit()
        for submission, handle in queued_requests:
            if handle.ended:
                continue
            try:
                core.add(submission.request, handle, submission.stops, submission.grammar)
            except Exception as error:
                log.exception("request %d could not be queued", handle.id)
                handle.fail(_as_cortex_error("the request could not be queued", error))
                _clear_frames(error)

    def _step(self) -> None:
        """Do one step of the core. If it raises, all requests fail."""
        start_time = time.perf_counter()
        try:
            self.core.step()
        except Exception as error:
            log.exception("a step failed; all requests fail with it")
            self.core.fail_all(_as_cortex_error("the step failed", error))
            _clear_frames(error)
        self._step_seconds = time.perf_counter() - start_time

    def _shut_down(self) -> None:
        """Fail what is left, and release the core."""
        with self._lock:
            self._stopping = True
        self._return_permit()
        self._load_signals.put(None)
        self._fail_all(EngineClosed("the engine was closed before the request could finish"))
        if hasattr(self, "core"):
            self.core.release()


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def stop_all() -> None:
    """Stop all engines at the end of the program, before the interpreter destroys mlx."""
    for worker in list(_workers):
        worker.stop()


def _abandon_after_fork() -> None:
    """Close all engines in a forked child."""
    for worker in list(_workers):
        worker.abandon()


os.register_at_fork(after_in_child=_abandon_after_fork)


def _make_permits() -> queue.SimpleQueue[None]:
    """Return a semaphore of `_AHEAD` permits: a queue, since an exception could leave Python's own locked."""
    permits: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(_AHEAD):
        permits.put(None)
    return permits


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and its causes: they hold the model and arrays, and an app may keep the error."""
    for each in with_causes(error):
        clear_frames(each.__traceback__)


def _out_of_memory_error(memory_error: BaseException) -> OutOfMemory:
    """Return the error for memory that was refused while the model was loaded."""
    return OutOfMemory(
        f"memory was refused while the model was loaded ({memory_error or type(memory_error).__name__}): free memory, "
        "or choose a smaller model or KV memory (--kv-memory)"
    )


def _as_cortex_error(summary: str, error: Exception) -> CortexError:
    """Return the error itself if it is a CortexError, otherwise a CortexError with its message."""
    return error if isinstance(error, CortexError) else CortexError(f"{summary}: {error}")
