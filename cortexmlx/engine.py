"""Engine: language models in this process. One thread owns mlx. Any thread may call everything here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from cortexmlx.core import arguments
from cortexmlx.core.arguments import (
    MAX_NAME_CHARACTERS,
    SamplingKeywords,
    is_adapter_name,
    takes_options_of,
    with_keywords,
    with_keywords_each,
)
from cortexmlx.core.as_completed import AsCompleted, PendingPrompt, pair_with_params
from cortexmlx.core.blocking_calls import make_async_open, run_on_thread, warn_if_blocking
from cortexmlx.core.callbacks import CallbackThreads, report_progress
from cortexmlx.core.config import EngineConfig, is_count
from cortexmlx.core.deadlines import checked_timeout
from cortexmlx.core.embedding import Embedder
from cortexmlx.core.handle import NotCopyable, RequestHandle
from cortexmlx.core.prompt import Prompt, tokenize
from cortexmlx.core.prompt_history import PromptHistory
from cortexmlx.core.streams import AsyncTokenStream, TokenStream, wait_for_completion
from cortexmlx.core.submitter import RequestOptions, Submitter
from cortexmlx.core.threads import require_mlx_threads
from cortexmlx.core.worker import Worker
from cortexmlx.cpu import blas
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.mlx_lm.package import enter_mlx_lm
from cortexmlx.models.adapters.low_rank import AdapterInfo, read_low_rank_adapter
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.perplexity import Perplexity, TokenizedText, choose_window_size, measure_perplexity
from cortexmlx.sessions.conversation import Conversation
from cortexmlx.sessions.pin import Pin, import_file, pin_prompt, prefix_tokens
from cortexmlx.stats import BlockMap, EngineStats, MemoryPressure, ModelInfo
from cortexmlx.types.cache_report import CacheReport
from cortexmlx.types.embeddings import Embeddings, Reranking
from cortexmlx.types.messages import NO_VARIABLES, TemplateVars, checked_vars
from cortexmlx.types.progress import OnProgress
from cortexmlx.types.request import Completion, Message, TokenEvent
from cortexmlx.types.sampling_params import SamplingParams, python_number

if TYPE_CHECKING:
    from cortexmlx.core.core import EngineCore
    from cortexmlx.vision.images import ImageSource

T = TypeVar("T")

_AHEAD_PER_ROW = 4
"""Requests of a batch that are queued per row."""


class Engine(NotCopyable):
    """Loads a model and answers requests, many at once, in this process. `core.config.EngineConfig` documents the
    options.

    The constructor returns when the model is loaded. Use the engine as a context manager, or call `close`. A dropped
    engine continues until its last request has ended. Raises ModelNotFound, ModelCorrupt, ModelUnsupported,
    MemoryRefused, AdapterRefused, InvalidRequest or ForkedProcess; with hosts, also HostRefused or HostLost.
    """

    info: ModelInfo
    _has_warned = False
    """Whether `generate` was called on a thread that runs an event loop, which is said once."""

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
            self._tokenizer = SharedTokenizer(self._worker.core.loaded.tokenizer, self._worker.core.model.images)
            history = PromptHistory() if config.prefix_cache else None
            is_hosted = config.hosts is not None
            self._submitter = Submitter(self._worker, self._tokenizer, self.info.vocab_size, history, is_hosted)
            self._embedder = Embedder(self._worker, self._tokenizer, self.info.vocab_size)
            for name, path in (config.adapters or {}).items():
                self.load_adapter(name, path)
        except BaseException as error:  # whose traceback holds this engine, as long as an app keeps it
            if isinstance(error, Exception):
                self._worker.stop()
            else:  # an interrupt waits for nothing
                self._worker.request_stop()
            raise

    open = classmethod(make_async_open(__init__))
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
        adapter: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> RequestHandle:
        """Queue a request and return its handle at once, or wait while 64 other submissions are in the queue.

        - `params`: sampling parameters, which may also be given by name. A name wins over `params`.
        - `on_event` is called with every event, on other threads; the last one has a `completion` or an `error`.
          `listener` is called on the engine's thread, which waits for it.
        - `client`: requests of one client share its turns, its `client_tokens`, and the beginnings of their prompts.
          All requests without a name belong to one client.
        - `background`: nobody watches the tokens come, so prompts are computed in larger pieces. The client's other
          requests go first, for up to a minute. The largest `max_tokens` begin first.
        - `cache`: False keeps the request out of the prefix cache. Its whole prompt is computed, and nothing is kept.
        - `timeout`: seconds after which the request fails with RequestTimeout, between two steps, if it has not ended.
        - `adapter`: the name of a loaded adapter. None: the model as it is.

        Raises InvalidRequest, PromptTooLong, UnknownAdapter or EngineClosed.
        """
        merged_params = with_keywords(params, **sampling)
        arguments.checked_function("on_event", on_event)
        options = RequestOptions(client=client, background=background, cache=cache, timeout=timeout, adapter=adapter)
        handle = self._submitter.submit(self, prompt, merged_params, listener, **options)
        if on_event is not None:
            self._callbacks.subscribe(handle, on_event)
        return handle

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: bool = True,
        timeout: float | None = None,
        adapter: str | None = None,
        on_progress: OnProgress | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Completion:
        """Return the whole answer to one prompt. An interrupt cancels the request. `on_progress` is called on this
        thread while the prompt takes several steps; if it raises, the request is cancelled. Other parameters: see
        `submit`.
        """
        arguments.checked_function("on_progress", on_progress)
        merged_params = with_keywords(params, **sampling)
        if not self._has_warned:
            self._has_warned = warn_if_blocking("engine.generate", "engine.agenerate")
        handle = self._submitter.submit(self, prompt, merged_params, cache=cache, timeout=timeout, adapter=adapter)
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
        adapter: str | Sequence[str | None] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Completion]:
        """Return the answers to many prompts, computed together, in the order of the prompts. Raises the first error,
        and cancels the others. Four requests per row are queued ahead, so that other callers need not wait for all.
        """
        answers: dict[int, Completion] = {}
        with closing(self.as_completed(prompts, params, adapter=adapter, **sampling)) as results:
            for index, result in results:
                if isinstance(result, CortexError):
                    result.add_note(f"It is the error of prompts[{index}].")
                    raise result
                answers[index] = result
        return [answers[index] for index in sorted(answers)]

    def as_completed(
        self,
        prompts: Iterable[Prompt | PendingPrompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        window: int | None = None,
        cache: bool = True,
        timeout: float | None = None,
        adapter: str | Iterable[str | None] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> AsCompleted:
        """Return an iterator of (index of the prompt, its Completion or the CortexError that ended it), in the order in
        which they finish. The error of one prompt does not affect the others.

        `prompts` may be any iterator, also an endless one. At most four prompts per row are read and not yet returned.
        With `window`, no prompt is read that comes `window` or more after the oldest unfinished one. Closing or
        dropping the iterator cancels the rest, and so does what it raises: EngineClosed, InvalidRequest if `params` are
        not as many as the prompts, or an error of `prompts`. `timeout` counts for each prompt. `adapter` is one for all
        prompts, or one each. Other parameters: see `submit`.
        """
        timeout, window = checked_timeout(timeout), python_number(window)
        if window is not None and not is_count(window, 1):
            raise InvalidRequest(f"window is {window!r}, but must be at least 1 prompt or None")
        if sampling:
            params = with_keywords_each(params, **sampling)
        return AsCompleted(
            pair_with_params(prompts, params),
            self._submitter.make_preparer(self, prompts, adapter, background=True, cache=cache, timeout=timeout),
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
        adapter: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> TokenStream:
        """Return an iterator of the answer's events; the last one carries the completion. Closing or dropping the
        iterator cancels the request. Other parameters: see `submit`.
        """
        merged_params = with_keywords(params, **sampling)
        return TokenStream(
            self._submitter.submit(self, prompt, merged_params, cache=cache, timeout=timeout, adapter=adapter)
        )

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        client: str = "",
    ) -> Embeddings:
        """Return the embeddings of texts, made as the model's own sentence-transformers files say. Many texts are
        computed together, without padding, and beside running answers. An interrupt cancels them.

        - `prompt`: the name of one of `info.embedding.prompts`, which is put before each text, such as "query". None:
          the model's default, which most models do not have.
        - `dimensions`: keep so many of the first numbers (Matryoshka), and normalize again if the model normalizes.
        - `truncate`: cut off the end of a text that is longer than `info.embedding.max_tokens`. False refuses it.
        - `client`: as for `submit`.

        A text of token ids is taken as it is, without special tokens or a prompt. Raises EmbeddingRefused if the model
        cannot embed, or an argument does not fit it; and what ends a request, such as EngineClosed.
        """
        return self._embedder.embed(self, texts, prompt, dimensions, truncate, client)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        client: str = "",
    ) -> Reranking:
        """Return how well each document answers a query, as Qwen3-Reranker models judge it. The instruction and the
        query are computed once for all documents.

        - `instruction`: what counts as a good answer. None: that of the model card, for web searches.
        - `truncate`: cut off the end of a document whose prompt is too long. False refuses it.
        - `client`: as for `submit`.

        Raises EmbeddingRefused if the model is no such reranker, or an argument is wrong or too long; and what ends a
        request, such as EngineClosed.
        """
        return self._embedder.rerank(self, query, documents, instruction, truncate, client)

    def perplexity(
        self,
        text: str | Sequence[int],
        *,
        context: int | None = None,
        stride: int | None = None,
        on_window: Callable[[Perplexity], None] | None = None,
    ) -> Perplexity:
        """Return how well the model predicts a text, or a list of token ids, in windows of `context` tokens (None:
        2048, or what fits). Raises InvalidRequest, and what `submit` raises.

        Each token is scored once: those of the first window, then in each further window the next `stride` tokens
        (None: half of `context`). If the tokenizer begins texts with a token, every window begins with it; otherwise
        the text's first token is not scored. `on_window` is called after each window with the result so far.
        """
        arguments.checked_function("on_window", on_window)
        self._worker.check_open()
        core = self._worker.core
        size = choose_window_size(context, core.scheduler.limits.max_scored_tokens(core.cache.tables.configured_tokens))
        complete = partial(self.as_completed, cache=False)
        return measure_perplexity(TokenizedText.from_input(text, self._tokenizer), complete, size, stride, on_window)

    def conversation(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Message] = (),
        params: SamplingParams | None = None,
        template_vars: TemplateVars = NO_VARIABLES,
        client: str | None = None,
        adapter: str | None = None,
    ) -> Conversation:
        """Return a conversation that begins with these messages. Its turns can be undone, forked and saved, and each
        computes only what is new. `params`, `client` and `adapter` are those of its requests. Raises InvalidRequest.
        """
        system = arguments.checked_text("system", system)
        client, adapter = arguments.checked_client(client), arguments.checked_adapter(adapter)
        merged_params, checked_template_vars = with_keywords(params), checked_vars(template_vars)
        conversation = Conversation(
            self, self._tokenizer, system=system, messages=messages, params=merged_params, client=client
        )
        conversation.template_vars, conversation.adapter = checked_template_vars, adapter
        return conversation

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The adapters that requests can name, by name, as they are now."""
        self._worker.check_process()
        return self._worker.core.adapters.infos

    def load_adapter(self, name: str, path: str | Path) -> AdapterInfo:
        """Load a LoRA adapter from a folder of mlx-lm or PEFT under a name that requests can use. Return its
        AdapterInfo.

        The folder is read on this thread, while requests run. They wait only while the engine copies the numbers. If
        the name stands for another adapter, new requests get this one, and running ones keep theirs. The other one does
        not count among `max_adapters` then, if it has neither another name nor requests; `adapter_memory` must hold
        both for a moment. The same content is in memory once, whatever its names.

        Raises AdapterRefused for what cannot be served per request, with the reason: DoRA, whole layers, embeddings,
        experts, the layer that gives the logits, an adapter of another model, or one beyond `max_adapters`,
        `max_adapter_rank` or `adapter_memory`. Raises ModelNotFound, ModelCorrupt, MemoryRefused, InvalidRequest or
        EngineClosed.
        """
        name = _checked_name("adapter", name)
        if not isinstance(path, (str, Path)):
            raise InvalidRequest(f"the adapter {name!r} is {path!r:.80}, but must be the path of a folder")
        self._worker.check_open()
        self._worker.check_not_own_thread()
        limits = self._worker.core.adapters.limits
        content = read_low_rank_adapter(name, path, limits.rank, limits.bytes)
        return self._worker.ask(lambda core: core.adapters.load(name, content, core.scheduler.jobs))

    def unload_adapter(self, name: str) -> None:
        """Unload the adapter of a name. Returns at once: requests that use it keep it, and its memory is freed when
        the last of them has ended. Raises UnknownAdapter, InvalidRequest or EngineClosed.
        """
        name = _checked_name("adapter", name)
        self._worker.ask(lambda core: core.adapters.unload(name, core.scheduler.jobs))

    def pin(
        self,
        prefix: Prompt,
        *,
        name: str | None = None,
        lifetime: float | None = None,
        tools: Sequence[Any] = (),
        client: str | None = None,
        adapter: str | None = None,
    ) -> Pin:
        """Compute a common prefix of prompts (text, tokens, or the first messages), keep it cached, and return a Pin.

        - `name`: another pin of this name is removed. With a `kv_store`, the folder keeps the name, too, for
          `Pin.export` and `cortexmlx cache export`; then the weights are hashed first.
        - `tools`: those of the prompts, if `prefix` has messages.
        - `lifetime`: seconds from now after which the next request, pin or `stats()` unpins it. None: never.

        Its whole blocks are evicted after all other cached blocks, but before a running request loses anything and
        before a request is refused. All pins have at most half of the KV memory. Raises PinRefused with the numbers,
        InvalidRequest if there is no whole block to pin, and what `submit` raises.
        """
        name = None if name is None else _checked_name("pin", name)
        lifetime = checked_timeout(lifetime, "lifetime")
        tokens = prefix_tokens(self._tokenizer, prefix, SamplingParams(tools=tuple(tools)))
        submission = self._submitter.prepare(self, tokens, SamplingParams(max_tokens=1), client=client, adapter=adapter)
        return pin_prompt(self._worker, submission, name, lifetime)

    def import_pin(
        self, path: str | Path, *, name: str | None = None, lifetime: float | None = None, client: str | None = None
    ) -> Pin:
        """Write a prefix from a file of `Pin.export` into the `kv_store`, for prompts of `client`, and pin the prefix,
        under `name` or its own name. The keys and values are read, not computed. Only import files of people
        whom you trust: a forged one makes wrong answers.

        Raises PrefixRefused, in words, for a damaged file, or one of another model, adapter, precision or version;
        OSError, and what `pin` raises.
        """
        client = arguments.checked_client(client)
        self._worker.check_open()
        self._worker.check_not_own_thread()
        prefix, adapter = import_file(self._worker, Path(path), name, client)
        prompt = [*prefix.tokens, prefix.tokens[-1]]  # one is computed in any case
        return self.pin(prompt, name=prefix.name, lifetime=lifetime, client=client, adapter=adapter)

    def cache_reports(self, client: str | None = None) -> list[CacheReport]:
        """Return reports on a client's last 20 prompts, the newest first: how much of a prompt was found in the cache,
        and why the rest was computed again. Reports of other clients tell nothing of this client's prompts.
        """
        history = self._submitter.history
        return [] if history is None else history.reports(client)

    def share_history(self, history: PromptHistory | Engine) -> None:
        """From now on, compare prompts with those in `history`, which other engines or a server share. Then a report
        can say that another model has read a conversation. Does nothing with `prefix_cache=False`.
        """
        shared = history._submitter.history if isinstance(history, Engine) else history
        if self._submitter.history is not None and shared is not None:
            self._submitter.history = shared

    # -- for asyncio: from any event loop, of any thread ---------------------------------------------------------------

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: bool = True,
        timeout: float | None = None,
        adapter: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> AsyncTokenStream:
        """`stream` for asyncio. The first `anext` submits the request, and raises what `submit` raises."""
        merged_params = with_keywords(params, **sampling)
        return AsyncTokenStream(partial(self._submitter.asubmit, self, prompt, merged_params, cache, timeout, adapter))

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: bool = True,
        timeout: float | None = None,
        adapter: str | None = None,
        on_progress: OnProgress | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Completion:
        """`generate` for asyncio. A cancelled task cancels the request. `on_progress` is called in the task."""
        params = with_keywords(params, **sampling)
        arguments.checked_function("on_progress", on_progress)
        if on_progress is None:
            submit = partial(self._submitter.asubmit, self, prompt, params, cache, timeout, adapter)
            return await wait_for_completion(submit)
        completion: Completion | None = None
        async with self.astream(prompt, params, cache=cache, timeout=timeout, adapter=adapter) as events:
            async for event in events:
                completion = event.completion
                report_progress(on_progress, event)
        assert completion is not None  # the last event has it
        return completion

    async def aembed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        client: str = "",
    ) -> Embeddings:
        """`embed` for asyncio. A cancelled task cancels what has not been computed."""
        embed = partial(self._embedder.embed, self, texts, prompt, dimensions, truncate, client)
        return await run_on_thread(embed, interruptible=True)

    async def arerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        client: str = "",
    ) -> Reranking:
        """`rerank` for asyncio. A cancelled task cancels what has not been computed."""
        rerank = partial(self._embedder.rerank, self, query, documents, instruction, truncate, client)
        return await run_on_thread(rerank, interruptible=True)

    async def aclose(self) -> None:
        """`close` for asyncio. If the task is cancelled, it no longer waits, but the engine still closes."""
        await run_on_thread(self.close)

    # -- texts and tokens: also on a closed engine; ForkedProcess in a forked child ------------------------------------

    def encode(self, prompt: Prompt, params: SamplingParams | None = None, *, fitting: bool = False) -> list[int]:
        """Return the token ids of a prompt: a text as it is, messages through the chat template, with the tools of
        `params`. With `fitting`, a text that surely is too long for a request is refused before it takes memory.
        Raises InvalidRequest and PromptTooLong.
        """
        self._worker.check_process()
        probe_params, scheduler = SamplingParams(max_tokens=1), self._worker.core.scheduler
        check_fit = partial(scheduler.check_prompt, params=probe_params, at_least=True) if fitting else None
        return list(tokenize(self._tokenizer, prompt, check_fit, params))

    @property
    def sees_images(self) -> bool:
        """Whether the model sees images in messages. `info.notes` say why not."""
        return self._tokenizer.images is not None

    @property
    def calls_tools(self) -> bool:
        """Whether requests may have `tools`: the model's chat template shows them, and the format of calls is known."""
        return self._tokenizer.call_format is not None

    @property
    def thinks(self) -> bool:
        """Whether the model marks thoughts before its answers."""
        return self._tokenizer.thoughts is not None

    def check_image(self, image: ImageSource) -> int:
        """Prepare an image as a request with it does, and return how many tokens stand for it. A later request can
        reuse the prepared image. Large images take seconds and up to 1 GB of memory, one at a time.

        `image` is an encoded file as bytes, the path of one, or a PIL image. Raises InvalidRequest if it cannot be
        shown, or if the model sees none.
        """
        self._worker.check_process()
        images = self._tokenizer.images
        if images is None:
            raise InvalidRequest(f"{self.info.name} sees no images: leave it out")
        return len(images.prepare({"type": "image", "image": image}).tokens)

    def count_tokens(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Return how many tokens a prompt has with `params`' tools: `usage.prompt_tokens`. Raises InvalidRequest."""
        return len(self.encode(prompt, params))

    def decode(self, tokens: Iterable[int], *, special_tokens: bool = False) -> str:
        """Return the text of token ids, without the tokenizer's special tokens, such as beginnings and ends of turns,
        unless `special_tokens` is True. Raises InvalidRequest for an id that is no token of the model.
        """
        self._worker.check_process()
        ids = arguments.checked_tokens(tokens, self.info.vocab_size)
        return self._tokenizer.decode(ids, special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of UTF-8 that a token stands for by itself: they may be a part of a character. Empty if the
        model has no such token. Raises InvalidRequest unless `token` is an integer.
        """
        self._worker.check_process()
        return self._tokenizer.token_bytes(arguments.checked_token(token))

    # -- looking inside: on the engine's thread, between two steps -----------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the engine's statistics: counters, and gauges of this moment. Raises EngineClosed."""
        return self._worker.ask(lambda core: core.stats())

    def blocks(self) -> BlockMap:
        """Return the state of each block of the KV arena. Call it a few times a second at most. Raises EngineClosed."""
        return self._worker.ask(lambda core: core.cache.pools.block_map())

    def inspect(self, look: Callable[[EngineCore], T]) -> T:
        """Call `look(core)` on the engine's thread between two steps and return its result, for measuring and
        debugging. Requests that are submitted meanwhile begin together. The core may change with every version.
        Raises what `look` raises, and EngineClosed.
        """
        return self._worker.ask(look, any_error=True)

    @property
    def longest_request(self) -> int:
        """How many tokens a prompt and its answer may have together, by the context, `max_request_tokens` and the KV
        memory. With `keep_last`, only `max_request_tokens` and the range of token counts limit it.
        """
        scheduler = self._worker.core.scheduler
        return scheduler.limits.max_answer_tokens(0, scheduler.cache.tables.configured_tokens)

    def check_invariants(self) -> None:
        """Raise AssertionError if the engine's requests and blocks are inconsistent: for tests and debugging. The
        larger the arena, the longer it takes. Raises EngineClosed.
        """
        self._worker.ask(lambda core: core.check_invariants())

    def on_memory_pressure(self, level: MemoryPressure | str) -> None:
        """Give memory back while requests continue. "warning" drops half of the unused prefix cache, "critical" all of
        it, the free end of the arena and MLX's own buffers. Raises InvalidRequest or EngineClosed.
        """
        pressure_level = arguments.checked_pressure_level(level)
        self._worker.ask(lambda core: core.relieve(critical=pressure_level is MemoryPressure.CRITICAL))

    @property
    def closed(self) -> bool:
        """Whether the engine takes no more requests: it was closed, or it failed for good."""
        return self._worker.closed

    def close(self) -> None:
        """Stop the engine. Requests in flight fail with EngineClosed, and memory is given back. Safe to call again."""
        self._worker.stop()
        self._finalizer.detach()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model_name = f" {self.info.name}" if hasattr(self, "info") else ""
        return f"<{type(self).__name__}{model_name}{'' if model_name and not self._worker.closed else ', closed'}>"


def _checked_name(kind: str, name: str) -> str:
    """Return the name of an adapter or a pin as a plain `str`. Raises InvalidRequest if it cannot be one."""
    if not is_adapter_name(name):
        raise InvalidRequest(
            f"the name of the {kind} is {name!r:.80}, but must be a text of 1 to {MAX_NAME_CHARACTERS:,} characters"
        )
    return str.__str__(name)  # as in requests: a subclass, such as an Enum, could say, compare or hash another one
