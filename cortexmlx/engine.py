"""Engine: language models in this process. One thread owns mlx; everything here may be called from any thread."""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Unpack

from cortexmlx.cpu import blas
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.host.package import enter_mlx_lm
from cortexmlx.messages import NO_VARIABLES, TemplateVars, checked_vars
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.perplexity import Perplexity, Text, measure, window_size
from cortexmlx.progress import OnProgress
from cortexmlx.request import Completion, Message, QueuedRequest, SamplingParams, TokenEvent
from cortexmlx.serving.app.alone import Alone
from cortexmlx.serving.app.arguments import checked_client, checked_function, checked_text
from cortexmlx.serving.app.asynchronous import AsyncCalls
from cortexmlx.serving.app.callbacks import Tellers, tell_progress
from cortexmlx.serving.app.interruptible import read_within
from cortexmlx.serving.app.keywords import SamplingKeywords, checked_params, with_keywords, with_keywords_each
from cortexmlx.serving.app.looking import Looks
from cortexmlx.serving.app.opening import opens
from cortexmlx.serving.app.texts import Texts
from cortexmlx.serving.completed import AsCompleted, NotYet, paired
from cortexmlx.serving.config import EngineConfig
from cortexmlx.serving.deadlines import check_timeout
from cortexmlx.serving.handle import RequestHandle
from cortexmlx.serving.prompt import ChatTokens, Prompt, is_quick, tokenize
from cortexmlx.serving.streams import TokenStream
from cortexmlx.serving.text.stops import Stops
from cortexmlx.serving.threads import require_mlx_threads
from cortexmlx.serving.worker import Submission, Worker
from cortexmlx.sessions.conversation import Conversation
from cortexmlx.sessions.pin import Pin, beginning
from cortexmlx.stats import ModelInfo

_AHEAD_PER_ROW = 4
"""Requests of a batch that are queued per row: enough to choose from and to keep every row busy."""


