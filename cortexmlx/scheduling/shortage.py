"""What happens with requests that do not fit: too long for the context or the cache, or refused memory by the system.
Without mlx.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from cortexmlx.errors import KVCacheFull, OutOfMemory, PromptTooLong
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.scheduling.latency import MIN_PIECE
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams

_MAX_LENGTH = 2**31 - 1
"""Tokens of a request that nothing else bounds: positions and counts are 32-bit integers."""


@dataclass(frozen=True)
class LengthLimits:
    """How long prompts and answers may be: within the model's `context`, and together within `max_request_tokens`
    (None: only the context bounds them). With a policy `keep`, old tokens are dropped from a row, so that its text may
    be longer than the context.
    """

    context: int
    max_request_tokens: int | None = None
    keep: KeepPolicy | None = None

    @property
    def max_tokens(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return min(self.context if self.keep is None else _MAX_LENGTH, self.max_request_tokens or _MAX_LENGTH)

    def check_prompt(self, tokens: int, capacity: int, params: SamplingParams, at_least: bool = False) -> None:
        """Raise PromptTooLong if a prompt of `tokens` tokens, or more if `at_least`, leaves no room for one token of an
        answer: in the model's context, in the longest request, or in a cache of `capacity` tokens.

        A prompt that is only scored needs no room for its last token. A prompt that is scored must be kept whole.
        """
        kept = capacity if self.keep is None or self.keep.max_row_tokens > capacity else _MAX_LENGTH
        too_long = partial(_too_long_error, tokens, at_least, min(kept, self.max_tokens - 1) + params.only_scores)
        tokens -= params.only_scores
        if self.keep is not None and params.prompt_logprobs is not None and tokens > self.keep.max_row_tokens:
            raise too_long(
                f"a row keeps {self.keep.max_row_tokens} at most (keep_first + 2 x keep_last), but prompt_logprobs are "
                "of the whole text: shorten the prompt or leave keep_last out",
            )
        if self.keep is None and tokens + 1 > self.context:
            holds = f" and the KV cache holds {capacity}" if capacity < self.context else ""
            raise too_long(f"the model's context is {self.context}{holds}: shorten the prompt")
        if (tokens if self.keep is None else min(tokens, self.keep.max_row_tokens)) > capacity:
            reason = f"the KV cache holds {capacity}: raise the KV memory (--kv-memory) or shorten the prompt"
            raise too_long(reason)
        if tokens + 1 > self.max_tokens:
            reason = "with its answer: shorten the prompt or raise max_request_tokens"
            raise too_long(f"a request may have {self.max_tokens} {reason}")

    def check_request(self, request: QueuedRequest, capacity: int) -> None:
        """Check a request's prompt as `check_prompt` does. If it has no answer, it needs no room for one."""
        tokens = len(request.prompt)
        if request.pooling is None:
            self.check_prompt(tokens, capacity, request.params)
        elif tokens > (limit := min(self.context, self.max_request_tokens or _MAX_LENGTH, capacity)):
            raise PromptTooLong(
                f"the text has {tokens} tokens, and the model's context is {self.context}, a request may have "
                f"{self.max_request_tokens or 'any number of'} and the KV cache holds {capacity}: shorten the text, or "
                "raise what is too small (max_request_tokens, --kv-memory)",
                tokens=tokens,
                limit=limit,
            )

    def max_new_tokens(self, request: QueuedRequest, capacity: int) -> int:
        """Return how many tokens an answer of a request may have."""
        if request.pooling is not None:
            return 0
        available_tokens = self.max_answer_tokens(len(request.prompt), capacity)
        requested_tokens = request.params.max_tokens
        return available_tokens if requested_tokens is None else min(requested_tokens, available_tokens)

    def max_scored_tokens(self, capacity: int) -> int:
        """Return how long a scored text may be for a cache of `capacity` tokens: the text's last one is not cached."""
        return min(self.max_tokens, (capacity if self.keep is None else min(capacity, self.keep.max_row_tokens)) + 1)

    def max_answer_tokens(self, prompt: int, capacity: int) -> int:
        """Return how long an answer to `prompt` tokens may be. Its last token needs none of the cache's `capacity`."""
        max_tokens = self.max_tokens - prompt
        return (
            max_tokens
            if self.keep is not None and self.keep.max_row_tokens <= capacity
            else min(max_tokens, capacity + 1 - prompt)
        )


def _too_long_error(tokens: int, at_least: bool, limit: int, reason: str) -> PromptTooLong:
    """Return the error for a prompt of `tokens` tokens (or more, if `at_least`), which may have `limit`."""
    count = f"at least {tokens}" if at_least else tokens
    return PromptTooLong(f"the prompt has {count} tokens and {reason}", tokens=tokens, limit=limit)


def limit_answer(job: Job, capacity: int) -> None:
    """Limit a job's answer to end when a cache of `capacity` tokens is full. The last token needs no place there."""
    if job.is_pooling or (job.keep is not None and job.keep.max_row_tokens <= capacity):
        return
    max_tokens = capacity + 1 - job.prompt_length + len(job.dropped_tokens)
    job.max_new_tokens = max(job.num_generated, min(job.max_new_tokens, max_tokens))


