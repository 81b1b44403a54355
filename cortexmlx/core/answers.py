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
    """Collects the log-probabilities of a prompt's tokens, and of the `top` likeliest tokens at each place, step by
    step.
    """

    def __init__(self, prompt: Sequence[int], top: int) -> None:
        self._prompt = prompt
        self._known = 1
        self._logprobs = np.full(len(prompt), np.nan, np.float32)
        self._top_ids = np.empty((len(prompt), top), np.int32)
        self._top_logprobs = np.empty((len(prompt), top), np.float32)

    def add(self, where: range, scores: TokenScores) -> None:
        """Add the log-probabilities of the tokens at the positions `where`, which are the first ones that are not known
        yet.
        """
        assert where.start <= self._known, "tokens of a prompt were left out"
        place, top = slice(where.start, where.stop), self._top_ids.shape[1]
        self._logprobs[place] = scores.logprobs
        self._top_ids[place], self._top_logprobs[place] = scores.top_ids[:, :top], scores.top_logprobs[:, :top]
        self._known = where.stop

    def to_logprobs(self) -> PromptLogprobs:
        """Return the log-probabilities collected so far."""
        n = self._known
        return PromptLogprobs(self._prompt[:n], self._logprobs[:n], self._top_ids[:n], self._top_logprobs[:n])


class AnswerGroup:
    """All answers of one request, while they are generated. Their events go to its `handle`; the last one carries the
    completion.
    """

    def __init__(self, request: QueuedRequest, handle: RequestHandle) -> None:
        self.request = request
        self.handle = handle
        self.open: list[OpenAnswer] = []
        top = request.params.prompt_logprobs
        self.scores = None if top is None else PromptScores(request.prompt, top)
        self._done: list[Completion] = []
        best_of = request.params.best_of
        self._chosen_later = best_of is not None and best_of > request.params.n

    @property
    def generated_tokens(self) -> int:
        """How many tokens all answers have so far."""
        return sum(a.job.num_generated for a in self.open) + sum(c.usage.completion_tokens for c in self._done)

    def add_pooled(self, part: Vector) -> None:
        """Add what a step computed of the prompt's pooled hidden states or logits."""
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
        """Complete one answer, with the `rest` of its text that was not sent yet. The last answer completes the
        request.
        """
        self.open.remove(answer)
        self._done.append(completion)
        reason = completion.finish_reason
        last = TokenEvent(
            rest.text, finish_reason=reason, index=answer.index, thinking=rest.thinking, tool_calls=rest.calls
        )
        if self.open:
            self.send_event(last)
            return
        kept = sorted(self._done, key=lambda c: c.index)
        if self._chosen_later:
            kept = sorted(kept, key=_rank_logprob, reverse=True)[: self.request.params.n]
            kept = [replace(c, index=i) for i, c in enumerate(kept)]
            last = TokenEvent("", finish_reason=kept[0].finish_reason)
        if self.scores is not None:
            listed = self.handle.prompt_logprobs or self.scores.to_logprobs()
            kept = [replace(c, prompt_logprobs=listed) for c in kept]
        self.handle.push(replace(last, completion=replace(kept[0], others=tuple(kept[1:]))))


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
        self.of_request = answers
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
            job.most_drafts = self.budget.most_drafts
        self.started: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self._dropped = self._drafted = self._accepted = 0
        self._reading_from: int | None = None
        self._told = -math.inf
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
        """Note that a step computes `segment` of its tokens. If the prompt takes several steps, or the tokens of an
        answer that lost its row, push a progress event.
        """
        total, first = len(self.job.tokens), segment.first
        more, beginning = first + segment.count < total, self.started is None
        if not (beginning or more or self._reading_from is not None):
            return
        handle, begun = self.of_request.handle, first if self._reading_from is None else self._reading_from
        progress = Progress("prefilling", first, total, cached=begun)
        if beginning:
            self.started = now
            handle.advance(RequestState.PREFILLING)
            if self.index == 0:
                handle.progress = progress
        if not more and self._reading_from is None:
            return
        self._reading_from = begun if more else None
        handle.progress = progress
        if now - self._told >= PROGRESS_SECONDS:
            self._told = now
            self.of_request.send_event(TokenEvent("", index=self.index, progress=progress))

    def add_prompt_scores(self, where: range, scores: TokenScores) -> None:
        """Add the log-probabilities of the prompt's tokens at the positions `where`."""
        assert self.of_request.scores is not None
        self.of_request.scores.add(where, scores)

    def add_token(self, token: int, now: float, logprob: TokenLogprob | None = None, stop_token: bool = False) -> bool:
        """Add the next token, which came at `now` on the performance counter. A `stop_token` has no text. Return
        whether a stop string is complete.
        """
        self.last = now
        if self.first is None:
            self.first = now
            self.of_request.begin_decoding()
        if logprob is not None:
            self._logprobs.append(logprob)
        text = self._text
        piece = TextDelta() if stop_token else text.push(token)
        if self.budget is not None:
            self.budget.count_token(token)
            self.job.most_drafts = self.budget.most_drafts
        shown = logprob if self.request.params.logprobs is not None else None
        dropped, self._dropped = len(self.job.dropped) - self._dropped, len(self.job.dropped)
        told = TokenEvent(
            piece.text,
            token,
            shown,
            index=self.index,
            dropped=dropped,
            thinking=piece.thinking,
            tool_calls=piece.calls,
        )
        self.of_request.send_event(told)
        return text.stopped

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Count the drafted tokens that were verified, and those of them that were accepted."""
        self._drafted += drafted
        self._accepted += accepted

    def finish(self, reason: FinishReason) -> None:
        """Build the completion and end the answer."""
        rest = self._text.finish(ended=reason is FinishReason.STOP and not self._text.stopped)
        params, calls = self.request.params, self._text.calls
        if calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        completion = Completion(
            text=self._text.text,
            token_ids=() if params.only_scores else tuple(self.job.output),
            finish_reason=reason,
            usage=Usage(
                len(self.request.prompt),
                0 if params.only_scores else self.job.num_generated,
                self.job.cached,
                len(self.job.dropped),
                self._text.thinking_tokens,
                self._drafted,
                self._accepted,
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
        )
        self.of_request.complete_answer(self, rest, completion)

    def _completion_notes(self) -> tuple[str, ...]:
        """Return the completion's notes: what of its form is not enforced, and what is wrong with its tool calls."""
        own = tuple(self._text.notes)
        if self.matcher is not None:
            offered = () if self.request.calls is None else self.request.calls.notes
            return (*self.matcher.grammar.notes, *offered, *own)
        free = ("calls are not enforced by a grammar with this model",) if self.request.calls is not None else ()
        return (*free, *own)

    def _timings(self) -> Timings:
        now = time.perf_counter()
        submitted, computed = self.request.submitted, self.job.kept_prompt_length - self.job.cached
        started, first = self.started or now, self.first or now
        prefilling, decoding = first - started, (self.last or now) - first
        return Timings(
            queued=started - submitted,
            ttft=first - submitted,
            total=now - submitted,
            prefill_tokens_per_second=computed / prefilling if prefilling > 0 else 0.0,
            decode_tokens_per_second=(self.job.num_generated - 1) / decoding if decoding > 0 else 0.0,
        )


