"""OpenRequests: the requests that have not ended, their answers, and how each ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from cortexmlx.core.adapter_registry import AdapterRegistry
from cortexmlx.core.answers import Answer, RequestAnswers, logprob_of, no_form, no_token, request_of_job
from cortexmlx.core.deadlines import Deadlines, timed_out
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.meter import Measurements
from cortexmlx.core.text import CallsInThoughts, Stops, TextStream
from cortexmlx.errors import CortexError
from cortexmlx.execution.boundary import StepResult, TokenMask, TokenScores, Vector
from cortexmlx.execution.logits import NO_TOKEN
from cortexmlx.scheduling.job import Job, JobId, RowTokens
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.scheduling.shortage import cache_full
from cortexmlx.speculation.speculation import Speculation
from cortexmlx.structured.matcher import NO_TEXT, Grammar, Mask, fill_masks
from cortexmlx.types.request import FinishReason, QueuedRequest, RequestId, RequestState
from cortexmlx.types.sampling_params import LogitsProcessor


class OpenRequests:
    """The requests of a scheduler that have not ended. Every end goes through `_finish` or `fail`."""

    def __init__(
        self,
        scheduler: Scheduler,
        measured: Measurements,
        processors: MutableMapping[JobId, Sequence[LogitsProcessor]],
        tokenizer: Any,
        job_numbers: Iterator[int],
        speculation: Speculation | None,
        adapters: AdapterRegistry,
    ) -> None:
        """Make it without requests. `processors` are the runner's, `tokenizer` is the model's, `job_numbers` yields the
        numbers of new jobs, and `adapters` are those that requests can name. `speculation`: None if no tokens are
        drafted.
        """
        self.answers: dict[JobId, Answer] = {}
        self.by_id: dict[RequestId, RequestAnswers] = {}
        self._deadlines = Deadlines()
        self._scheduler = scheduler
        self._measured = measured
        self._processors = processors
        self._tokenizer = tokenizer
        self._job_numbers = job_numbers
        self._speculation = speculation
        self._adapters = adapters
        self._constrainable = 0

    # -- requests come ------------------------------------------------------------------------------------------------

    def add(self, request: QueuedRequest, handle: RequestHandle, stops: Stops, grammar: Grammar | None = None) -> None:
        """Queue a request that can run. Its answers end at `stops` and follow `grammar`. Raises UnknownAdapter."""
        request = self._adapters.resolved(request)
        params = request.params
        answers = RequestAnswers(request, handle)
        stop_ids = frozenset() if params.only_scores else stops.token_ids
        forced = None if self._speculation is None else self._speculation.forced
        first: Job | None = None
        for index in range(params.best_of or params.n):
            number = JobId(next(self._job_numbers))
            job = self._scheduler.add(number, request_of_job(request, index), stop_ids, fork_of=first)
            first = first or job
            if job.processed:
                self._processors[job.id] = job.request.params.logits_processors
            parser = in_thoughts = None
            if request.calls is not None and request.calls.callable:
                key = f"{request.seed}/{len(request.prompt)}/{index}"
                parser = request.calls.parser(key, streamed=grammar is not None)
                in_thoughts = None if request.thoughts is None else CallsInThoughts(request.calls, key)
            text = TextStream(self._tokenizer.detokenizer, stops, request.thoughts, parser, in_thoughts)
            matcher = None if grammar is None or params.only_scores else grammar.matcher(forced is not None)
            answer = Answer(answers, job, index, text, matcher, stops.thinking)
            self._constrainable += answer.constrainable
            self.answers[job.id] = answer
            if forced is not None and matcher is not None:
                forced.follow(job.id, answer.forced)
        self.by_id[handle.id] = answers
        if request.timeout is not None:
            self._deadlines.add(handle.id, request.submitted + request.timeout)
        self._measured.prompt_tokens += len(request.prompt)

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan, now: float) -> None:
        """Notify the answers of the tokens that a step computes."""
        for segment in plan.segments:
            answer = self.answers.get(segment.job)
            if answer is not None:
                end = min(segment.first + segment.count, answer.job.prompt_length)
                self._measured.prefilled_tokens += max(0, end - segment.first)
                answer.begin_step(segment, now)

    def needs_mask(self, plan: StepPlan) -> bool:
        """Return whether a token of the step may be chosen by a grammar, or by the limit of its answer's thoughts."""
        return bool(self._constrainable) and any(self._constrained(plan))

    def mask(self, plan: StepPlan) -> TokenMask | None:
        """Return the tokens that the rows of a step may choose, by the grammars of their answers and the limits of
        their thoughts. None if no row is constrained any more. A request fails whose grammar allows no token.
        """
        constrained = list(self._constrained(plan))
        matched = [(answer.matcher, answer.job.verifying) for answer, _ in constrained if answer.matcher is not None]
        masks = iter(fill_masks(matched)) if matched else iter(())
        rows: list[int] = []
        allowed: list[Mask] = []
        for answer, places in constrained:
            own = [] if answer.matcher is None else list(islice(masks, len(places)))
            if answer.job.id not in self.answers:
                continue  # it failed with another answer of its request
            if answer.matcher is not None and (error := answer.matcher.error or ("" if own[0].any() else NO_TEXT)):
                self.fail(answer.of_request, no_form(answer.job, error))
                continue
            closing = [] if answer.budget is None else answer.budget.masks()[: len(places)]
            own[: len(closing)] = closing
            rows += places[: len(own)]
            allowed += own
        return TokenMask(np.array(rows, np.int32), np.stack(allowed)) if rows else None

    def _constrained(self, plan: StepPlan) -> Iterator[tuple[Answer, range]]:
        """Yield the answers of a step whose next tokens are constrained, and the indices of their logits in
        `plan.logit_rows`.
        """
        end = 0
        for segment in plan.logit_segments:
            first, end = end, end + len(segment.logits)
            answer = self.answers.get(segment.job) if segment.live else None
            if answer is not None and answer.constrained and answer.job.generation == segment.generation:
                yield answer, range(first, end)

    def commit(self, plan: StepPlan, result: StepResult) -> list[RowTokens]:
        """Take the tokens of a step, and finish the answers that end with one of them. Return the rows whose drafts
        were verified.
        """
        if result.scores is not None:
            self._take_scores(plan, result.scores)
        if result.pooled:
            self._take_pooled(plan, result.pooled)
        self._fail_rows(plan, result)
        verified: list[RowTokens] = []
        for row in self._scheduler.commit(plan, result.tokens, result.seconds):
            answer = self.answers.get(row.job.id)
            if answer is None:
                continue  # it failed with another answer of its request
            read, reason = (
                (len(row.tokens), row.finish_reason) if answer.only_scores else self._read(answer, row, result)
            )
            if row.drafted:
                verified.append(replace(row, accepted=min(row.accepted, read)))
                answer.count_drafts(row.drafted, verified[-1].accepted)
            if reason is not None:
                self._end(answer, reason, len(row.tokens) - read)
        return verified

    def _read(self, answer: Answer, row: RowTokens, result: StepResult) -> tuple[int, FinishReason | None]:
        """Add a row's tokens to its answer, up to the end of the answer's text. Return how many these are, and why the
        answer ends; None: it goes on.
        """
        likeliest, last = row.job.params.logprobs, len(row.tokens) - 1
        for place, token in enumerate(row.tokens):
            now, before = time.perf_counter(), answer.last
            logprob = None if likeliest is None else logprob_of(token, row.first + place, likeliest, result)
            stop_token = place == last and row.finish_reason is FinishReason.STOP
            stopped = answer.take(token, now, logprob, stop_token)
            self._measured.token(now, before, answer.started, answer.request.submitted)
            if answer.matcher is not None and answer.matcher.take(token):  # an end that it refuses is an error
                stopped = True
            if stopped:
                return place + 1, FinishReason.STOP
        return len(row.tokens), row.finish_reason

    def _end(self, answer: Answer, reason: FinishReason, surplus: int) -> None:
        """End an answer at a token. Its job has got `surplus` tokens after that one."""
        self._scheduler.finish(answer.job.id, reason, surplus=surplus)
        if answer.matcher is not None and answer.matcher.error:
            self.fail(answer.of_request, no_form(answer.job, answer.matcher.error))
        else:
            self._finish(answer, reason)

    def _take_scores(self, plan: StepPlan, scores: TokenScores) -> None:
        """Take the log-probabilities of the prompts' tokens."""
        begin = 0
        for segment in plan.segments:
            end = begin + len(segment.scored)
            answer = self.answers.get(segment.job)
            if begin < end and answer is not None and answer.job.generation == segment.generation:
                answer.take_scores(segment.scored, scores[begin:end])
            begin = end

    def _take_pooled(self, plan: StepPlan, pooled: Sequence[Vector]) -> None:
        """Take what was asked of the prompts' states."""
        for segment, part in zip((s for s in plan.segments if s.pooled), pooled, strict=True):
            answer = self.answers.get(segment.job)
            if answer is not None and answer.job.generation == segment.generation:
                answer.of_request.take_pooled(part)

    # -- requests end -------------------------------------------------------------------------------------------------

    def cancel(self, request: RequestId) -> None:
        """End a request with the text it has. Does nothing if it has ended."""
        answers = self.by_id.get(request)
        for answer in list(answers.open) if answers is not None else ():
            self._scheduler.finish(answer.job.id, FinishReason.CANCELLED, RequestState.CANCELLED)
            self._finish(answer, FinishReason.CANCELLED)

    def cancel_asked(self, plan: StepPlan) -> None:
        """Cancel the requests of a step whose callers have asked for it meanwhile."""
        for segment in plan.segments:
            answer = self.answers.get(segment.job)
            if answer is not None and answer.of_request.handle.cancelling:
                self.cancel(answer.of_request.handle.id)

    @property
    def seconds_left(self) -> float | None:
        """After how many seconds a request is late, at the earliest: 0 if one is late; None: no request has a time."""
        pending = self._deadlines.pending
        return max(0.0, pending[0][0] - time.perf_counter()) if pending else None

    def expire(self, now: float) -> None:
        """Fail the requests whose time is over."""
        if not self._deadlines.pending:
            return
        for late in self._deadlines.passed(now, self.by_id):
            answers = self.by_id[late]
            self.fail(answers, timed_out(answers.request, answers.handle.state, answers.generated))

    def end_without_memory(self) -> None:
        """End the answers whose jobs the scheduler has ended because the system refuses memory. An answer that has
        tokens finishes with them. A request whose prompt does not fit fails.
        """
        while self._scheduler.ended:
            job = self._scheduler.ended.pop()
            answer = self.answers.get(job.id)
            if answer is None:
                continue  # it failed with another answer
            if job.finish_reason is FinishReason.LENGTH:
                self._finish(answer, FinishReason.LENGTH)
            else:
                self.fail(answer.of_request, cache_full(job, self._scheduler.cache.tables.capacity_tokens))

    def _fail_rows(self, plan: StepPlan, result: StepResult) -> None:
        """Fail the requests whose logits leave no token to choose, and those whose processors failed. If drafts were
        verified, they may be the reason, and the scheduler has the place computed again without any.
        """
        end = 0
        for segment in plan.logit_segments:
            first, end = end, end + len(segment.logits)
            if not segment.live or (result.tokens[first] != NO_TOKEN and first not in result.failures):
                continue
            answer = self.answers.get(segment.job)
            if answer is not None and answer.job.generation == segment.generation and not answer.job.verifying:
                self.fail(
                    answer.of_request, result.failures.get(first) or no_token(answer.job, answer.matcher is not None)
                )

    def _finish(self, answer: Answer, reason: FinishReason) -> None:
        """Complete an answer whose job has ended."""
        self._forget(answer)
        answer.finish(reason)
        if not answer.of_request.open:
            del self.by_id[answer.of_request.handle.id]
            self._measured.requests_finished += 1

    def fail(self, answers: RequestAnswers, error: CortexError) -> None:
        """End one request with an error."""
        for answer in answers.open:
            self._scheduler.finish(answer.job.id, FinishReason.ERROR, RequestState.FAILED)
            self._forget(answer)
        del self.by_id[answers.handle.id]
        answers.handle.fail(error)

    def _forget(self, answer: Answer) -> None:
        self._constrainable -= answer.constrainable
        del self.answers[answer.job.id]
        if answer.job.processed:
            del self._processors[answer.job.id]
        if self._speculation is not None:
            self._speculation.end(answer.job)
        if answer.job.adapter:
            self._adapters.sweep(self._scheduler.jobs)

    def fail_all(self, error: CortexError) -> None:
        """End every request with an error. The scheduler must have forgotten them."""
        self.answers.clear()
        self._constrainable = 0
        self._processors.clear()
        while self.by_id:
            self.by_id.popitem()[1].handle.fail(error)

    def forget(self) -> None:
        """Forget every request. The caller fails their handles."""
        self.answers.clear()
        self._constrainable = 0
        self.by_id.clear()
        self._processors.clear()
