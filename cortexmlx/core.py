"""EngineCore: the engine's work, on the one thread that owns mlx. `step` is the whole story: plan, dispatch, collect,
commit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from cortexmlx.attention.backends import choose_backend
from cortexmlx.attention.seam import probe
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.handle import RequestHandle
from cortexmlx.job import Committed, Job
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.sizing import default_kv_bytes, default_kv_tokens, format_bytes, logits_bytes
from cortexmlx.kv.spec import group_layers
from cortexmlx.machine import working_set_bytes
from cortexmlx.models import LoadedModel, load_model
from cortexmlx.plan import TAIL_COLUMNS, StepPlan
from cortexmlx.request import (
    Completion,
    FinishReason,
    RequestState,
    SamplingParams,
    Timings,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from cortexmlx.runner import ModelRunner, Pending, StepResult
from cortexmlx.sampling import SamplingRow
from cortexmlx.scheduler import Scheduler
from cortexmlx.stats import EngineStats, ModelInfo
from cortexmlx.text import TextStream

_FIRST_TOKENS = 2048
"""Tokens that the arena holds before it grows: small enough to be there at once."""


@dataclass(frozen=True)
class EngineConfig:
    """What the engine was asked for; see `Engine`. `kv_memory` is in bytes."""

    model: str
    kv_memory: int | None = None
    block_size: int = 32
    max_rows: int = 16
    attention: str = "auto"
    prefill_budget: int = 512
    token_target: float | None = 0.25
    prefix_cache: bool = True
    pipeline: bool = True
    dequantize: bool | None = None
    on_progress: Callable[[str, float], None] | None = None


@dataclass(frozen=True)
class NewRequest:
    """A request as it reaches the engine thread."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    submitted: float
    handle: RequestHandle


@dataclass
class _Track:
    """What the core remembers of a request while it runs."""

    request: NewRequest
    job: Job
    text: TextStream
    logprobs: list[TokenLogprob]
    shown: str = ""
    started: float | None = None
    first: float | None = None


