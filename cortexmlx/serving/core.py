"""EngineCore: the engine's work, on the one thread that owns mlx. `step` is the whole story: plan, dispatch, collect,
commit.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from cortexmlx.errors import CortexError
from cortexmlx.execution.boundary import Refused, StepResult, TokenScores
from cortexmlx.execution.logits import NO_TOKEN
from cortexmlx.kv.spec import Counts
from cortexmlx.request import FinishReason, QueuedRequest, RequestId, RequestState
from cortexmlx.scheduling.job import Committed, Job, JobId
from cortexmlx.scheduling.shortage import cache_full, most_concerned, out_of_memory
from cortexmlx.scheduling.steps.plan import StepKind, StepPlan
from cortexmlx.serving.answers import Answer, RequestAnswers, asked, logprob_of, no_token
from cortexmlx.serving.config import EngineConfig
from cortexmlx.serving.deadlines import Deadlines, timed_out
from cortexmlx.serving.handle import RequestHandle
from cortexmlx.serving.observed.meter import Measurements
from cortexmlx.serving.observed.report import engine_stats
from cortexmlx.serving.parts import Call, EngineParts
from cortexmlx.serving.text.stops import Stops
from cortexmlx.serving.text.stream import TextStream
from cortexmlx.stats import EngineStats, Moment

_T = TypeVar("_T")

log = logging.getLogger("cortexmlx")

_FRAGMENTED = 0.5
"""Fragmentation above which an idle engine compacts its arena."""


class EngineCore(EngineParts):
    """Model, arena, scheduler and runner, driven by `step`. Everything here runs on the engine's thread."""

    def __init__(self, config: EngineConfig, wake: Callable[[Call], None] = lambda call: None) -> None:
        """`wake(call)` has a call carried out between two steps; threads of the core's own use it."""
        self._answers: dict[JobId, Answer] = {}
        self._requests: dict[RequestId, RequestAnswers] = {}
        self._deadlines = Deadlines()
        self._jobs = itertools.count()
        self._in_flight: deque[StepPlan] = deque()
        self._at_work = False
        self._step_seconds = 0.0
        super().__init__(config, wake)

    def _begin_empty(self, blocks: Counts) -> None:
        """All counters are zero, too."""
        super()._begin_empty(blocks)
        self.measured = Measurements()

    # -- the loop's body ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Plan and start the next step, then take the results of the one before it."""
        with self.measured.busy:
            for late in self._deadlines.passed(time.perf_counter(), self._requests):
                self._time_out(self._requests[late])
            if self._first_tokens_are_there:
                self._collect()
            if (disk := self.disk) is not None and not self._in_flight:
                self._heed(disk.copy_in_between(self._step_seconds))
            plan = self._plan()
            if plan is not None:
                self._dispatch(plan)
            if self._in_flight and (plan is None or len(self._in_flight) > 1):
                self._collect()
            elif plan is None and not self.scheduler.idle:
                raise RuntimeError("the scheduler has requests but nothing to compute")
        self._look(at_work=True)

    @property
    def _first_tokens_are_there(self) -> bool:
        """A step that computed prompts is done, or nearly so, as is every step that a CPU has taken (`cpu/feed.py`).
        Were the next one handed over before, those who wait for their first token would wait for all of that, too.
        """
        newest = self._in_flight[-1] if self._in_flight else None
        return newest is not None and newest.kind is StepKind.MIXED and self.runner.computes_at_dispatch

    @property
    def idle(self) -> bool:
        """Nothing to do until the next request."""
        return self.scheduler.idle and not self._in_flight

    def add(self, request: QueuedRequest, handle: RequestHandle, stops: Stops) -> None:
        """Queue a request, whose answers end at `stops`; one that cannot run fails at once."""
        self.cache.expect_back()
        self.pins.settle_again()
        try:
            self.scheduler.check_prompt(len(request.prompt), params=request.params)
        except CortexError as error:
            handle.fail(error)
            return
        params = request.params
        answers = RequestAnswers(request, handle)
        first: Job | None = None
        for index in range(params.best_of or params.n):
            job = self.scheduler.add(JobId(next(self._jobs)), asked(request, index), stops.token_ids, fork_of=first)
            first = first or job
            text = TextStream(self.loaded.tokenizer.detokenizer, stops, request.thoughts)
            self._answers[job.id] = Answer(answers, job, index, text)
        self._requests[handle.id] = answers
        if request.timeout is not None:
            self._deadlines.add(handle.id, request.submitted + request.timeout)
        self.measured.prompt_tokens += len(request.prompt)

    def cancel(self, request: RequestId) -> None:
        """End a request with the text it has; nothing happens if it has ended."""
        answers = self._requests.get(request)
        for answer in list(answers.open) if answers is not None else ():
            self.scheduler.finish(answer.job.id, FinishReason.CANCELLED, RequestState.CANCELLED)
            self._finish(answer, FinishReason.CANCELLED)

    def _fail(self, answers: RequestAnswers, error: CortexError) -> None:
        """End one request with an error."""
        for answer in answers.open:
            self.scheduler.finish(answer.job.id, FinishReason.ERROR, RequestState.FAILED)
            del self._answers[answer.job.id]
        del self._requests[answers.handle.id]
        answers.handle.fail(error)

    def _time_out(self, answers: RequestAnswers) -> None:
        self._fail(answers, timed_out(answers.request, answers.handle.state, answers.generated))

    def fail_all(self, error: CortexError) -> None:
        """End every request with an error and drop what is in flight."""
        self.backend.reconsider()
        self._in_flight.clear()
        self.runner.forget()
        self.scheduler.forget_all()
        self.cache.states.take()
        self._answers.clear()
        while self._requests:
            self._requests.popitem()[1].handle.fail(error)

    def begin_anew(self) -> None:
        """Forget all requests, the arena and who owns it after an exception that may have landed between any two
        statements: nothing can be trusted but the model. All counters are zero again. The handles are the caller's to
        fail. Raises MemoryRefused: the memory of the old arena is given back before there is a new one.
        """
        self._forget_requests()
        self.cache.expect_back()
        self.runner.forget()
        self._begin_empty(self.cache.max_blocks)
        self.pins.move_to(self.cache)

    def relieve(self, critical: bool) -> None:
        """Give memory back: half of the unused cached blocks, or (critical) all of them and the part of the arena
        that is free behind the last used block.
        """
        if self.scheduler.idle:
            self.drain()
        self.scheduler.relieve(critical)
        self.tidy()
        self.runner.trim()

    def compact(self) -> int:
        """Move cached blocks together so that what is free is one run, if nothing is running. Returns how many blocks
        moved.
        """
        return self._heed(self._move_together()) or 0 if self.idle else 0

    def tidy(self) -> bool:
        """Called when nothing is left to do: keep no memory of the last step, compact a badly fragmented arena, and
        give its end back if that was asked for while requests ran that are gone since. True if there is more to do that
        may wait: what is cached goes to the store, a little at a time.
        """
        if not self.idle:
            return False
        self.cache.expect_back()
        self._heed(self.runner.settle(self.cache.states.take()))
        if self.cache.fragmentation > _FRAGMENTED:
            self._heed(self._move_together())
        self.scheduler.shrink()
        if any(count < have for count, have in zip(self.cache.blocks, self.runner.blocks, strict=True)):
            self._heed(self._give_end_back())
        if self._at_work:
            self._look(at_work=False)
        return self.disk is not None and bool(self._heed(self.disk.copy_while_idle()))

    def check_invariants(self) -> None:
        """Raise AssertionError if jobs, rows, sequences and blocks do not fit together: for tests and debug runs."""
        self.scheduler.check_invariants()

    def release(self) -> None:
        """Let go of all memory. The core is of no use afterwards. Safe to call again."""
        self._forget_requests()
        super().release()

    def _forget_requests(self) -> None:
        self._in_flight.clear()
        self._answers.clear()
        self._requests.clear()

    def drain(self) -> None:
        """Take the results of everything in flight."""
        while self._in_flight:
            self._collect()

    def _look(self, at_work: bool) -> None:
        """Note how full the engine is: now and then while it is at work, and when it stops."""
        seconds = time.perf_counter() - self.measured.began
        self._at_work = at_work
        if at_work and not self.measured.timeline.due(seconds):
            return
        used, cached, free = self.cache.block_counts
        running, waiting = self.scheduler.rows_running, self.scheduler.rows_waiting
        self.measured.timeline.add(Moment(seconds, used, cached, free, running, waiting))

    # -- inside a step ------------------------------------------------------------------------------------------------

    def _plan(self) -> StepPlan | None:
        """The next step. Answers that begin in it are told, and those that the system refused memory end here."""
        with self.measured.planning:
            plan = self.scheduler.plan(len(self._in_flight))
        self._end_for_memory()
        now = time.perf_counter()
        for segment in plan.segments if plan is not None and plan.groups is not None else ():
            answer = self._answers.get(segment.job)
            if answer is not None:
                answer.begin_step(segment, now)
        return plan

    def _dispatch(self, plan: StepPlan) -> None:
        """Start a step."""
        refused = self.runner.dispatch(plan)
        if refused is None:
            self._in_flight.append(plan)
        else:
            self._go_on_with_less(plan, refused)

    def _collect(self) -> None:
        """Take the results of the step that was started first."""
        plan = self._in_flight.popleft()
        result = self._heed(self.runner.collect(), plan)
        if result is not None:
            self._commit(plan, result)
        for segment in plan.segments if plan.kind is StepKind.MIXED else ():
            answer = self._answers.get(segment.job)
            if answer is not None and answer.of_request.handle.cancelling:  # no further piece of its prompt is begun
                self.cancel(answer.of_request.handle.id)

    def _heed(self, answer: _T | Refused, plan: StepPlan | None = None) -> _T | None:
        """An answer to the work of a step; None if memory was refused, and the engine goes on with less."""
        if not isinstance(answer, Refused):
            return answer
        self._go_on_with_less(plan, answer)
        return None

    def _go_on_with_less(self, plan: StepPlan | None, refused: Refused) -> None:
        """Nothing is trusted that the steps in flight were to write: rows begin again with their tokens, fewer at once,
        and what is cached goes, with the arena unless it was the one that was refused more. A request fails that comes
        no farther all by itself.
        """
        log.warning("memory was refused, and requests begin again with less: %s", refused.why)
        arena_stays = refused.of_arena and min(self.runner.blocks) > 0 and not self.cache.grows_back
        running = self.scheduler.rows_running
        job = None if arena_stays else most_concerned(plan, self.scheduler.jobs)
        if job is not None:
            job.note_refusal()
        self._in_flight.clear()
        self.runner.forget()
        self.scheduler.start_over(rows=1 if job is not None and job.refusals else running // 2)
        self.cache.states.take()
        if arena_stays:
            self.cache.stay(self.runner.blocks)
            self.scheduler.fit_cache()
            self._end_for_memory()
        else:
            self.runner.release()
            self.cache.give_all_back()
        self.runner.trim()
        if job is not None and job.refusals > 1 and running == 1:
            self._fail(self._answers[job.id].of_request, out_of_memory(job, refused.why))

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take the tokens of a step. The requests whose own processors failed in it end here."""
        with self.measured.committing:
            if result.scores is not None:
                self._take_scores(plan, result.scores)
            self._step_seconds = result.seconds
            self._fail_rows(plan, result)
            for new in self.scheduler.commit(plan, result.tokens, result.seconds):
                self._take(self._answers[new.job.id], new, result)

    def _fail_rows(self, plan: StepPlan, result: StepResult) -> None:
        """End the requests whose logits leave no token to choose, and those whose processors failed."""
        index = -1
        for segment in plan.logit_segments:
            first, index = index + 1, index + len(segment.logits)
            for drafted in range(first + 1, index + 1):  # it may not be reached
                if drafted in result.failures:
                    result.tokens[drafted] = NO_TOKEN
            if not segment.live or (result.tokens[first] != NO_TOKEN and first not in result.failures):
                continue
            answer = self._answers.get(segment.job)
            if answer is not None and answer.job.generation == segment.generation:
                self._fail(answer.of_request, result.failures.get(first) or no_token(answer.job))

    def _take_scores(self, plan: StepPlan, scores: TokenScores) -> None:
        """The log-probabilities of prompts' tokens."""
        begin = 0
        for segment in plan.segments:
            end = begin + len(segment.scored)
            answer = self._answers.get(segment.job)
            if begin < end and answer is not None and answer.job.generation == segment.generation:
                answer.take_scores(segment.scored, scores[begin:end])
            begin = end

    def _take(self, answer: Answer, new: Committed, result: StepResult) -> None:
        """One new token of an answer, and its end if this was the last."""
        if answer.request.params.only_scores:
            self._finish(answer, FinishReason.LENGTH)
            return
        before = answer.last
        now = answer.take(new, logprob_of(new, result))
        self.measured.token(now, before, answer.started, answer.request.submitted)
        reason = new.finish_reason
        if answer.stopped:
            reason = FinishReason.STOP
            self.scheduler.finish(new.job.id, reason)
        if reason is not None:
            self._finish(answer, reason)

    def _finish(self, answer: Answer, reason: FinishReason) -> None:
        del self._answers[answer.job.id]
        answer.finish(reason)
        if not answer.of_request.open:
            del self._requests[answer.of_request.handle.id]
            self.measured.requests_finished += 1

    def _end_for_memory(self) -> None:
        """Answers that have all that the cache may hold end; where not even the prompt fits, the request fails."""
        while self.scheduler.ended:
            job = self.scheduler.ended.pop()
            answer = self._answers.get(job.id)
            if answer is None:
                continue  # it failed with another answer
            if job.generated:
                self._finish(answer, FinishReason.LENGTH)
            else:
                self._fail(answer.of_request, cache_full(job, self.cache.capacity_tokens))

    def stats(self) -> EngineStats:
        """See `EngineStats`."""
        return engine_stats(self)