def logprob_of(token: int, index: int, likeliest: int, result: StepResult) -> TokenLogprob | None:
    """Return the log-probability of the token at `index` in a step's result, with those of the `likeliest` tokens at
    its place. None if the step computed none.
    """
    if result.logprobs is None:
        return None
    top: tuple[tuple[int, float], ...] = ()
    if likeliest and result.top_ids is not None and result.top_logprobs is not None:
        top = tuple(zip(result.top_ids[index], result.top_logprobs[index], strict=True))[:likeliest]
    return TokenLogprob(token, result.logprobs[index], top)


NAN_ADVICE = (
    "Its weights may be damaged, so download it again; or its numbers are too large for float16, so take a bfloat16 or "
    "float32 version of it"
)
"""What to do with a model that computes NaN."""


def no_token_error(job: Job, has_grammar: bool) -> CortexError:
    """Return the error for a request whose logits leave no token to choose."""
    where = f"after {job.prompt_length} tokens of the prompt and {job.num_generated} of the answer"
    if has_grammar:
        return StructuredOutputError(
            f"no token is left to choose {where}: each one is excluded by the form or the tools that were asked for"
            f"{', or by the logits processors' * job.processed}"
        )
    if job.processed:
        return LogitsProcessorError(
            f"the logits processors left no token to choose {where}: what they return is NaN or all -inf. Leave at "
            "least one finite logit"
        )
    if job.request.adapter is not None:
        return NoTokenToChoose(
            f"the logits of the model with the adapter {job.request.adapter!r} are NaN, or all -inf, {where}: no token "
            "can be chosen. Ask without it: if that works, the adapter's numbers or its scale are too large"
        )
    return NoTokenToChoose(f"the model's logits are NaN, or all -inf, {where}: no token can be chosen. {NAN_ADVICE}")


def grammar_error(job: Job, why: str) -> StructuredOutputError:
    """Return the error for an answer that its grammar cannot continue: FormRefused if the form itself is to blame."""
    message = f"the answer cannot have the form that was asked for, after {job.num_generated} tokens of it: {why}. "
    if is_form_error(why):
        return FormRefused(f"{message}Simplify the schema or the expression, or the schemas of the tools")
    return StructuredOutputError(f"{message}Ask again")


def _rank_logprob(completion: Completion) -> float:
    """Return the log-probability to rank an answer by: -inf if it was cancelled before its first token."""
    known = completion.cumulative_logprob
    return -math.inf if known is None else known


def request_for_answer(request: QueuedRequest, index: int) -> QueuedRequest:
    """Return the request for the job of answer `index`. The job of the first answer also scores the prompt.

    If the prompt is only scored, the job gets all of it but the last token, and generates one token. The logits of that
    step score the prompt's last token; the generated token is dropped.
    """
    params = job_params(request.params)
    computed = request.prompt[:-1] or request.prompt if request.params.only_scores else request.prompt
    whole = request.prompt if index == 0 and params.prompt_logprobs is not None else ()
    return replace(request, prompt=computed, params=params, seed=answer_seed(request.seed, index), scored=whole)


def job_params(params: SamplingParams) -> SamplingParams:
    """Return `params` as the jobs need them: with log-probabilities for `best_of`, and one token to score a prompt
    alone.
    """
    if params.only_scores:
        return SamplingParams(max_tokens=1, prompt_logprobs=params.prompt_logprobs, priority=params.priority)
    if params.best_of is None or params.logprobs is not None:
        return params
    changed = copy(params)  # `replace` would check all token ids again, for each answer, on the engine's thread
    object.__setattr__(changed, "logprobs", 0)
    return changed


def answer_seed(seed: int, index: int) -> int:
    """Return the sampling seed of answer `index` of a request. The first answer has the request's own seed."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63 if index else seed
