"""Engine: language models in this process. One thread owns mlx; everything here may be called from any thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from cortexmlx.cpu import blas
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.host.package import enter_mlx_lm
from cortexmlx.messages import NO_VARIABLES, TemplateVars, checked_vars
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.perplexity import Perplexity, Text, measure, window_size
from cortexmlx.progress import OnProgress
from cortexmlx.request import Completion, Message, TokenEvent
from cortexmlx.sampling_params import SamplingParams
from cortexmlx.serving.app.arguments import (
    checked_client,
    checked_function,
    checked_pressure,
    checked_text,
    checked_token,
    checked_tokens,
)
from cortexmlx.serving.app.callbacks import CallbackThreads, report_progress
from cortexmlx.serving.app.event_loop import on_a_thread, opens
from cortexmlx.serving.app.keywords import SamplingKeywords, takes_options_of, with_keywords, with_keywords_each
from cortexmlx.serving.app.submitter import Submitter
from cortexmlx.serving.as_completed import AsCompleted, NotYet, paired
from cortexmlx.serving.config import EngineConfig
from cortexmlx.serving.deadlines import check_timeout
from cortexmlx.serving.handle import NotCopyable, RequestHandle
from cortexmlx.serving.prompt import Prompt, tokenize
from cortexmlx.serving.streams import AsyncTokenStream, TokenStream, completion_of
from cortexmlx.serving.threads import require_mlx_threads
from cortexmlx.serving.worker import Worker
from cortexmlx.sessions.conversation import Conversation
from cortexmlx.sessions.pin import Pin, beginning
from cortexmlx.stats import BlockMap, EngineStats, MemoryPressure, ModelInfo

if TYPE_CHECKING:
    from cortexmlx.serving.core import EngineCore

T = TypeVar("T")

_AHEAD_PER_ROW = 4
"""Requests of a batch that are queued per row."""


class Engine(NotCopyable):
    """Loads a model and answers requests, many at once, in this process.

    The options are those of `serving.config.EngineConfig`, which says what each means. The constructor returns when
    the model is loaded. Use the engine as a context manager, or call `close`. An engine that is dropped goes on until
    its last request has ended.

    Raises ModelNotFound, ModelCorrupt, ModelUnsupported, InvalidRequest or ForkedProcess.
    """

    info: ModelInfo

    @takes_options_of(EngineConfig)
    def __init__(self, *model: Any, **options: Any) -> None:
        require_mlx_threads()
        config = EngineConfig(*model, **options)
        blas.preload()
        enter_mlx_lm()
        self._max_rows = config.max_rows
        self._callbacks = CallbackThreads()
        self._worker = Worker(config)
        self._finalizer = weakref.finalize(self, Worker.stop, self._worker)
        self._finalizer.atexit = False
        try:
            self._worker.start()
            self.info = self._worker.core.info
            self._tokenizer = SharedTokenizer(self._worker.core.loaded.tokenizer)
            self._submitter = Submitter(self._worker, self._tokenizer, self.info.vocab_size)
        except BaseException:  # whose traceback holds this engine, as long as an app keeps it
            self._worker.end()
            raise

    open = classmethod(opens(__init__))
    """The constructor for asyncio: `engine = await Engine.open(...)`, or `async with Engine.open(...) as engine`."""

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_event: Callable[[TokenEvent], None] | None = None,
        listener: Callable[[TokenEvent], None] | None = None,
        client: str | None = None,
        background: bool = False,
        cache: bool = True,
        timeout: float | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> RequestHandle:
        """Queue a request and return at once; only where 64 others are not queued yet, wait until one is. `on_event`
        is called for every event, on other threads, `listener` on the engine's, which waits for it; the last
        event has a `completion` or an `error`. Requests of one `client` share its turns, what `client_tokens` allows,
        and the beginnings of their prompts; those without a name are one client's. Nobody watches the tokens of a
        `background` one come: others' prompts are computed in large pieces beside it, others of its client go first for
        up to a minute, and of the background ones those with the longest `max_tokens` begin first. `cache` False keeps
        the request out of the prefix cache: its whole prompt is computed, and nothing of it is left for others. A
        request that has not ended `timeout` seconds after this call fails with RequestTimeout, between two steps.
        Sampling parameters may be given by their names, too: those go over `params`.

        Raises InvalidRequest, PromptTooLong or EngineClosed.
        """
        params = with_keywords(params, **sampling)
        checked_function("on_event", on_event)
        handle = self._submitter.submit(
            self, prompt, params, listener, client=client, background=background, cache=cache, timeout=timeout
        )
        if on_event is not None:
            try:
                self._callbacks.subscribe(handle, on_event)
            except BaseException:  # nobody else has the handle
                handle.cancel()
                raise
        return handle

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: bool = True,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Completion:
        """The whole answer to one prompt. An interrupt cancels the request, and so does `on_progress` if it raises: it
        is told on this thread how far a prompt is that takes several steps. The rest as for `submit`.
        """
        checked_function("on_progress", on_progress)
        asked = with_keywords(params, **sampling)
        handle = self._submitter.submit(self, prompt, asked, cache=cache, timeout=timeout)
        try:
            for event in handle if on_progress is not None else ():
                report_progress(on_progress, event)
            return handle.result()
        except BaseException:
            handle.cancel()
            raise

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Completion]:
        """The answers to many prompts, computed together, in the order of the prompts. Raises the first error, and
        cancels the others then. Four requests per row are queued ahead, so that others need not wait for all of them.
        """
        answers: dict[int, Completion] = {}
        with closing(self.as_completed(prompts, params, **sampling)) as completed:
            for index, result in completed:
                if isinstance(result, CortexError):
                    raise result
                answers[index] = result
        return [answers[index] for index in sorted(answers)]

    def as_completed(
        self,
        prompts: Iterable[Prompt | NotYet],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        window: int | None = None,
        cache: bool = True,
        timeout: float | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> AsCompleted:
        """The answers to many prompts as they finish: an iterator of (index of the prompt, its Completion or the
        CortexError that ended it). An error of one prompt leaves the others alone.

        `prompts` may be any iterator, without end too: at most four prompts per row are read and not handed out, and
        with `window` none that lies so many behind the oldest unfinished one, which bounds what must be kept to put
        the answers in order. Closing or dropping the iterator cancels the rest, and so does whatever it raises:
        EngineClosed, InvalidRequest if there are not as many `params` as prompts, an error of the prompts' iterator.
        `cache` and `timeout`, which is each prompt's own, as for `submit`.
        """
        check_timeout(timeout)
        if window is not None and not (isinstance(window, int) and window >= 1):
            raise InvalidRequest(f"window is {window!r}, but must be at least 1 prompt or None")
        if sampling:
            params = with_keywords_each(params, **sampling)
        return AsCompleted(
            paired(prompts, params),
            partial(self._submitter.read, self, background=True, cache=cache, timeout=timeout),
            self._worker.submit,
            ahead=_AHEAD_PER_ROW * self._max_rows,
            window=window,
            together=isinstance(prompts, Sequence),
        )

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: bool = True,
        timeout: float | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> TokenStream:
        """The answer as it comes. The last event carries the completion; closing or dropping the iterator early
        cancels the request. The rest as for `submit`.
        """
        asked = with_keywords(params, **sampling)
        return TokenStream(self._submitter.submit(self, prompt, asked, cache=cache, timeout=timeout))

    def perplexity(
        self,
        text: str | Sequence[int],
        *,
        context: int | None = None,
        stride: int | None = None,
        on_window: Callable[[Perplexity], None] | None = None,
    ) -> Perplexity:
        """How well the model predicts a text or a list of token ids, in windows of `context` tokens (None: 2048, or
        what fits), several at a time. Each token is scored once: those of the first window, then in each the next
        `stride` (None: half of `context`) behind the tokens before them. Every window begins with the
        beginning-of-text token where the tokenizer writes one; else the text's first token is not scored. `on_window`
        is told after each window what is known. Raises InvalidRequest, and what `submit` raises.
        """
        checked_function("on_window", on_window)
        self._worker.check_open()
        core = self._worker.core
        size = window_size(context, core.scheduler.limits.scored(core.cache.tables.capacity_tokens))
        complete = partial(self.as_completed, cache=False)
        return measure(Text.read(text, self._tokenizer), complete, size, stride, on_window)

    def conversation(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        params: SamplingParams | None = None,
        template_vars: TemplateVars = NO_VARIABLES,
        client: str | None = None,
    ) -> Conversation:
        """A conversation that begins with these messages: turns that are remembered, undone, forked and saved, each of
        which computes only what is new. `params` and `client` are those of its requests, `template_vars` the chat
        template's. Raises InvalidRequest.
        """
        system = checked_text("system", system)
        asked, client = with_keywords(params), checked_client(client)
        talk = Conversation(self, self._tokenizer, system=system, messages=messages, params=asked, client=client)
        talk.template_vars = checked_vars(template_vars)
        return talk

    def pin(self, prefix: Prompt, *, client: str | None = None) -> Pin:
        """Keep what prompts begin with: a text, tokens, or messages that others follow. It is computed now if it is not
        cached, and its whole blocks go last when memory is needed: after all that is only cached, but before a running
        request gives up anything and before one is refused. Pins of all clients have half of the KV memory at most.

        Raises PinRefused with the numbers, InvalidRequest if less than a block is to be pinned, and what `submit`
        raises.
        """
        tokens, params = beginning(self._tokenizer, prefix), SamplingParams(max_tokens=1)
        client = self._submitter.read(self, tokens, params, client=client).request.client
        number, count = self._worker.ask(lambda core: core.pin(tokens, client))
        pin = Pin(count, lambda: self._worker.ask(lambda core: core.pins.remove(number)))
        try:
            self.submit(tokens[: count + 1], params, client=client).result()
            self._worker.ask(lambda core: core.pins.settle(number))
        except BaseException:
            pin.unpin()
            raise
        return pin

    # -- for asyncio: from any event loop, of any thread ---------------------------------------------------------------

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: bool = True,
        timeout: float | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> AsyncTokenStream:
        """`stream` for asyncio. The request is submitted with the first `anext`, which raises what `submit` raises."""
        asked = with_keywords(params, **sampling)
        return AsyncTokenStream(partial(self._submitter.asubmit, self, prompt, asked, cache, timeout))

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: bool = True,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Completion:
        """`generate` for asyncio. A cancelled task cancels the request; `on_progress` is told in it."""
        params = with_keywords(params, **sampling)
        checked_function("on_progress", on_progress)
        if on_progress is None:
            return await completion_of(partial(self._submitter.asubmit, self, prompt, params, cache, timeout))
        done: Completion | None = None
        async with self.astream(prompt, params, cache=cache, timeout=timeout) as events:
            async for event in events:
                done = event.completion
                report_progress(on_progress, event)
        assert done is not None  # the last event has it
        return done

    async def aclose(self) -> None:
        """`close` for asyncio. A cancelled task does not wait for the end, which comes all the same."""
        await on_a_thread(self.close)

    # -- texts and tokens: also on a closed engine; ForkedProcess in a forked child ------------------------------------

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text as it is, messages through the chat template. Raises InvalidRequest."""
        self._worker.check_process()
        return list(tokenize(self._tokenizer, prompt))

    def count_tokens(self, prompt: Prompt) -> int:
        """How many tokens a prompt has: what `usage.prompt_tokens` of its answer will say. Raises InvalidRequest."""
        return len(self.encode(prompt))

    def decode(self, tokens: Iterable[int], *, special_tokens: bool = False) -> str:
        """The text of token ids. What the tokenizer calls special, such as the beginnings and ends of turns, is left
        out unless `special_tokens`. Raises InvalidRequest for what is no token of the model.
        """
        self._worker.check_process()
        ids = checked_tokens(tokens, self.info.vocab_size)
        return self._tokenizer.decode(ids, special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for by itself, as UTF-8, which may be a part of a character; none for what is no token of
        the model. Raises InvalidRequest for what is no integer.
        """
        self._worker.check_process()
        return self._tokenizer.token_bytes(checked_token(token))

    # -- looking inside: on the engine's thread, between two steps -----------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment. Raises EngineClosed."""
        return self._worker.ask(lambda core: core.stats())

    def blocks(self) -> BlockMap:
        """The owner of every block of the KV arena. Cheap enough to ask a few times a second. Raises EngineClosed."""
        return self._worker.ask(lambda core: core.cache.pools.block_map())

    def inspect(self, look: Callable[[EngineCore], T]) -> T:
        """What `look(core)` returns, called on the engine's thread between two steps: for measuring and debugging.
        Requests that are submitted meanwhile begin together. What is in the core may change with every version.
        Raises what `look` raises, and EngineClosed.
        """
        return self._worker.ask(look, any_error=True)

    @property
    def longest_request(self) -> int:
        """Tokens that a prompt and its answer may have: in the context, `max_request_tokens` and the KV memory. With
        `keep_last`, whose rows go on beyond context and memory, as many as can be counted or `max_request_tokens`.
        """
        scheduler = self._worker.core.scheduler
        return scheduler.limits.room(0, scheduler.cache.tables.capacity_tokens)

    def check_invariants(self) -> None:
        """Raise AssertionError if the engine's requests and blocks do not fit together: for tests and when in doubt.
        Takes a time that grows with the arena. Raises EngineClosed.
        """
        self._worker.ask(lambda core: core.check_invariants())

    def on_memory_pressure(self, level: MemoryPressure | str) -> None:
        """Give memory back before the system takes it: "warning" drops half of the unused prefix cache, "critical"
        all of it, the arena's free end and MLX's own buffers. Running requests go on. Raises InvalidRequest or
        EngineClosed.
        """
        asked = checked_pressure(level)
        self._worker.ask(lambda core: core.relieve(critical=asked is MemoryPressure.CRITICAL))

    def close(self) -> None:
        """Stop the engine: requests in flight fail with EngineClosed, memory is given back. Safe to call again."""
        self._worker.stop()
        self._finalizer.detach()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        known = f" {self.info.name}" if hasattr(self, "info") else ""
        return f"<{type(self).__name__}{known}{'' if known and not self._worker.closed else ', closed'}>"