class EngineCore:
    """Model, arena, scheduler and runner, driven by `step`. Everything here runs on the engine's thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.loaded = load_model(config.model, dequantize=config.dequantize, on_progress=config.on_progress)
        model = self.loaded.model
        groups = group_layers(probe(model))
        per_token = sum(g.bytes_per_token for g in groups)
        vocab_size = _vocab_size(self.loaded)
        blocks = _arena_blocks(config, self.loaded, per_token, vocab_size)
        self.config = config
        first = min(blocks, -(-_FIRST_TOKENS // config.block_size))
        self.cache = KVCache(
            groups, first, config.block_size, limit=blocks, prefix=PrefixCache(config.block_size, str(self.loaded.path))
        )
        self.arena = KVArena(groups, first, config.block_size)
        self.backend = choose_backend(config.attention)
        self.runner = ModelRunner(model, self.arena, vocab_size, self.backend.attend)
        self.scheduler = Scheduler(
            self.cache,
            max_rows=config.max_rows,
            prefill_budget=config.prefill_budget,
            context_length=self.loaded.context_length,
            token_target=config.token_target,
            pipeline=config.pipeline,
            share_prefixes=config.prefix_cache,
        )
        self.info = ModelInfo(
            name=self.loaded.name,
            path=str(self.loaded.path),
            architecture=str(self.loaded.config.get("model_type", "unknown")),
            context_length=self.loaded.context_length,
            vocab_size=vocab_size,
            parameters=self.loaded.parameters,
            weight_bytes=self.loaded.weight_bytes,
            dtype=self.loaded.dtype,
            kv_bytes_per_token=per_token,
            chat_template=bool(self.loaded.tokenizer.has_chat_template),
            notes=self.loaded.notes,
        )
        self._tracks: dict[int, _Track] = {}
        self._in_flight: deque[Pending] = deque()
        self._finished = self._prompt_tokens = self._generated_tokens = 0
        self._plan_seconds = self._commit_seconds = 0.0

    # -- the loop's body ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Plan and start the next step, then take the results of the one before it."""
        plan = self._timed_plan()
        if plan is not None:
            self._in_flight.append(self.runner.dispatch(plan, self._sampling_rows(plan)))
        if self._in_flight and (plan is None or len(self._in_flight) > 1):
            self._commit(self.runner.collect(self._in_flight.popleft()))
        elif plan is None and not self.scheduler.idle:
            raise RuntimeError("the scheduler has requests but nothing to compute")

    @property
    def idle(self) -> bool:
        """Nothing to do until the next request."""
        return self.scheduler.idle and not self._in_flight

    def add(self, request: NewRequest) -> None:
        """Queue a request; one that cannot run fails at once."""
        stop_ids = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            stop_ids |= frozenset(self.loaded.tokenizer.eos_token_ids)
        try:
            job = self.scheduler.add(request.id, request.prompt, request.params, request.seed, stop_ids)
        except CortexError as error:
            request.handle.fail(error)
            return
        self._prompt_tokens += len(request.prompt)
        text = TextStream(self.loaded.tokenizer.detokenizer, request.params.stop)
        self._tracks[request.id] = _Track(request, job, text, [])

    def cancel(self, request: int) -> None:
        """End a request with the text it has; nothing happens if it has ended."""
        track = self._tracks.get(request)
        if track is not None:
            self.scheduler.finish(request, FinishReason.CANCELLED, RequestState.CANCELLED)
            self._finish(track, FinishReason.CANCELLED)

    def fail_all(self, error: CortexError) -> None:
        """End every request with an error and drop what is in flight."""
        self._in_flight.clear()
        self.runner.reset()
        self.scheduler.forget_all()
        while self._tracks:
            self._tracks.popitem()[1].request.handle.fail(error)

    def release(self) -> None:
        """Let go of all memory. The core is of no use afterwards."""
        del self.runner, self.arena, self.loaded
        mx.clear_cache()

    def drain(self) -> None:
        """Take the results of everything in flight."""
        while self._in_flight:
            self._commit(self.runner.collect(self._in_flight.popleft()))

    # -- inside a step ------------------------------------------------------------------------------------------------

    def _timed_plan(self) -> StepPlan | None:
        started = time.perf_counter()
        plan = self.scheduler.plan(len(self._in_flight))
        now = time.perf_counter()
        self._plan_seconds += now - started
        for segment in plan.segments if plan is not None and plan.groups is not None else ():
            track = self._tracks.get(segment.request)
            if track is not None and track.started is None:
                track.started = now
                track.request.handle.advance(RequestState.PREFILLING)
        return plan

    def _sampling_rows(self, plan: StepPlan) -> list[SamplingRow] | None:
        """The sampling rows of a step, or None within a decode window, where they stay the same."""
        if plan.groups is None:
            return None
        jobs = [self._tracks[s.request].job for s in plan.sampled]
        return [SamplingRow(j.params, j.seed, j.tokens[: j.prompt_length], j.output) for j in jobs]

    def _commit(self, result: StepResult) -> None:
        started = time.perf_counter()
        for news in self.scheduler.commit(result.plan, result.tokens, result.seconds):
            self._take(self._tracks[news.job.id], news, result)
        self._commit_seconds += time.perf_counter() - started

    def _take(self, track: _Track, news: Committed, result: StepResult) -> None:
        """One new token of a request: text, events, and its end if this was the last."""
        if track.first is None:
            track.first = time.perf_counter()
            track.request.handle.advance(RequestState.DECODING)
        self._generated_tokens += 1
        logprob = _logprob(track.request.params, news, result)
        if logprob is not None:
            track.logprobs.append(logprob)
        reason = news.finish_reason
        piece = "" if reason is FinishReason.STOP else track.text.push(news.token)
        if track.text.stopped:
            reason = FinishReason.STOP
            self.scheduler.finish(news.job.id, reason)
        track.shown += piece
        track.request.handle.push(TokenEvent(piece, news.token, logprob))
        if reason is not None:
            self._finish(track, reason)

    def _finish(self, track: _Track, reason: FinishReason) -> None:
        rest = track.text.finish()
        del self._tracks[track.request.id]
        self._finished += 1
        job, now = track.job, time.perf_counter()
        submitted = track.request.submitted
        started, first = track.started or now, track.first or now
        prefilling, decoding = first - started, now - first
        completion = Completion(
            text=track.shown + rest,
            token_ids=tuple(job.output),
            finish_reason=reason,
            usage=Usage(job.prompt_length, job.generated, job.cached),
            timings=Timings(
                queued=started - submitted,
                ttft=first - submitted,
                total=now - submitted,
                prefill_tokens_per_second=(job.prompt_length - job.cached) / prefilling if prefilling > 0 else 0.0,
                decode_tokens_per_second=(job.generated - 1) / decoding if job.generated > 1 and decoding > 0 else 0.0,
            ),
            logprobs=None if track.request.params.logprobs is None else tuple(track.logprobs),
        )
        track.request.handle.push(TokenEvent(rest, finish_reason=reason, completion=completion))

    def stats(self) -> EngineStats:
        """See `EngineStats`."""
        cache = self.cache.stats()
        share = cache.used_blocks / len(self.cache.groups)
        per_token = sum(group.bytes_per_token for group in self.cache.groups)
        return EngineStats(
            rows_running=self.scheduler.rows_running,
            rows_waiting=self.scheduler.rows_waiting,
            max_rows=self.config.max_rows,
            block_size=self.cache.block_size,
            total_blocks=cache.total_blocks,
            free_blocks=cache.free_blocks,
            used_blocks=cache.used_blocks,
            shared_blocks=cache.shared_blocks,
            cached_blocks=cache.cached_blocks,
            fragmentation=cache.fragmentation,
            kv_bytes=self.arena.nbytes,
            kv_bytes_in_use=round(share * self.cache.block_size * per_token),
            steps=self.scheduler.steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            requests_finished=self._finished,
            cached_tokens=self.scheduler.cached_tokens,
            preemptions=self.scheduler.preemptions,
            plan_seconds=self._plan_seconds,
            build_seconds=self.runner.build_seconds,
            wait_seconds=self.runner.wait_seconds,
            commit_seconds=self._commit_seconds,
            attention_backend=self.backend.name,
            active_memory=mx.get_active_memory(),
            peak_memory=mx.get_peak_memory(),
            block_map=self.cache.allocator(0).block_map(),
            sequences=self.cache.dump(),
        )