def limit_stuck_jobs(jobs: Iterable[Job], capacity: int) -> list[Job]:
    """Return the jobs that can get no further token in a cache of `capacity` tokens, and limit their answers to it.
    Their answer has reached that limit, or their prompt alone is too long. Other jobs keep their limits, because the
    cache may grow before they fill it.
    """
    stuck_jobs = []
    for job in jobs:
        previous_limit = job.max_new_tokens
        limit_answer(job, capacity)
        if job.prompt_length > capacity if job.is_pooling else job.num_generated >= job.max_new_tokens:
            stuck_jobs.append(job)
        else:
            job.max_new_tokens = previous_limit
    return stuck_jobs


def largest_job(plan: StepPlan | None, jobs: Iterable[Job]) -> Job | None:
    """Return the job that takes most of a step's memory: the one of which it computes most tokens, or, among equals,
    the one with the longest text.

    Without a step, or if no job is in it, all running jobs count. None if none runs.
    """
    tokens_by_job = {segment.job: segment.count for segment in plan.segments} if plan is not None else {}
    candidates = [job for job in jobs if (job.id in tokens_by_job if tokens_by_job else job.is_running)]
    return max(candidates, key=lambda job: (tokens_by_job.get(job.id, 0), len(job.tokens)), default=None)


def cache_full_error(job: Job, capacity: int) -> KVCacheFull:
    """Return the error for a job whose prompt, or an image in it, does not fit into the cache that the system
    allowed.
    """
    full = f"the prompt has {job.prompt_length} tokens and the KV cache holds {capacity}"
    if job.prompt_length <= capacity:
        full = "an image is computed in one step, and the KV cache has no room for all its tokens at once"
    return KVCacheFull(
        f"{full}, for the system refuses it more memory now: free some and ask again, or shorten the prompt"
    )


def out_of_memory_error(job: Job, refusal: str) -> OutOfMemory:
    """Return the error for a job that was refused memory three times in a row without progress."""
    return OutOfMemory(
        f"a step of this request, which has {len(job.tokens)} tokens, was refused memory, and again when nothing was "
        f"cached any more and fewer requests ran ({refusal}): free memory, or ask for less with a shorter prompt, a "
        "smaller prefill_budget or a smaller KV memory"
    )


# After memory was refused: smaller steps for a while, and growth that is asked for again.


STEPS_TO_RELAX = 64
"""After this many good steps in a row, twice as much is tried."""

MAX_STEPS = 64 * STEPS_TO_RELAX
"""After this many steps at most, what was refused is tried again."""


class Backoff:
    """How large a step may be after memory was refused: at most `rows` rows and `tokens` prompt tokens. Before any
    refusal these are `most_rows` and `most_tokens`.

    Memory may be free again later, when another app has ended. So after `STEPS_TO_RELAX` good steps both are doubled,
    until nothing is held back.
    """

    def __init__(self, most_rows: int, most_tokens: int) -> None:
        self.most_rows = self.rows = most_rows
        self.most_tokens = self.tokens = most_tokens
        self.holds_back = False
        """Whether a refusal has lowered the bounds: a step could have more rows, or more tokens."""
        self._good_steps = 0

    def tighten(self, rows: int) -> None:
        """Allow at most `rows` rows, at least one, and half as many tokens, because memory was refused."""
        self.rows = max(1, min(self.rows, rows))
        self.tokens = max(min(MIN_PIECE, self.most_tokens), self.tokens // 2)
        self._good_steps = 0
        self._update_holds_back()

    def relax(self) -> bool:
        """Count a good step, and loosen the bounds after many. Return whether the next steps may have more rows."""
        if not self.holds_back:
            return False
        self._good_steps += 1
        if self._good_steps < STEPS_TO_RELAX:
            return False
        self._good_steps = 0
        self.rows = min(self.most_rows, 2 * self.rows)
        self.tokens = min(self.most_tokens, 2 * self.tokens)
        self._update_holds_back()
        return True

    def _update_holds_back(self) -> None:
        """Note whether the bounds are below those before any refusal."""
        self.holds_back = (self.rows, self.tokens) != (self.most_rows, self.most_tokens)


class RefusalRetry:
    """Decides when something that was refused memory is tried again while requests run: a growth of the cache, or a
    large piece of a prompt. That is after `STEPS_TO_RELAX` good steps, and after each further refusal in a row twice as
    many, up to `MAX_STEPS`. A refusal may cost all rows a new beginning.
    """

    def __init__(self) -> None:
        self.wait = self._good_steps = 0
        """The good steps to wait for; 0: nothing was refused lately, and nobody need ask."""

    @property
    def must_wait(self) -> bool:
        """Whether the last refusal is too recent to try again."""
        return self._good_steps < self.wait

    def note_refusal(self) -> None:
        """Note a refusal, and wait longer than the last time."""
        self.wait, self._good_steps = min(max(STEPS_TO_RELAX, 2 * self.wait), MAX_STEPS), 0

    def note_good_step(self) -> bool:
        """Count a good step. Return whether this is the first one after which to try again."""
        if not self.wait:
            return False
        self._good_steps += 1
        is_due = self._good_steps == self.wait
        if self._good_steps >= 2 * self.wait:  # nothing was refused since
            self.wait = 0
        return is_due
