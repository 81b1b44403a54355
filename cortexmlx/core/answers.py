"""The answers of one request while they grow: their text, log-probabilities, timings and events."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.text import TextDelta, TextStream, ThinkingBudget, ThinkingLimit
from cortexmlx.errors import (
    CortexError,
    FormRefused,
    LogitsProcessorError,
    NoTokenToChoose,
    StructuredOutputError,
)
from cortexmlx.scheduling.job import Job
from cortexmlx.structured.matcher import Matcher, is_form_error
from cortexmlx.types.cache_report import CacheReport
from cortexmlx.types.logprobs import PromptLogprobs, TokenLogprob
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import Completion, FinishReason, QueuedRequest, RequestState, Timings, TokenEvent, Usage
from cortexmlx.types.sampling_params import SamplingParams

PROGRESS_SECONDS = 0.1
"""Seconds between two progress events at least."""

if TYPE_CHECKING:
    from cortexmlx.execution.boundary import StepResult, TokenScores, Vector
    from cortexmlx.scheduling.plan import Segment


class PromptScores:
    """Collects, step by step, log-probabilities of a prompt's tokens and of the `top` likeliest at each position."""

    def __init__(self, prompt: Sequence[int], top: int) -> None:
        self._prompt = prompt
        self._scored_count = 1
        self._logprobs = np.full(len(prompt), np.nan, np.float32)
        self._top_ids = np.empty((len(prompt), top), np.int32)
        self._top_logprobs = np.empty((len(prompt), top), np.float32)

    def add(self, positions: range, scores: TokenScores) -> None:
        """Add the log-probabilities of the tokens at `positions`. No earlier position may still be missing."""
        assert positions.start <= self._scored_count, "tokens of a prompt were left out"
        position_slice, top = slice(positions.start, positions.stop), self._top_ids.shape[1]
        self._logprobs[position_slice] = scores.logprobs
        self._top_ids[position_slice], self._top_logprobs[position_slice] = (
            scores.top_ids[:, :top],
            scores.top_logprobs[:, :top],
        )
        self._scored_count = positions.stop

    def to_logprobs(self) -> PromptLogprobs:
        """Return the log-probabilities collected so far."""
        n = self._scored_count
        return PromptLogprobs(self._prompt[:n], self._logprobs[:n], self._top_ids[:n], self._top_logprobs[:n])


class AnswerGroup:
    """All answers of one request during generation. Their events go to `handle`; the last event has the completion."""

    def __init__(self, request: QueuedRequest, handle: RequestHandle) -> None:
        self.request = request
        self.handle = handle
        self.open: list[OpenAnswer] = []
        top = request.params.prompt_logprobs
        self.scores = None if top is None else PromptScores(request.prompt, top)
        self._completions: list[Completion] = []
        best_of = request.params.best_of
        self._chosen_later = best_of is not None and best_of > request.params.n

    @property
    def generated_tokens(self) -> int:
        """How many tokens all answers have so far."""
        return sum(a.job.num_generated for a in self.open) + sum(c.usage.completion_tokens for c in self._completions)

    def add_pooled_part(self, part: Vector) -> None:
        """Add a step's sum of hidden states to the prompt's sum so far, or set the prompt's last logits."""
        self.handle.pooled = part if self.handle.pooled is None else self.handle.pooled + part

    def begin_decoding(self) -> None:
        """Note that an answer has its first token, so the whole prompt is computed."""
        self.handle.advance(RequestState.DECODING)
        if self.scores is not None and self.handle.prompt_logprobs is None:
            self.handle.prompt_logprobs = self.scores.to_logprobs()

    def send_event(self, event: TokenEvent) -> None:
        """Push an event to the request's handle, unless the answers to keep are chosen only at the end (`best_of`)."""
        if not self._chosen_later:
            self.handle.push(event)

    def complete_answer(self, answer: OpenAnswer, rest: TextDelta, completion: Completion) -> None:
        """Complete one answer, with the unsent `rest` of its text. The last answer completes the request."""
        self.open.remove(answer)
        self._completions.append(completion)
        reason = completion.finish_reason
        last = TokenEvent(
            rest.text,
            finish_reason=reason,
            index=answer.index,
            thinking=rest.thinking,
            tool_calls=rest.calls,
            notes=completion.notes,
        )
        if self.open:
            self.send_event(last)
            return
        completions = sorted(self._completions, key=lambda c: c.index)
        if self._chosen_later:
            completions = sorted(completions, key=_rank_logprob, reverse=True)[: self.request.params.n]
            completions = [replace(c, index=i) for i, c in enumerate(completions)]
            last = TokenEvent("", finish_reason=completions[0].finish_reason)
        if self.scores is not None:
            prompt_logprobs = self.handle.prompt_logprobs or self.scores.to_logprobs()
            completions = [replace(c, prompt_logprobs=prompt_logprobs) for c in completions]
        self.handle.push(replace(last, completion=replace(completions[0], others=tuple(completions[1:]))))