class Engine(Looks, Texts, AsyncCalls, Alone):
    """Loads a model and answers requests, many at once, in this process.

    `model` is a folder, a hub id, a `.gguf` file or "smollm2", `adapter` the folder of a LoRA or DoRA adapter for it or
    of fine-tuned layers. `kv_memory` bounds the KV cache (bytes, or a text like "4GB"; None: a modest share of the
    machine). `kv_bits` 8 or 4 quantizes what it holds, with a scale and a bias for every `kv_group_size` numbers (64 or
    32; None: 64 where that divides every head), so that about twice or more fits. `block_size` tokens per block: 8, 16,
    32, 64 or 128. `max_rows` requests run at once. `attention`: "auto", "metal", "reference" or "sim". `prefill_budget`
    tokens of prompts are computed per step at most, and while others decode only as many as take `token_target` seconds
    (None: no target). With `keep_last`, texts may be longer than the model's context and the KV cache: one that has
    grown to `keep_first` (None: 4) + 2 x `keep_last` tokens goes on with the first `keep_first` and the newest
    `keep_last` of them. `max_request_tokens` bounds the prompt and answer of one request, `client_tokens` those of all
    running requests of one client. `prefix_cache` False computes every prompt anew. Prompts of a named client share
    their beginnings only with each other, for whoever shares can tell what others asked from `cached_tokens` and from
    the time it takes; `share_prefixes_between_clients` True shares them among all, for clients that trust each other.
    `pipeline` builds each decode step before the last one is read. `dequantize`: see `load_model`. `kv_store` is a
    folder that keeps at most `kv_store_bytes` of what was computed, for after it has left memory, and for the next
    engine; several may share it. `on_progress` is told how far downloading and loading are.

    The constructor returns when the model is loaded. Raises CortexError: ModelNotFound, ModelCorrupt,
    ModelUnsupported, InvalidRequest, ForkedProcess. Use it as a context manager, or call `close`. An engine that is
    dropped goes on until its last request has ended.
    """

    info: ModelInfo

    def __init__(
        self,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        kv_memory: int | str | None = None,
        kv_bits: int | None = None,
        kv_group_size: int | None = None,
        block_size: int = EngineConfig.block_size,
        max_rows: int = EngineConfig.max_rows,
        attention: str = EngineConfig.attention,
        prefill_budget: int = EngineConfig.prefill_budget,
        max_request_tokens: int | None = None,
        client_tokens: int | None = None,
        token_target: float | None = EngineConfig.token_target,
        keep_first: int | None = None,
        keep_last: int | None = None,
        prefix_cache: bool = True,
        share_prefixes_between_clients: bool = False,
        pipeline: bool = True,
        dequantize: bool | None = None,
        kv_store: str | Path | None = None,
        kv_store_bytes: int | str = EngineConfig.kv_store_bytes,
        on_progress: OnProgress | None = None,
    ) -> None:
        require_mlx_threads()
        config = EngineConfig(
            model,
            adapter=adapter,
            kv_memory=kv_memory,
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            block_size=block_size,
            max_rows=max_rows,
            attention=attention,
            prefill_budget=prefill_budget,
            max_request_tokens=max_request_tokens,
            client_tokens=client_tokens,
            token_target=token_target,
            keep_first=keep_first,
            keep_last=keep_last,
            prefix_cache=prefix_cache,
            share_prefixes_between_clients=share_prefixes_between_clients,
            pipeline=pipeline,
            dequantize=dequantize,
            kv_store=kv_store,
            kv_store_bytes=kv_store_bytes,
            on_progress=on_progress,
        )
        blas.preload()
        enter_mlx_lm()
        self._max_rows = max_rows
        self._tellers = Tellers()
        self._worker = Worker(config)
        self._finalizer = weakref.finalize(self, Worker.stop, self._worker)
        self._finalizer.atexit = False
        try:
            self._worker.start()
            self.info = self._worker.core.info
            self._tokenizer = SharedTokenizer(self._worker.core.loaded.tokenizer)
        except BaseException:  # whose traceback holds this engine, as long as an app keeps it
            self._worker.end()
            raise

    open = classmethod(opens(__init__))
    """The constructor for asyncio: `engine = await Engine.open(...)`, or `async with Engine.open(...) as engine`."""

    # -- asking -------------------------------------------------------------------------------------------------------

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
        handle = self._submit(self._checked(prompt, params, listener, client, background, cache, timeout))
        if on_event is not None:
            try:
                self._tellers.tell(handle, on_event)
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
        handle = self._submit(self._checked(prompt, with_keywords(params, **sampling), cache=cache, timeout=timeout))
        try:
            for event in handle if on_progress is not None else ():
                tell_progress(on_progress, event)
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
        counted = window is None or (isinstance(window, int) and window >= 1)
        _require(counted, f"window is {window!r}, but must be at least 1 prompt or None")
        if sampling:
            params = with_keywords_each(params, **sampling)
        return AsCompleted(
            paired(prompts, params),
            partial(self._checked, background=True, cache=cache, timeout=timeout),
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
        return TokenStream(self._submit(self._checked(prompt, asked, cache=cache, timeout=timeout)))

    def perplexity(
        self,
        text: str | Sequence[int],
        *,
        context: int | None = None,
        stride: int | None = None,
        on_window: Callable[[Perplexity], None] | None = None,
    ) -> Perplexity:
        """How well the model foretells a text or a list of token ids, in windows of `context` tokens (None: 2048, or
        what fits), several at a time. Each token is scored once: those of the first window, then in each the next
        `stride` (None: half of `context`) behind the tokens before them. Every window begins with the
        beginning-of-text token where the tokenizer writes one; else the text's first token is not scored. `on_window`
        is told after each window what is known. Raises InvalidRequest, and what `submit` raises.
        """
        checked_function("on_window", on_window)
        self._worker.check_open()
        core = self._worker.core
        size = window_size(context, core.scheduler.limits.scored(core.cache.capacity_tokens))
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
        asked, client = checked_params(params), checked_client(client)
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
        client = self._checked(tokens, params, client=client).request.client
        number, count = self._worker.ask(lambda core: core.pin(tokens, client))
        pin = Pin(count, lambda: self._worker.ask(lambda core: core.pins.remove(number)))
        try:
            self.submit(tokens[: count + 1], params, client=client).result()
            self._worker.ask(lambda core: core.pins.settle(number))
        except BaseException:
            pin.unpin()
            raise
        return pin

    # -- ending ------------------------------------------------------------------------------------------------------

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

    # -- inside -------------------------------------------------------------------------------------------------------

    def _checked(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        listener: Callable[[TokenEvent], None] | None = None,
        client: str | None = None,
        background: bool = False,
        cache: bool = True,
        timeout: float | None = None,
    ) -> Submission:
        """A request that can run; raises what is wrong with it."""
        params = checked_params(params)
        params.validate(self.info.vocab_size)
        client = checked_client(client)
        checked_function("listener", listener)
        check_timeout(timeout)
        submitted = time.perf_counter()
        self._worker.check_process()
        scheduler = self._worker.core.scheduler
        fits = partial(scheduler.check_prompt, params=params)
        read = partial(tokenize, self._tokenizer, prompt, lambda least: fits(least, at_least=True))
        tokens = read() if is_quick(prompt) else read_within(timeout, read)
        _require(bool(tokens), "the prompt is empty: give it at least one token")
        fits(len(tokens))
        bad = next((t for t in tokens if not 0 <= t < self.info.vocab_size), None)
        _require(bad is None, f"token id {bad} is outside the vocabulary of {self.info.vocab_size} tokens")
        seed = secrets.randbits(62) if params.seed is None else params.seed
        request = QueuedRequest(
            tuple(tokens), params, seed, submitted, client, background, cache=cache, timeout=timeout
        )
        if isinstance(tokens, ChatTokens):
            request = replace(request, thoughts=tokens.thoughts)
        stops = Stops.of(params, self._tokenizer.eos_token_ids, request.thoughts)
        return Submission(request, stops, listener, owner=self)

    def _submit(self, checked: Submission) -> RequestHandle:
        handles: list[RequestHandle] = []
        self._worker.submit([checked], handles)
        return handles[0]


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequest(message)
