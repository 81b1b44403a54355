"""OpenRequests: the requests that have not ended, their answers, and how each ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from cortexmlx.core.adapter_registry import AdapterRegistry
from cortexmlx.core.answers import (
    AnswerGroup,
    OpenAnswer,
    grammar_error,
    logprob_of,
    no_token_error,
    request_for_answer,
)
from cortexmlx.core.deadlines import Deadlines, timeout_error
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.meter import Measurements
from cortexmlx.core.text import StopConditions, TextStream, ThoughtCallReader
from cortexmlx.errors import CortexError
from cortexmlx.execution.boundary import StepResult, TokenMask, TokenScores, Vector
from cortexmlx.execution.logits import NO_TOKEN
from cortexmlx.scheduling.job import Job, JobId, RowTokens
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.scheduling.shortage import cache_full_error
from cortexmlx.speculation.speculation import Speculation
from cortexmlx.structured.matcher import NO_TEXT, Grammar, Mask, fill_masks
from cortexmlx.types.request import FinishReason, QueuedRequest, RequestId, RequestState
from cortexmlx.types.sampling_params import LogitsProcessor


class OpenRequests:
    """The open requests and answers. `_complete` and `fail` end one, `fail_all` and `forget` end all."""

    def __init__(
        self,
        scheduler: Scheduler,
        measurements: Measurements,
        processors: MutableMapping[JobId, Sequence[LogitsProcessor]],
        tokenizer: Any,
        job_numbers: Iterator[int],
        speculation: Speculation | None,
        adapters: AdapterRegistry,
    ) -> None:
        """Begin without requests. `processors` are the runner's, `tokenizer` is the model's, `job_numbers` yields the
        numbers of new jobs, and `adapters` are those that requests can name. `speculation`: None if no tokens are
        drafted.
        """
        self.answers: dict[JobId, OpenAnswer] = {}
        self.by_id: dict[RequestId, AnswerGroup] = {}
        self._deadlines = Deadlines()
        self._scheduler = scheduler
        self._measurements = measurements
        self._processors = processors
        self._tokenizer = tokenizer
        self._job_numbers = job_numbers
        self._speculation = speculation
        self._adapters = adapters
        self._constrainable = 0

    # -- requests come ------------------------------------------------------------------------------------------------

    def add(
        self, request: QueuedRequest, handle: RequestHandle, stops: StopConditions, grammar: Grammar | None = None
    ) -> None:
        """Make and queue a runnable request's jobs and answers, with `stops` and `grammar`."""
        params = request.params
        answers = AnswerGroup(request, handle)
        stop_ids = frozenset() if params.only_scores else stops.token_ids
        forced_drafter = None if self._speculation is None else self._speculation.forced_drafter
        first: Job | None = None
        for index in range(params.best_of or params.n):
            number = JobId(next(self._job_numbers))
            job = self._scheduler.add(number, request_for_answer(request, index), stop_ids, fork_of=first)
            first = first or job
            if job.has_logits_processors:
                self._processors[job.id] = job.request.params.logits_processors
            parser = in_thoughts = None
            if request.calls is not None and request.calls.callable_tools:
                key = f"{request.seed}/{len(request.prompt)}/{index}"
                parser = request.calls.make_parser(key, streaming=grammar is not None)
                in_thoughts = None if request.thoughts is None else ThoughtCallReader(request.calls, key)
            text = TextStream(self._tokenizer.detokenizer, stops, request.thoughts, parser, in_thoughts)
            matcher = (
                None if grammar is None or params.only_scores else grammar.make_matcher(forced_drafter is not None)
            )
            answer = OpenAnswer(answers, job, index, text, matcher, stops.thinking)
            self._constrainable += answer.can_be_constrained
            self.answers[job.id] = answer
            if forced_drafter is not None and matcher is not None:
                forced_drafter.add_job(job.id, answer.forced_tokens)
        self.by_id[handle.id] = answers
        if request.timeout is not None:
            self._deadlines.add(handle.id, request.submit_time + request.timeout)

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan, now: float) -> None:
        """Tell the answers which of their tokens a step computes, and count the prompt tokens among them."""
        for segment in plan.segments:
            answer = self.answers.get(segment.job)
            if answer is not None:
                end = min(segment.first + segment.count, answer.job.prompt_length)
                self._measurements.prefilled_tokens += max(0, end - segment.first)
                answer.begin_step(segment, now)

    def needs_mask(self, plan: StepPlan) -> bool:
        """Return whether a grammar or a thinking limit may restrict a token of the step."""
        return bool(self._constrainable) and any(self._constrained_answers(plan))

    def make_token_mask(self, plan: StepPlan) -> TokenMask | None:
        """Return which tokens the rows of a step may choose, by the grammars and thinking limits of their answers;
        None if no row is restricted any more. A request whose grammar allows no token fails.
        """
        constrained_answers = list(self._constrained_answers(plan))
        matchers = [
            (answer.matcher, answer.job.drafts_in_flight)
            for answer, _ in constrained_answers
            if answer.matcher is not None
        ]
        masks = iter(fill_masks(matchers)) if matchers else iter(())
        rows: list[int] = []
        allowed_masks: list[Mask] = []
        for answer, row_indices in constrained_answers:
            answer_masks = [] if answer.matcher is None else list(islice(masks, len(row_indices)))
            if answer.job.id not in self.answers:
                continue  # it failed with another answer of its request
            if answer.matcher is not None and (
                error := answer.matcher.error or ("" if answer_masks[0].any() else NO_TEXT)
            ):
                self.fail(answer.group, grammar_error(answer.job, error))
                continue
            closing_masks = [] if answer.budget is None else answer.budget.forced_masks()[: len(row_indices)]
            answer_masks[: len(closing_masks)] = closing_masks
            rows += row_indices[: len(answer_masks)]
            allowed_masks += answer_masks
        return TokenMask(np.array(rows, np.int32), np.stack(allowed_masks)) if rows else None

    def _constrained_answers(self, plan: StepPlan) -> Iterator[tuple[OpenAnswer, range]]:
        """Yield the answers whose next tokens are restricted, each with its logits' indices in `plan.logit_rows`."""
        end = 0
        for segment in plan.logit_segments:
            first, end = end, end + len(segment.logits)
            answer = self.answers.get(segment.job) if segment.live else None
            if answer is not None and answer.is_constrained and answer.job.generation == segment.generation:
                yield answer, range(first, end)

    def commit(self, plan: StepPlan, result: StepResult) -> list[RowTokens]:
        """Add a step's tokens to their answers, and finish those that end. Return the rows with verified drafts."""
        if result.scores is not None:
            self._add_prompt_scores(plan, result.scores)
        if result.pooled:
            self._add_pooled_parts(plan, result.pooled)
        self._fail_rows(plan, result)
        verified_rows: list[RowTokens] = []
        for row in self._scheduler.commit(plan, result.tokens, result.seconds):
            answer = self.answers.get(row.job.id)
            if answer is None:
                continue  # it failed with another answer of its request
            token_count, reason = (
                (len(row.tokens), row.finish_reason) if answer.only_scores else self._add_tokens(answer, row, result)
            )
            if row.num_drafted:
                verified_rows.append(replace(row, num_accepted=min(row.num_accepted, token_count)))
                answer.count_drafts(row.num_drafted, verified_rows[-1].num_accepted)
            if reason is not None:
                self._end_at_token(answer, reason, len(row.tokens) - token_count)
        return verified_rows

    def _add_tokens(self, answer: OpenAnswer, row: RowTokens, result: StepResult) -> tuple[int, FinishReason | None]:
        """Add a row's tokens until the answer ends. Return how many were added, and the finish reason if it ends."""
        num_logprobs, last = row.job.params.logprobs, len(row.tokens) - 1
        for token_index, token in enumerate(row.tokens):
            now, previous_time = time.perf_counter(), answer.last_token_time
            logprob = None if num_logprobs is None else logprob_of(token, row.first + token_index, num_logprobs, result)
            stop_token = token_index == last and row.finish_reason is FinishReason.STOP
            is_stopped = answer.add_token(token, now, logprob, stop_token)
            self._measurements.count_token(now, previous_time, answer.start_time, answer.request.submit_time)
            if answer.matcher is not None and answer.matcher.accept(token):  # an end that it refuses is an error
                is_stopped = True
            if is_stopped:
                return token_index + 1, FinishReason.STOP
        return len(row.tokens), row.finish_reason

    def _end_at_token(self, answer: OpenAnswer, reason: FinishReason, surplus: int) -> None:
        """End an answer whose job has got `surplus` tokens after the last one that counts."""
        self._scheduler.finish(answer.job.id, reason, surplus=surplus)
        if answer.matcher is not None and answer.matcher.error:
            self.fail(answer.group, grammar_error(answer.job, answer.matcher.error))
        else:
            self._complete(answer, reason)

    def _add_prompt_scores(self, plan: StepPlan, scores: TokenScores) -> None:
        """Give the log-probabilities of prompt tokens to their answers."""
        begin = 0
        for segment in plan.segments:
            end = begin + len(segment.scored)
            answer = self.answers.get(segment.job)
            if begin < end and answer is not None and answer.job.generation == segment.generation:
                answer.add_prompt_scores(segment.scored, scores[begin:end])
            begin = end

    def _add_pooled_parts(self, plan: StepPlan, pooled_vectors: Sequence[Vector]) -> None:
        """Give the pooled hidden states or logits of prompts to their requests."""
        for segment, part in zip((s for s in plan.segments if s.pooled), pooled_vectors, strict=True):
            answer = self.answers.get(segment.job)
            if answer is not None and answer.job.generation == segment.generation:
                answer.group.add_pooled_part(part)

    # -- requests end -------------------------------------------------------------------------------------------------

    def cancel(self, request: RequestId) -> None:
        """End a request with the text that it has. Does nothing if it has ended."""
        answers = self.by_id.get(request)
        for answer in list(answers.open) if answers is not None else ():
            self._scheduler.finish(answer.job.id, FinishReason.CANCELLED, RequestState.CANCELLED)
            self._complete(answer, FinishReason.CANCELLED)

    def apply_cancellations(self, plan: StepPlan) -> None:
        """Cancel the requests of a step whose callers have cancelled them meanwhile."""
        for segment in plan.segments:
            answer = self.answers.get(segment.job)
            if answer is not None and answer.group.handle.cancelling:
                self.cancel(answer.group.handle.id)

    @property
    def seconds_to_deadline(self) -> float | None:
        """Seconds until the first request times out, 0 if one is late; None if no request has a timeout."""
        pending = self._deadlines.pending
        return max(0.0, pending[0][0] - time.perf_counter()) if pending else None

    def fail_timed_out(self, now: float) -> None:
        """Fail the requests that have timed out."""
        if not self._deadlines.pending:
            return
        for request_id in self._deadlines.pop_passed(now, self.by_id):
            answers = self.by_id[request_id]
            self.fail(answers, timeout_error(answers.request, answers.handle.state, answers.generated_tokens))

    def end_jobs_without_memory(self) -> None:
        """End the answers whose jobs the scheduler ended because the system refuses memory. An answer that has tokens
        finishes with them; otherwise its whole request fails.
        """
        while self._scheduler.ended_jobs:
            job = self._scheduler.ended_jobs.pop()
            answer = self.answers.get(job.id)
            if answer is None:
                continue  # it failed with another answer
            if job.finish_reason is FinishReason.LENGTH:
                self._complete(answer, FinishReason.LENGTH)
            else:
                self.fail(answer.group, cache_full_error(job, self._scheduler.cache.tables.capacity_tokens))

    def _fail_rows(self, plan: StepPlan, result: StepResult) -> None:
        """Fail the requests whose logits leave no token to choose, and those whose processors raised. If drafts were
        verified, they may be the reason: then the scheduler computes that token again without drafts.
        """
        end = 0
        for segment in plan.logit_segments:
            first, end = end, end + len(segment.logits)
            if not segment.live or (result.tokens[first] != NO_TOKEN and first not in result.failures):
                continue
            answer = self.answers.get(segment.job)
            if answer is not None and answer.job.generation == segment.generation and not answer.job.drafts_in_flight:
                self.fail(
                    answer.group,
                    result.failures.get(first) or no_token_error(answer.job, answer.matcher is not None),
                )

    def _complete(self, answer: OpenAnswer, reason: FinishReason) -> None:
        """Complete an answer whose job has ended, and its request with the last answer."""
        self._forget(answer)
        answer.finish(reason)
        if (report := answer.cache_report) is not None and report.reason is not None:
            self._measurements.recomputed_tokens[report.reason.value] += report.recomputed_tokens
        if not answer.group.open:
            del self.by_id[answer.group.handle.id]
            self._measurements.requests_finished += 1

    def fail(self, answers: AnswerGroup, error: CortexError) -> None:
        """Fail one request, with all its answers."""
        for answer in answers.open:
            self._scheduler.finish(answer.job.id, FinishReason.ERROR, RequestState.FAILED)
            self._forget(answer)
        del self.by_id[answers.handle.id]
        answers.handle.fail(error)

    def _forget(self, answer: OpenAnswer) -> None:
        """Drop an answer that has ended, its processors, its drafts and its adapter if that is unused now."""
        self._constrainable -= answer.can_be_constrained
        del self.answers[answer.job.id]
        if answer.job.has_logits_processors:
            del self._processors[answer.job.id]
        if self._speculation is not None:
            self._speculation.end(answer.job)
        if answer.job.adapter:
            self._adapters.free_unused(self._scheduler.jobs)

    def fail_all(self, error: CortexError) -> None:
        """Fail every request. The scheduler must have dropped their jobs."""
        self.answers.clear()
        self._constrainable = 0
        self._processors.clear()
        while self.by_id:
            self.by_id.popitem()[1].handle.fail(error)

    def forget(self) -> None:
        """Drop every request, without telling anybody. The caller fails their handles."""
        self.answers.clear()
        self._constrainable = 0
        self.by_id.clear()
        self._processors.clear()