class OpenAnswer:
    """One answer of a request, while it is generated."""

    def __init__(
        self,
        answers: AnswerGroup,
        job: Job,
        index: int,
        text: TextStream,
        matcher: Matcher | None = None,
        thinking: ThinkingLimit | None = None,
    ) -> None:
        self.group = answers
        """It and the other answers of its request."""
        self.request = answers.request
        self.only_scores = answers.request.params.only_scores
        self.job = job
        self.index = index
        self.matcher = matcher
        """Its way through the grammar that it follows; None: it is free."""
        self.budget = None if thinking is None else ThinkingBudget(thinking, text)
        """The tokens that are left for its thoughts; None: there is no limit."""
        if self.budget is not None:
            job.max_drafts = self.budget.max_drafts
        self.start_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self._dropped_count = self._drafted_count = self._accepted_count = 0
        self._reading_from: int | None = None
        self._last_progress_time = -math.inf
        self.cache_report: CacheReport | None = None
        """What of the prompt was found and why the rest was not, once its first answer has ended."""
        self._text = text
        self._logprobs: list[TokenLogprob] = []
        answers.open.append(self)

    @property
    def can_be_constrained(self) -> bool:
        """Whether a grammar or a thinking limit may restrict its tokens at some point."""
        return self.matcher is not None or self.budget is not None

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar or the thinking limit may restrict the next tokens."""
        return self.matcher is not None or (self.budget is not None and self.budget.may_force_soon)

    def forced_tokens(self) -> Sequence[int]:
        """Return the tokens that must come next because the grammar allows no others; often there are none."""
        if self.matcher is None or (self.budget is not None and self.budget.forced_tokens()):
            return ()
        return self.matcher.forced_tokens

    def begin_step(self, segment: Segment, now: float) -> None:
        """Note that a step computes `segment`. Send progress if the prompt takes several steps."""
        total, first = len(self.job.tokens), segment.first
        has_more, is_first_step = first + segment.count < total, self.start_time is None
        if not (is_first_step or has_more or self._reading_from is not None):
            return
        handle, reading_from = self.group.handle, first if self._reading_from is None else self._reading_from
        progress = Progress("prefilling", first, total, cached=reading_from)
        if is_first_step:
            self.start_time = now
            handle.advance(RequestState.PREFILLING)
            if self.index == 0:
                handle.progress = progress
        if not has_more and self._reading_from is None:
            return
        self._reading_from = reading_from if has_more else None
        handle.progress = progress
        if now - self._last_progress_time >= PROGRESS_SECONDS:
            self._last_progress_time = now
            self.group.send_event(TokenEvent("", index=self.index, progress=progress))

    def add_prompt_scores(self, positions: range, scores: TokenScores) -> None:
        """Add the log-probabilities of the prompt's tokens at the positions `positions`."""
        assert self.group.scores is not None
        self.group.scores.add(positions, scores)

    def add_token(self, token: int, now: float, logprob: TokenLogprob | None = None, stop_token: bool = False) -> bool:
        """Add a token that came at `now`. A `stop_token` has no text. Return whether a stop string is complete."""
        self.last_token_time = now
        if self.first_token_time is None:
            self.first_token_time = now
            self.group.begin_decoding()
        if logprob is not None:
            self._logprobs.append(logprob)
        text = self._text
        delta = TextDelta() if stop_token else text.push(token)
        if self.budget is not None:
            self.budget.count_token(token)
            self.job.max_drafts = self.budget.max_drafts
        event_logprob = logprob if self.request.params.logprobs is not None else None
        dropped_count, self._dropped_count = (
            len(self.job.dropped_tokens) - self._dropped_count,
            len(self.job.dropped_tokens),
        )
        event = TokenEvent(
            delta.text,
            token,
            event_logprob,
            index=self.index,
            dropped=dropped_count,
            thinking=delta.thinking,
            tool_calls=delta.calls,
        )
        self.group.send_event(event)
        return text.stopped

    def count_drafts(self, drafted_count: int, accepted_count: int) -> None:
        """Count the drafted tokens that were verified, and how many of them were accepted."""
        self._drafted_count += drafted_count
        self._accepted_count += accepted_count

    def finish(self, reason: FinishReason) -> None:
        """Build the completion and end the answer."""
        rest = self._text.finish(turn_ended=reason is FinishReason.STOP and not self._text.stopped)
        params, calls = self.request.params, self._text.calls
        if calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        trace, job = self.group.handle.trace, self.job
        if trace is not None and self.index == 0 and self.start_time is not None and not job.dropped_tokens:
            is_computed = self.first_token_time is not None and not params.only_scores
            self.cache_report = trace.finish(
                job.cached, job.loaded, job.cached_chain, job.output if is_computed else None
            )
        completion = Completion(
            text=self._text.text,
            token_ids=() if params.only_scores else tuple(self.job.output),
            finish_reason=reason,
            usage=Usage(
                len(self.request.prompt),
                0 if params.only_scores else self.job.num_generated,
                self.job.cached,
                len(self.job.dropped_tokens),
                self._text.thinking_tokens,
                self._drafted_count,
                self._accepted_count,
            ),
            timings=self._timings(),
            logprobs=None if params.logprobs is None else tuple(self._logprobs),
            index=self.index,
            cumulative_logprob=sum(p.logprob for p in self._logprobs) if self._logprobs else None,
            thinking=self._text.thinking,
            raw_text=self._text.raw_text,
            structured=params.form,
            notes=self._completion_notes(),
            tool_calls=calls,
            stop_string=self._text.stop_string,
            cache_report=self.cache_report,
        )
        self.group.complete_answer(self, rest, completion)

    def _completion_notes(self) -> tuple[str, ...]:
        """Return the completion's notes: which constraints are not enforced, and what is wrong with its tool calls."""
        text_notes = tuple(self._text.notes)
        if self.matcher is not None:
            tool_notes = () if self.request.calls is None else self.request.calls.notes
            return (*self.matcher.grammar.notes, *tool_notes, *text_notes)
        unenforced_notes = (
            ("calls are not enforced by a grammar with this model",) if self.request.calls is not None else ()
        )
        return (*unenforced_notes, *text_notes)

    def _timings(self) -> Timings:
        now = time.perf_counter()
        submitted, computed_tokens = self.request.submit_time, self.job.kept_prompt_length - self.job.cached
        started, first = self.start_time or now, self.first_token_time or now
        prefilling, decoding = first - started, (self.last_token_time or now) - first
        return Timings(
            queued=started - submitted,
            ttft=first - submitted,
            total=now - submitted,
            prefill_tokens_per_second=computed_tokens / prefilling if prefilling > 0 else 0.0,
            decode_tokens_per_second=(self.job.num_generated - 1) / decoding if decoding > 0 else 0.0,
        )


