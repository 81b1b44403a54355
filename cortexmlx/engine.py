"""Engine: language models in this process. One thread owns mlx; everything here may be called from any thread."""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import secrets
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cortexmlx import blas
from cortexmlx.errors import CortexError, EngineClosed, InvalidRequest
from cortexmlx.handle import RequestHandle
from cortexmlx.kv.sizing import parse_size
from cortexmlx.models.host import enter_mlx_lm
from cortexmlx.request import Completion, Message, SamplingParams, TokenEvent
from cortexmlx.stats import EngineStats, ModelInfo
from cortexmlx.threads import Task

if TYPE_CHECKING:
    from cortexmlx.answers import NewRequest
    from cortexmlx.core import EngineConfig, EngineCore

log = logging.getLogger("cortexmlx")

Prompt = str | Sequence[int] | Sequence[Message]
"""Plain text (encoded as it is), token ids, or chat messages (rendered with the model's chat template)."""


class MemoryPressure(str, Enum):
    """How short of memory the system is; the levels that macOS reports."""

    WARNING = "warning"
    CRITICAL = "critical"


BLOCK_SIZES = (8, 16, 32, 64, 128)


class Engine:
    """Loads a model and answers requests, many at once, in this process.

    `model` is a folder, a hub id, a `.gguf` file or "smollm2". `kv_memory` bounds the KV cache (bytes, or a text like
    "4GB"; None: a modest share of the machine). `block_size` tokens per block: 8, 16, 32, 64 or 128. `max_rows`
    requests run at once. `attention`: "auto", "metal", "reference" or "sim". `prefill_budget` tokens of prompts are
    computed per step at most, and while others decode only as many as take `token_target` seconds (None: no target).
    `max_request_tokens` bounds the prompt and answer of one request, `client_tokens` those of all running requests of
    one client. `prefix_cache` False computes every prompt anew. `pipeline` builds each decode step before the last
    one is read. `dequantize`: see `load_model`. `on_progress(what, fraction)` reports loading.

    The constructor returns when the model is loaded. Raises CortexError: ModelNotFound, ModelCorrupt,
    ModelUnsupported, InvalidRequest. Use it as a context manager, or call `close`.
    """

    info: ModelInfo

    def __init__(
        self,
        model: str | Path,
        *,
        kv_memory: int | str | None = None,
        block_size: int = 32,
        max_rows: int = 16,
        attention: str = "auto",
        prefill_budget: int = 512,
        max_request_tokens: int | None = None,
        client_tokens: int | None = None,
        token_target: float | None = 0.25,
        prefix_cache: bool = True,
        pipeline: bool = True,
        dequantize: bool | None = None,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> None:
        _require(block_size in BLOCK_SIZES, f"block_size is {block_size!r}, but must be one of {BLOCK_SIZES}")
        _require(isinstance(max_rows, int) and max_rows >= 1, f"max_rows is {max_rows!r}, but must be at least 1")
        _require(
            isinstance(prefill_budget, int) and prefill_budget >= 1,
            f"prefill_budget is {prefill_budget!r}, but must be at least 1 token",
        )
        for name, value in (("max_request_tokens", max_request_tokens), ("client_tokens", client_tokens)):
            _require(value is None or value >= 2, f"{name} is {value!r}, but must be at least 2 tokens or None")
        _require(
            token_target is None or token_target > 0, f"token_target is {token_target!r} s, but must be more than 0"
        )
        memory = None if kv_memory is None else parse_size(kv_memory)
        blas.preload()
        enter_mlx_lm()
        from cortexmlx.core import EngineConfig

        config = EngineConfig(
            model=str(model),
            kv_memory=memory,
            block_size=block_size,
            max_rows=max_rows,
            attention=attention,
            prefill_budget=prefill_budget,
            max_request_tokens=max_request_tokens,
            client_tokens=client_tokens,
            token_target=token_target,
            prefix_cache=prefix_cache,
            pipeline=pipeline,
            dequantize=dequantize,
            on_progress=on_progress,
        )
        self._worker = _Worker(config)
        self._finalizer = weakref.finalize(self, _Worker.stop, self._worker)
        self._finalizer.atexit = False
        _open_workers.add(self._worker)
        self._worker.start()
        self.info = self._worker.core.info
        self._tokenizer = self._worker.core.loaded.tokenizer
        self._tokenizing = threading.Lock()

    # -- asking -------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_event: Callable[[TokenEvent], None] | None = None,
        client: str | None = None,
    ) -> RequestHandle:
        """Queue a request and return at once. `on_event` is called for every event, on a thread of its own. Requests
        of one `client` share what `client_tokens` allows.

        Raises InvalidRequest, PromptTooLong or EngineClosed.
        """
        handle = self._submit(prompt, params, None, client)
        if on_event is not None:
            threading.Thread(target=_deliver, args=(handle, on_event), name="cortexmlx-events", daemon=True).start()
        return handle

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """The whole answer to one prompt. An interrupt cancels the request. Raises what `submit` raises."""
        return self._wait([self._submit(prompt, params, None)])[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """The answers to many prompts, computed together, in the order of the prompts. Raises the first error."""
        every = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        _require(len(every) == len(prompts), f"{len(prompts)} prompts need {len(prompts)} params, not {len(every)}")
        handles: list[RequestHandle] = []
        try:
            for prompt, p in zip(prompts, every, strict=True):
                handles.append(self._submit(prompt, p, None))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return self._wait(handles)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """The answer as it comes. The last event carries the completion; closing the iterator early cancels the
        request.
        """
        return self._events(self._submit(prompt, params, None))

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[TokenEvent]:
        """`stream` for asyncio."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[TokenEvent | None] = asyncio.Queue()

        def listen(event: TokenEvent | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(arrived.put_nowait, event)

        handle = self._submit(prompt, params, listen)
        try:
            while True:
                event = await arrived.get()
                if event is None:
                    handle.result(0)
                    return
                yield event
                if event.completion is not None:
                    return
        finally:
            handle.cancel()

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text as it is, messages through the chat template. Raises InvalidRequest."""
        with self._tokenizing:
            return _tokenize(self._tokenizer, prompt)

    # -- looking and ending -------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment. Raises EngineClosed."""
        stats: EngineStats = self._worker.ask(lambda core: core.stats())
        return stats

    def on_memory_pressure(self, level: MemoryPressure | str) -> None:
        """Give memory back before the system takes it: "warning" drops half of the unused prefix cache, "critical"
        all of it, the arena's free end and MLX's own buffers. Running requests go on. Raises InvalidRequest or
        EngineClosed.
        """
        try:
            critical = MemoryPressure(level) is MemoryPressure.CRITICAL
        except ValueError:
            raise InvalidRequest(f'level is {level!r}, but must be "warning" or "critical"') from None
        self._worker.ask(lambda core: core.relieve(critical))

    def close(self) -> None:
        """Stop the engine: requests in flight fail with EngineClosed, memory is given back. Safe to call again."""
        self._finalizer.detach()
        self._worker.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        listener: Callable[[TokenEvent | None], None] | None,
        client: str | None = None,
    ) -> RequestHandle:
        params = params or SamplingParams()
        params.validate(self.info.vocab_size)
        submitted = time.perf_counter()
        tokens = self.tokenize(prompt)
        _require(bool(tokens), "the prompt is empty: give it at least one token")
        bad = next((t for t in tokens if not 0 <= t < self.info.vocab_size), None)
        _require(bad is None, f"token id {bad} is outside the vocabulary of {self.info.vocab_size} tokens")
        self._worker.core.scheduler.check_prompt(len(tokens))
        return self._worker.submit(tuple(tokens), params, submitted, listener, client)

    def _events(self, handle: RequestHandle) -> Iterator[TokenEvent]:
        """The handle's events. While they are read the engine lives, whoever else drops it."""
        try:
            yield from handle
        finally:
            handle.cancel()

    @staticmethod
    def _wait(handles: Sequence[RequestHandle]) -> list[Completion]:
        try:
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise


class _Worker:
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

    def submit(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        submitted: float,
        listener: Callable[[TokenEvent | None], None] | None,
        client: str | None,
    ) -> RequestHandle:
        from cortexmlx.answers import NewRequest

        with self._lock:
            self._check_open()
            self._requests += 1
            handle = RequestHandle(self._requests, self.cancel, listener)
            self._handles[handle.id] = handle
            seed = secrets.randbits(62) if params.seed is None else params.seed
            request = NewRequest(handle.id, prompt, params, seed, submitted, handle, client)
            self._calls.put(lambda core: _add(core, request))
        return handle

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
            from cortexmlx.core import EngineCore

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
        if block and self._calls.empty():
            self.core.tidy()
        while True:
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


_open_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop what is still running before the interpreter tears mlx down under it."""
    for worker in list(_open_workers):
        worker.stop()


def _add(core: EngineCore, request: NewRequest) -> None:
    try:
        core.add(request)
    except Exception as error:
        log.exception("request %d could not be queued", request.id)
        request.handle.fail(_as_cortex_error("the request could not be queued", error))


def _as_cortex_error(what: str, error: Exception) -> CortexError:
    return error if isinstance(error, CortexError) else CortexError(f"{what}: {error}")


def _deliver(handle: RequestHandle, on_event: Callable[[TokenEvent], None]) -> None:
    try:
        for event in handle:
            on_event(event)
    except CortexError as error:
        log.warning("request %d failed: %s", handle.id, error)
    except Exception:
        log.exception("on_event raised, so it is not told of the rest of request %d", handle.id)


_PROMPT_KINDS = "a prompt is a text, a list of token ids or a list of messages"


def _tokenize(tokenizer: Any, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError:
            prompt = prompt.encode("utf-8", "replace").decode("utf-8")
        bos = tokenizer.bos_token
        return list(tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos)))
    listed = isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray, Mapping))
    _require(listed, _PROMPT_KINDS)
    items: list[Any] = list(prompt)
    if all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
        return [int(item) for item in items]
    _require(all(isinstance(item, Mapping) for item in items), _PROMPT_KINDS)
    try:
        return list(tokenizer.apply_chat_template(items, add_generation_prompt=True))
    except CortexError:
        raise
    except Exception as error:
        raise InvalidRequest(f"the chat template cannot render these messages: {error}") from error


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequest(message)
