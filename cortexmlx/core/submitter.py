"""Submitter: turns the arguments of a call into a request, and queues it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sized
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, Unpack

from cortexmlx.core.adapter_registry import unknown_adapter_error
from cortexmlx.core.arguments import checked_adapter, checked_client, checked_function, checked_params, is_list
from cortexmlx.core.blocking_calls import run_on_thread, tokenize_with_timeout
from cortexmlx.core.deadlines import checked_timeout
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.prompt import ChatTokens, Prompt, is_quick_to_tokenize, tokenize
from cortexmlx.core.prompt_history import ModelVersion, PromptHistory
from cortexmlx.core.streams import Listener
from cortexmlx.core.text import StopConditions, ThinkingLimit
from cortexmlx.core.worker import Submission, Worker
from cortexmlx.errors import InvalidRequest, OutOfMemory
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.structured.compiler import GrammarCompiler
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams

_WAIT_SECONDS = 0.002
"""How often `asubmit` checks whether the engine's thread accepts requests again."""


class RequestOptions(TypedDict, total=False):
    """The options of `Engine.submit` besides the prompt and its parameters. A `timeout` is in seconds."""

    client: str | None
    background: bool
    cache: bool
    timeout: float | None
    adapter: str | None


class Submitter:
    """Turns users' calls into requests and queues them. Slow work runs on the caller's thread, not the engine's."""

    def __init__(
        self,
        worker: Worker,
        tokenizer: SharedTokenizer,
        vocab_size: int,
        history: PromptHistory | None,
        is_hosted: bool = False,
    ) -> None:
        """`history` explains what was computed again; None without a prefix cache. `is_hosted`: the model is on hosts,
        where no function of the caller can run.
        """
        self.history = history
        self._worker = worker
        self._is_hosted = is_hosted
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size)

    def submit(
        self,
        owner: object,
        prompt: Prompt,
        params: SamplingParams | None,
        listener: Listener | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestHandle:
        """Queue a request, which keeps `owner` alive until it ends. Raises what `prepare` raises, and EngineClosed."""
        return self._submit_one(self.prepare(owner, prompt, params, listener, **options))

    async def asubmit(
        self,
        owner: object,
        prompt: Prompt,
        params: SamplingParams | None,
        cache: bool,
        timeout: float | None,
        adapter: str | None,
        listener: Listener,
    ) -> RequestHandle:
        """`submit` for asyncio: rendering, compiling a grammar and waiting for a place do not block the event loop."""
        prepare = partial(self.prepare, owner, prompt, params, listener, cache=cache, timeout=timeout, adapter=adapter)
        quick = is_quick_to_tokenize(prompt) and (params is None or not (params.structured or params.tools))
        submission = prepare() if quick else await run_on_thread(prepare, interruptible=True)
        while self._worker.would_wait:
            await asyncio.sleep(_WAIT_SECONDS)
        return self._submit_one(submission)

    def prepare(
        self,
        owner: object,
        prompt: Prompt,
        params: SamplingParams | None,
        listener: Listener | None = None,
        **options: Unpack[RequestOptions],
    ) -> Submission:
        """Check and tokenize a request; compile its grammar. Raises InvalidRequest, PromptTooLong, UnknownAdapter."""
        params = checked_params(params)
        params.validate(self._vocab_size)
        if self._is_hosted and params.logits_processors:
            raise InvalidRequest(
                "logits_processors are functions of this process, and with hosts the logits are in others: leave them "
                "out, or ask for a form (structured), logit_bias or penalties",
                field="logits_processors",
            )
        adapter = self._loaded_adapter_name(options.get("adapter"))
        client, timeout = checked_client(options.get("client")), checked_timeout(options.get("timeout"))
        checked_function("listener", listener)
        submit_time = time.perf_counter()
        tokens = self._tokenize(prompt, params, timeout)
        seed = secrets.randbits(62) if params.seed is None else params.seed
        background, cache = options.get("background", False), options.get("cache", True)
        request = QueuedRequest(
            tuple(tokens),
            params,
            seed,
            submit_time,
            client,
            background,
            cache=cache,
            timeout=timeout,
            adapter=adapter,
        )
        if isinstance(tokens, ChatTokens):
            images, tokens.images = tokens.images, None  # a turn's tokens stay with its conversation
            if images is not None and params.prompt_logprobs is not None:
                raise InvalidRequest("prompt_logprobs are not given with images: leave one of them out")
            request = replace(
                request,
                images=images,
                thoughts=tokens.thoughts,
                calls=tokens.calls,
                thinking_tag_length=tokens.thinking_tag_length,
                anchor_length=tokens.anchor_length,
            )
        grammar = self._grammars.compile_request(request)
        eos_token_ids = self._tokenizer.eos_token_ids
        stops = StopConditions.from_params(params, eos_token_ids, request.thoughts)
        if grammar is not None:  # it allows an end token only where the answer is over, also with `ignore_eos`
            stops = replace(stops, token_ids=stops.token_ids | eos_token_ids)
        limit = ThinkingLimit.for_request(
            params.max_thinking_tokens, request.thoughts, self._tokenizer.encode, self._vocab_size
        )
        stops = stops if limit is None else replace(stops, thinking=limit)
        trace = None
        if self.history is not None:
            core = self._worker.core
            digest = "" if adapter is None or adapter not in (infos := core.adapters.infos) else infos[adapter].digest
            name = core.info.name.rstrip("/").rpartition("/")[2]  # of a folder not where it is
            version = ModelVersion(core.info.identity, name, digest)
            source = tokens.source if isinstance(tokens, ChatTokens) else None
            trace = self.history.trace(request, source, self._tokenizer, version)
        return Submission(request, stops, listener, owner=owner, grammar=grammar, trace=trace)

    def make_preparer(
        self,
        owner: object,
        prompts: Iterable[object],
        adapters: str | Iterable[str | None] | None,
        **options: Unpack[RequestOptions],
    ) -> Callable[[Prompt, SamplingParams | None, Listener], Submission]:
        """Return a function that prepares the next of `prompts` at each call, for `AsCompleted`. `adapters` is one for
        all, or one each. Raises InvalidRequest at once if `prompts` and `adapters` have different lengths; without
        lengths, the function raises it when no adapter is left.
        """
        if adapters is None or isinstance(adapters, str) or not is_list(adapters):
            shared_adapter: Any = adapters
            return partial(self.prepare, owner, **{**options, "adapter": shared_adapter})
        if isinstance(prompts, Sized) and isinstance(adapters, Sized) and len(prompts) != len(adapters):
            raise InvalidRequest(f"{len(prompts)} prompts need {len(prompts)} adapters, not {len(adapters)}")
        adapter_iterator, sentinel, held = iter(adapters), object(), list[Any]()

        def prepare_next(prompt: Prompt, params: SamplingParams | None, listener: Listener) -> Submission:
            adapter: Any = held.pop() if held else next(adapter_iterator, sentinel)
            if adapter is sentinel:
                raise InvalidRequest(
                    "there are fewer adapters than prompts: give one for all, or one each (None: none)"
                )
            try:
                return self.prepare(owner, prompt, params, listener, **{**options, "adapter": adapter})
            except OutOfMemory:  # the prompt may be prepared again
                held.append(adapter)
                raise

        return prepare_next

    def _loaded_adapter_name(self, name: str | None) -> str | None:
        """Return an adapter's name, or None for no adapter. Raises UnknownAdapter unless it is loaded."""
        name = checked_adapter(name)
        if name is None:
            return None
        self._worker.check_process()
        loaded = self._worker.core.adapters.infos
        if name not in loaded:
            raise unknown_adapter_error(name, loaded)
        return name

    def _submit_one(self, submission: Submission) -> RequestHandle:
        """Hand one submission to the worker, and return its handle."""
        handles: list[RequestHandle] = []
        self._worker.submit([submission], handles)
        return handles[0]

    def _tokenize(self, prompt: Prompt, params: SamplingParams, timeout: float | None) -> list[int]:
        """Return the token ids of a prompt. Raises PromptTooLong, for a long text before it is tokenized."""
        self._worker.check_process()
        check_length = partial(self._worker.core.scheduler.check_prompt, params=params)
        encode = partial(tokenize, self._tokenizer, prompt, lambda least: check_length(least, at_least=True), params)
        tokens = encode() if is_quick_to_tokenize(prompt) else tokenize_with_timeout(timeout, encode)
        if not tokens:
            raise InvalidRequest("the prompt is empty: give it at least one token")
        check_length(len(tokens))
        if isinstance(tokens, ChatTokens) and (reason := self._worker.core.info.why_no_chat):
            raise InvalidRequest(reason)
        shows = isinstance(tokens, ChatTokens) and tokens.images is not None  # images' tokens are negative
        invalid_token = next((t for t in tokens if not (shows or t >= 0) or t >= self._vocab_size), None)
        if invalid_token is not None:
            raise InvalidRequest(f"token id {invalid_token} is outside the vocabulary of {self._vocab_size} tokens")
        return tokens