def logprob_of(token: int, row: int, top: int, result: StepResult) -> TokenLogprob | None:
    """Return the log-probabilities of `token` and the `top` likeliest in a result's `row`; None if not computed."""
    if result.logprobs is None:
        return None
    likeliest: tuple[tuple[int, float], ...] = ()
    if top and result.top_ids is not None and result.top_logprobs is not None:
        likeliest = tuple(zip(result.top_ids[row], result.top_logprobs[row], strict=True))[:top]
    return TokenLogprob(token, result.logprobs[row], likeliest)


NAN_ADVICE = (
    "Its weights may be damaged, so download it again; or its numbers are too large for float16, so take a bfloat16 or "
    "float32 version of it"
)
"""What to do with a model that computes NaN."""


def no_token_error(job: Job, has_grammar: bool) -> CortexError:
    """Return the error for a request whose logits leave no token to choose."""
    position_text = f"after {job.prompt_length} tokens of the prompt and {job.num_generated} of the answer"
    if has_grammar:
        return StructuredOutputError(
            f"no token is left to choose {position_text}: each one is excluded by the form or the tools that were "
            f"asked for{', or by the logits processors' * job.has_logits_processors}"
        )
    if job.has_logits_processors:
        return LogitsProcessorError(
            f"the logits processors left no token to choose {position_text}: what they return is NaN or all -inf. "
            "Leave at least one finite logit"
        )
    if job.request.adapter is not None:
        return NoTokenToChoose(
            f"the logits of the model with the adapter {job.request.adapter!r} are NaN, or all -inf, {position_text}: "
            "no token can be chosen. Ask without it: if that works, the adapter's numbers or its scale are too large"
        )
    return NoTokenToChoose(
        f"the model's logits are NaN, or all -inf, {position_text}: no token can be chosen. {NAN_ADVICE}"
    )


