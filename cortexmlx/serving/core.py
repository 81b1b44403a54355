"""EngineCore: the engine's work, on the one thread that owns mlx. `step` is the whole story: plan, dispatch, collect,
commit.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from cortexmlx.attention.backends import choose_backend
from cortexmlx.attention.seam import probe
from cortexmlx.errors import CortexError, InvalidRequest, KVCacheFull, MemoryRefused
from cortexmlx.execution.runner import ModelRunner, Pending, StepResult
from cortexmlx.execution.sampling import SamplingRow
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.kv.sizing import bytes_per_token, default_kv_bytes, format_bytes, logits_bytes, tail_bytes
from cortexmlx.kv.spec import LayerGroup, group_layers
from cortexmlx.machine import working_set_bytes
from cortexmlx.models import LoadedModel, load_model
from cortexmlx.request import FinishReason, RequestState
from cortexmlx.scheduling.job import Committed, Job
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.serving.answers import Answer, NewRequest, RequestAnswers, logprob_of, scored, seed_of
from cortexmlx.serving.config import EngineConfig
from cortexmlx.serving.meter import Meter, Timeline
from cortexmlx.serving.text import TextStream
from cortexmlx.stats import EngineStats, ModelInfo, Moment

_FRAGMENTED = 0.5
"""Fragmentation above which an idle engine compacts its arena."""

_BLOCKS_AT_ONCE = 256
"""How many blocks compaction copies at a time: bounds its memory."""

_FIRST_TOKENS = 2048
"""Tokens that the arena holds before it grows: small enough to be there at once."""


class EngineCore:
    """Model, arena, scheduler and runner, driven by `step`. Everything here runs on the engine's thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.loaded = load_model(config.model, dequantize=config.dequantize, on_progress=config.on_progress)
        model = self.loaded.model
        groups = group_layers(probe(model))
        vocab_size = _vocab_size(self.loaded)
        blocks = _arena_blocks(config, self.loaded, groups, vocab_size)
        self.config = config
        self._open_books(groups, blocks)
        self.backend = choose_backend(config.attention)
        self.runner = ModelRunner(model, self.arena, vocab_size, self.backend.attend)
        self.info = ModelInfo(
            name=self.loaded.name,
            path=str(self.loaded.path),
            architecture=str(self.loaded.config.get("model_type", "unknown")),
            context_length=self.loaded.context_length,
            vocab_size=vocab_size,
            parameters=self.loaded.parameters,
            weight_bytes=self.loaded.weight_bytes,
            dtype=self.loaded.dtype,
            kv_bytes_per_token=bytes_per_token(groups),
            chat_template=bool(self.loaded.tokenizer.has_chat_template),
            notes=self.loaded.notes,
        )
        self._answers: dict[int, Answer] = {}
        self._requests: dict[int, RequestAnswers] = {}
        self._jobs = itertools.count()
        self._in_flight: deque[Pending] = deque()
        self._finished = self._prompt_tokens = self._generated_tokens = 0
        self._plan_seconds = self._commit_seconds = self._busy_seconds = 0.0
        self._queued, self._first_token, self._inter_token = Meter(), Meter(), Meter()
        self._began = time.perf_counter()
        self._timeline = Timeline()
        self._at_work = False

    def _open_books(self, groups: Sequence[LayerGroup], blocks: int) -> None:
        """An empty arena of at most `blocks` blocks, and a scheduler without requests."""
        config = self.config
        first = min(blocks, -(-_FIRST_TOKENS // config.block_size))
        prefix = PrefixCache(config.block_size, str(self.loaded.path))
        self.arena = KVArena(groups, first, config.block_size)
        self.cache = KVCache(
            groups, first, config.block_size, limit=blocks, prefix=prefix, may_resize=self.arena.can_resize
        )
        self.scheduler = Scheduler(
            self.cache,
            max_rows=config.max_rows,
            prefill_budget=config.prefill_budget,
            context_length=self.loaded.context_length,
            max_request_tokens=config.max_request_tokens,
            client_tokens=config.client_tokens,
            token_target=config.token_target,
            pipeline=config.pipeline,
            share_prefixes=config.prefix_cache,
            share_between_clients=config.share_prefixes_between_clients,
        )

    # -- the loop's body ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Plan and start the next step, then take the results of the one before it."""
        began = time.perf_counter()
        plan = self._timed_plan()
        while self.scheduler.ended:
            self._end_for_memory(self.scheduler.ended.pop())
        if plan is not None:
            self._in_flight.append(self._dispatched(plan))
        if self._in_flight and (plan is None or len(self._in_flight) > 1):
            self._commit(self.runner.collect(self._in_flight.popleft()))
        elif plan is None and not self.scheduler.idle:
            raise RuntimeError("the scheduler has requests but nothing to compute")
        now = time.perf_counter()
        self._busy_seconds += now - began
        self._at_work = True
        if self._timeline.due(now - self._began):
            self._look(now)

    @property
    def idle(self) -> bool:
        """Nothing to do until the next request."""
        return self.scheduler.idle and not self._in_flight

    def add(self, request: NewRequest) -> None:
        """Queue a request; one that cannot run fails at once."""
        params = scored(request.params)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(self.loaded.tokenizer.eos_token_ids)
        answers = RequestAnswers(request)
        first: Job | None = None
        for index in range(params.best_of or params.n):
            seed = seed_of(request.seed, index)
            try:
                job = self.scheduler.add(
                    next(self._jobs),
                    request.prompt,
                    params,
                    seed,
                    stop_ids,
                    fork_of=first,
                    client=request.client,
                    patient=request.patient,
                )
            except CortexError as error:
                request.handle.fail(error)
                return
            first = first or job
            text = TextStream(self.loaded.tokenizer.detokenizer, params.stop)
            self._answers[job.id] = Answer(answers, job, index, text)
        self._requests[request.id] = answers
        self._prompt_tokens += len(request.prompt)

    def cancel(self, request: int) -> None:
        """End a request with the text it has; nothing happens if it has ended."""
        answers = self._requests.get(request)
        for answer in list(answers.open) if answers is not None else ():
            self.scheduler.finish(answer.job.id, FinishReason.CANCELLED, RequestState.CANCELLED)
            self._finish(answer, FinishReason.CANCELLED)

    def _fail(self, request: NewRequest, error: CortexError) -> None:
        """End one request with an error."""
        for answer in self._requests.pop(request.id).open:
            self.scheduler.finish(answer.job.id, FinishReason.ERROR, RequestState.FAILED)
            del self._answers[answer.job.id]
        request.handle.fail(error)

    def fail_all(self, error: CortexError) -> None:
        """End every request with an error and drop what is in flight."""
        self._in_flight.clear()
        self.runner.reset()
        self.scheduler.forget_all()
        if isinstance(error, MemoryRefused):
            self.cache.stay(self.arena.blocks)
        self._answers.clear()
        while self._requests:
            self._requests.popitem()[1].request.handle.fail(error)

    def begin_anew(self) -> None:
        """Forget all requests, the arena and the books after an exception that may have landed between any two
        statements: nothing can be trusted but the model. The scheduler's counters are zero again. The handles are the
        caller's to fail.
        """
        self._forget_requests()
        self._open_books(self.cache.groups, self.cache.limit)
        self.runner.reset()
        self.runner.arena = self.arena

    def relieve(self, critical: bool) -> None:
        """Give memory back: half of the unused cached blocks, or (critical) all of them and the part of the arena
        that is free behind the last used block.
        """
        if self.scheduler.idle:
            self.drain()
        self.scheduler.relieve(critical)
        self.tidy()
        if critical and self.idle:
            self.arena.resize(self.cache.blocks)
        mx.clear_cache()

    def compact(self) -> int:
        """Move cached blocks together so that what is free is one run, if nothing is running. Returns how many blocks
        moved.
        """
        if not self.idle:
            return 0
        mx.synchronize()
        copies = self.cache.compact()
        for group in range(len(self.cache.groups)):
            pairs = [c for c in copies if c.group == group]
            for start in range(0, len(pairs), _BLOCKS_AT_ONCE):
                part = pairs[start : start + _BLOCKS_AT_ONCE]
                sources, targets = (np.array([getattr(c, f) for c in part], np.int32) for f in ("source", "target"))
                self.arena.copy_blocks(group, sources, targets)
                mx.eval(self.arena.arrays())
        return len(copies)

    def tidy(self) -> None:
        """Called when nothing is left to do: keep no memory of the last step, and compact a badly fragmented arena."""
        if not self.idle:
            return
        self.runner.reset()
        if self.cache.fragmentation > _FRAGMENTED:
            self.compact()
        if self._at_work:
            self._look(time.perf_counter())
            self._at_work = False

    def check_invariants(self) -> None:
        """Raise AssertionError if the books of jobs, rows, sequences and blocks disagree: for tests and debug runs."""
        self.scheduler.check_invariants()

    def release(self) -> None:
        """Let go of all memory. The core is of no use afterwards. Safe to call again."""
        self._forget_requests()
        for name in ("runner", "arena", "loaded"):
            self.__dict__.pop(name, None)
        mx.clear_cache()

    def _forget_requests(self) -> None:
        self._in_flight.clear()
        self._answers.clear()
        self._requests.clear()

    def drain(self) -> None:
        """Take the results of everything in flight."""
        while self._in_flight:
            self._commit(self.runner.collect(self._in_flight.popleft()))

    def _look(self, now: float) -> None:
        """Note how full the engine is."""
        used, cached, free = self.cache.block_counts
        running, waiting = self.scheduler.rows_running, self.scheduler.rows_waiting
        self._timeline.add(Moment(now - self._began, used, cached, free, running, waiting))

    # -- inside a step ------------------------------------------------------------------------------------------------

    def _timed_plan(self) -> StepPlan | None:
        started = time.perf_counter()
        plan = self.scheduler.plan(len(self._in_flight))
        now = time.perf_counter()
        self._plan_seconds += now - started
        for segment in plan.segments if plan is not None and plan.groups is not None else ():
            answer = self._answers.get(segment.request)
            if answer is not None:
                answer.begin(now)
        return plan

    def _dispatched(self, plan: StepPlan) -> Pending:
        """Start a step. The requests whose own processors failed in it end here."""
        pending = self.runner.dispatch(plan, self._sampling_rows(plan))
        for place, error in pending.sampled.failures.items() if pending.sampled is not None else ():
            answer = self._answers.get(plan.sampled[place].request)
            if answer is not None:
                self._fail(answer.request, error)
        return pending

    def _sampling_rows(self, plan: StepPlan) -> list[SamplingRow] | None:
        """The sampling rows of a step, or None within a decode window, where they stay the same."""
        if plan.groups is None:
            return None
        jobs = [self._answers[s.request].job for s in plan.sampled]
        return [SamplingRow(j.params, j.seed, j.tokens[: j.prompt_length], j.output) for j in jobs]

    def _commit(self, result: StepResult) -> None:
        started = time.perf_counter()
        for news in self.scheduler.commit(result.plan, result.tokens, result.seconds):
            self._take(self._answers[news.job.id], news, result)
        self._commit_seconds += time.perf_counter() - started

    def _take(self, answer: Answer, news: Committed, result: StepResult) -> None:
        """One new token of an answer, and its end if this was the last."""
        self._generated_tokens += 1
        before = answer.last
        answer.take(news, logprob_of(news, result))
        self._measure(answer, before)
        reason = news.finish_reason
        if answer.stopped:
            reason = FinishReason.STOP
            self.scheduler.finish(news.job.id, reason)
        if reason is not None:
            self._finish(answer, reason)

    def _measure(self, answer: Answer, before: float | None) -> None:
        now = answer.last or 0.0
        if before is None:
            self._queued.add((answer.started or now) - answer.request.submitted)
            self._first_token.add(now - answer.request.submitted)
        else:
            self._inter_token.add(now - before)

    def _finish(self, answer: Answer, reason: FinishReason) -> None:
        del self._answers[answer.job.id]
        answer.finish(reason)
        answers = self._requests[answer.request.id]
        if not answers.open:
            del self._requests[answer.request.id]
            self._finished += 1

    def _end_for_memory(self, job: Job) -> None:
        """An answer has all that the cache may hold; or not even its prompt fits, and the request fails."""
        answer = self._answers.get(job.id)
        if answer is None:
            return  # it failed with another answer
        if job.generated:
            self._finish(answer, FinishReason.LENGTH)
            return
        error = KVCacheFull(
            f"the prompt has {job.prompt_length} tokens and the KV cache holds {self.cache.capacity_tokens}, for "
            "the system refuses it more memory: free some and make a new engine, or shorten the prompt"
        )
        self._fail(answer.request, error)

    @property
    def kv_bytes_in_use(self) -> int:
        """Bytes of the blocks and tails that hold the tokens of running requests."""
        return self.cache.bytes_in_use + (self.runner.tail_bytes if self.scheduler.rows_running else 0)

    def stats(self) -> EngineStats:
        """See `EngineStats`."""
        cache = self.cache.stats()
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
            single_run_share=cache.single_run_sequences / cache.sequences if cache.sequences else 1.0,
            kv_bytes=self.arena.nbytes,
            kv_bytes_limit=self.cache.limit * self.cache.block_size * self.info.kv_bytes_per_token,
            kv_bytes_in_use=self.kv_bytes_in_use,
            steps=self.scheduler.steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            requests_finished=self._finished,
            cached_tokens=self.scheduler.cached_tokens,
            preemptions=self.scheduler.preemptions,
            queued=self._queued.summary(),
            time_to_first_token=self._first_token.summary(),
            inter_token=self._inter_token.summary(),
            tokens_per_second=self._generated_tokens / self._busy_seconds if self._busy_seconds else 0.0,
            plan_seconds=self._plan_seconds,
            build_seconds=self.runner.build_seconds,
            wait_seconds=self.runner.wait_seconds,
            commit_seconds=self._commit_seconds,
            attention_backend=self.backend.describe(),
            active_memory=mx.get_active_memory(),
            peak_memory=mx.get_peak_memory(),
            timeline=self._timeline.moments(),
            block_map=self.cache.allocator(0).block_map(),
            sequences=tuple(map(self._sequence_line, self.scheduler.jobs)),
        )

    def _sequence_line(self, job: Job) -> str:
        """A job for people: its state, its tokens, its blocks."""
        where = f", blocks {self.cache.describe(job.id)}" if job.running else ""
        most = job.most_tokens
        counts = f"{job.prompt_length} + {job.generated} of at most {most} tokens, {job.cached} cached"
        again = f", preempted {job.preemptions} times" if job.preemptions else ""
        return f"{job.state.value}: {counts}{again}{where}"


def _vocab_size(loaded: LoadedModel) -> int:
    """Width of the model's logits: what its last projection really has."""
    logits = loaded.model(mx.zeros((1, 1), mx.int32))
    return int(logits.shape[-1])


def _arena_blocks(config: EngineConfig, loaded: LoadedModel, groups: tuple[LayerGroup, ...], vocab_size: int) -> int:
    """Blocks of the arena: what was asked for, else the modest default of `kv.sizing`."""
    per_token, rows = bytes_per_token(groups), config.max_rows
    memory = config.kv_bytes
    if memory is None:
        reserved = loaded.weight_bytes + tail_bytes(groups, rows) + logits_bytes(rows, vocab_size)
        memory = default_kv_bytes(per_token, loaded.context_length, rows, working_set_bytes(), reserved)
    tokens = memory // per_token
    blocks = tokens // config.block_size
    if blocks < 1:
        least = format_bytes(per_token * config.block_size)
        raise InvalidRequest(
            f"a KV memory of {format_bytes(tokens * per_token)} holds no block of {config.block_size} tokens: "
            f"give it at least {least}"
        )
    return blocks