def _logprob(params: SamplingParams, news: Committed, result: StepResult) -> TokenLogprob | None:
    if params.logprobs is None or result.logprobs is None:
        return None
    top: tuple[tuple[int, float], ...] = ()
    if params.logprobs and result.top_ids is not None and result.top_logprobs is not None:
        pairs = zip(result.top_ids[news.place], result.top_logprobs[news.place], strict=True)
        top = tuple(pairs)[: params.logprobs]
    return TokenLogprob(news.token, result.logprobs[news.place], top)


def _vocab_size(loaded: LoadedModel) -> int:
    """Width of the model's logits: what its last projection really has."""
    logits = loaded.model(mx.zeros((1, 1), mx.int32))
    return int(logits.shape[-1])


def _arena_blocks(config: EngineConfig, loaded: LoadedModel, per_token: int, vocab_size: int) -> int:
    """Blocks of the arena: what was asked for, else the modest default of `kv.sizing`."""
    if config.kv_memory is not None:
        tokens = config.kv_memory // per_token
    else:
        tails = 2 * config.max_rows * TAIL_COLUMNS * per_token
        reserved = loaded.weight_bytes + tails + logits_bytes(config.max_rows, vocab_size)
        wanted = default_kv_tokens(loaded.context_length, config.max_rows) * per_token
        room = default_kv_bytes(per_token, loaded.context_length, config.max_rows, working_set_bytes(), reserved)
        tokens = min(wanted, room) // per_token
    blocks = tokens // config.block_size
    if blocks < 1:
        least = format_bytes(per_token * config.block_size)
        raise InvalidRequest(
            f"a KV memory of {format_bytes(tokens * per_token)} holds no block of {config.block_size} tokens: "
            f"give it at least {least}"
        )
    return blocks