def grammar_error(job: Job, reason: str) -> StructuredOutputError:
    """Return the error for an answer that its grammar cannot continue: FormRefused if the form itself is to blame."""
    message = f"the answer cannot have the form that was asked for, after {job.num_generated} tokens of it: {reason}. "
    if is_form_error(reason):
        return FormRefused(f"{message}Simplify the schema or the expression, or the schemas of the tools")
    return StructuredOutputError(f"{message}Ask again")


def _rank_logprob(completion: Completion) -> float:
    """Return the log-probability to rank an answer by: -inf if it was cancelled before its first token."""
    logprob = completion.cumulative_logprob
    return -math.inf if logprob is None else logprob


def request_for_answer(request: QueuedRequest, index: int) -> QueuedRequest:
    """Return the request for the job of answer `index`. The job of the first answer also scores the prompt.

    If the prompt is only scored, the job gets all of it but the last token, and generates one token. The logits of that
    step score the prompt's last token; the generated token is dropped.
    """
    params = job_params(request.params)
    job_prompt = request.prompt[:-1] or request.prompt if request.params.only_scores else request.prompt
    scored_prompt = request.prompt if index == 0 and params.prompt_logprobs is not None else ()
    return replace(
        request, prompt=job_prompt, params=params, seed=answer_seed(request.seed, index), scored_tokens=scored_prompt
    )


def job_params(params: SamplingParams) -> SamplingParams:
    """Return the parameters of a request's jobs: with one token to score a prompt, log-probabilities for `best_of`."""
    if params.only_scores:
        return SamplingParams(max_tokens=1, prompt_logprobs=params.prompt_logprobs, priority=params.priority)
    if params.best_of is None or params.logprobs is not None:
        return params
    params_copy = copy(params)  # `replace` would check all token ids again, for each answer, on the engine's thread
    object.__setattr__(params_copy, "logprobs", 0)
    return params_copy


def answer_seed(seed: int, index: int) -> int:
    """Return the sampling seed of answer `index` of a request. The first answer has the request's own seed."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63 if index else seed
