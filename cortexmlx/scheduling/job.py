"""Job: one sequence on its way through the scheduler, as plain data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NewType

from cortexmlx.kv.prefix import AdapterSalt, Key, Salt
from cortexmlx.kv.snapshots import Row
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.types.request import FinishReason, QueuedRequest, RequestState
from cortexmlx.types.sampling_params import SamplingParams

JobId = NewType("JobId", int)
"""Names a job, and its sequence of blocks in the cache."""

SECONDS_PER_PRIORITY = 30.0
"""How many seconds earlier a request counts as having arrived for each step of priority. High priority overtakes, but
no request waits for ever.
"""

BACKGROUND_DELAY = 60.0
"""How many seconds later a background request counts as having arrived, at least half of them, so that watched requests
go first.
"""

LONG_ANSWER = 256
"""Tokens of answer that halve the other half of that delay. So the longest background requests begin first: a long
answer that begins last would run alone while other rows are empty.
"""


@dataclass(eq=False)
class Job:
    """One answer of a request, as the scheduler knows it."""

    id: JobId
    """Its number, and that of its sequence of blocks in the cache."""
    request: QueuedRequest
    """The request that it answers."""
    stop_ids: frozenset[int]
    """Tokens that end the answer."""
    max_new_tokens: int
    """How many tokens the answer may have."""
    arrival: float
    """When it arrived, on the scheduler's clock."""
    number: int
    """Its number by arrival."""
    keys: list[Key]
    """The keys of the full blocks of `tokens` in the prefix cache, as far as they are known."""
    fork_of: Job | None = None
    """The job whose prompt it begins with a copy of."""
    keep: KeepPolicy | None = None
    """Which tokens stay when the text outgrows the context; None: all tokens."""
    salt: str | None = None
    """It shares texts with jobs of the same salt only, and blocks only with those of them that also have its adapter
    (`block_salt`)."""
    state: RequestState = RequestState.WAITING
    generation: int = 0
    """A number that changes when the job loses its row. Results for an older generation are dropped."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are computed, or will be by planned steps."""
    num_stored_tokens: int = 0
    """Those of them whose keys and values are in the arena."""
    num_planned_outputs: int = 0
    """Tokens of the answer that are planned or committed."""
    num_scored_tokens: int = 1
    """Tokens of `request.scored` that have their log-probabilities. The first token needs none."""
    num_pooled_tokens: int = 0
    """Tokens of a request without an answer whose states are summed up, and those before the first of them."""
    reserved_tokens: int = 0
    """Tokens for which room is promised to it."""
    cached: int = 0
    """Tokens of the prompt that were found in the prefix cache, in memory or on disk."""
    loaded: int = 0
    """Those of them that were read from disk."""
    cached_chain: int = 0
    """Tokens of full blocks that were in memory, also where the job could not begin after them."""
    preemptions: int = 0
    """How often this job, one answer of its request, lost its row to other jobs."""
    row: Row = (-1, -1)
    """The name of its recurrent state."""
    state_at: int = 0
    """After how many tokens its recurrent state is; 0: no step has computed one."""
    snapshot_positions: set[int] = field(default_factory=set)
    """After which numbers of tokens a recurrent state, and what windows see, is to be kept."""
    spare_positions: set[int] = field(default_factory=set)
    """The same, while there is room to spare."""
    has_awaited_state: bool = False
    """Whether it has waited for another job's recurrent state."""
    has_awaited_images: bool = False
    """Whether it has waited for the features of its images, and has not begun since."""
    refused_at: int = 0
    """The most computed tokens that it had when memory was refused to a step in which its share was the largest."""
    refusals: int = 0
    """How many such refusals there were without progress in between."""
    drops: int = 0
    """How often it has dropped tokens."""
    start_number: int = 0
    """The number of its first row, in the order of beginning; 0: it has not begun."""
    price: int = 0
    """Tokens that its client has paid for its prompt."""
    paid_tokens: int = 0
    """Tokens that its client has paid in all."""
    max_drafts: int = sys.maxsize
    """How many of its next tokens may be drafted at most: the token after them may have to be one that depends on the
    text before it.
    """
    drafts: tuple[int, ...] = ()
    """Guessed next tokens, to be verified."""
    drafts_in_flight: tuple[int, ...] = ()
    """The guessed tokens that a step in flight verifies."""
    is_spoiled: bool = False
    """Whether wrong drafts may have left NaN in its last block: see `drafts.accept_drafts`."""
    finish_reason: FinishReason | None = None
    """Why it ended; None: it has not ended."""
    params: SamplingParams = field(init=False)
    """How its tokens are chosen, without the caller's functions and types: plain data that goes into plans."""
    adapter: int = field(init=False)
    """The number of its adapter in plans; 0: the base model."""
    has_logits_processors: bool = field(init=False)
    """Whether functions of the caller change its logits. The runner has them, under the job's id."""
    tokens: list[int] = field(init=False)
    """The prompt and the committed tokens, without those in `dropped_tokens`."""
    dropped_tokens: list[int] = field(init=False)
    """Tokens that `keep` has dropped, in order."""
    prompt_length: int = field(init=False)
    """Tokens of the prompt, dropped ones included."""
    order: tuple[float, int] = field(init=False)
    """Its place among the jobs: by arrival, `SECONDS_PER_PRIORITY` earlier for each step of priority, and later by its
    part of `BACKGROUND_DELAY`. Only `reset_arrival` changes it.
    """

    def __post_init__(self) -> None:
        request, answer = self.request, self.max_new_tokens
        self.adapter = 0 if request.adapter_key is None else request.adapter_key.number
        self.params, self.has_logits_processors = request.params, bool(request.params.logits_processors)
        if self.has_logits_processors or request.params.structured is not None or request.params.tools:
            self.params = copy(request.params)  # `replace` would check all values again
            for name, none in (("logits_processors", ()), ("structured", None), ("tools", ())):
                object.__setattr__(self.params, name, none)
        self.tokens = list(request.prompt)
        self.prompt_length = len(self.tokens)
        if request.pooling is not None:
            self.keep, self.num_pooled_tokens = None, request.pooling.first
        self.dropped_tokens = [] if self.keep is None else self.keep.remove_surplus(self.tokens)
        delay = BACKGROUND_DELAY * (0.5 + 0.5 / (1 + answer / LONG_ANSWER)) if request.background else 0.0
        self.order = (self.arrival - SECONDS_PER_PRIORITY * request.params.priority + delay, self.number)

    @property
    def block_salt(self) -> Salt:
        """The salt of its cached blocks: its own and its adapter's, since other adapters' keys and values differ."""
        adapter = self.request.adapter_key
        return self.salt if adapter is None else AdapterSalt(adapter.digest, self.salt)

    @property
    def position_shift(self) -> int:
        """The rotary position of an answer's token minus its index: see `ImageLayout`."""
        return 0 if self.request.images is None else self.request.images.shift

    @property
    def seed(self) -> int:
        """The seed with which its tokens are chosen."""
        return self.request.seed

    @property
    def client(self) -> str | None:
        """The client who sent the request."""
        return self.request.client

    @property
    def output(self) -> list[int]:
        """The generated tokens so far."""
        if self.keep is None or not self.dropped_tokens:
            return self.tokens[self.prompt_length :]
        first = self.keep.first
        return [*self.tokens[:first], *self.dropped_tokens, *self.tokens[first:]][self.prompt_length :]

    @property
    def num_generated(self) -> int:
        """How many tokens were generated and committed."""
        return len(self.tokens) + len(self.dropped_tokens) - self.prompt_length

    @property
    def kept_prompt_length(self) -> int:
        """How many tokens of the prompt its row begins with, after `keep` has dropped some."""
        return self.prompt_length - (0 if self.keep is None else self.keep.count_surplus(self.prompt_length))

    @property
    def max_total_tokens(self) -> int:
        """The most tokens, prompt included, that its row may have at any time."""
        total = self.prompt_length + self.max_new_tokens
        return total if self.keep is None else min(total, self.keep.max_row_tokens)

    @property
    def num_plannable(self) -> int:
        """How many more tokens can be planned before it ends or must drop some."""
        remaining_outputs = self.max_new_tokens - self.num_planned_outputs
        return (
            remaining_outputs
            if self.keep is None
            else min(remaining_outputs, self.keep.max_row_tokens - self.num_computed_tokens)
        )

    @property
    def must_drop_tokens(self) -> bool:
        """Whether it has to drop tokens from its row before its next one."""
        if self.keep is None or self.state is not RequestState.DECODING:
            return False
        return self.num_planned_outputs < self.max_new_tokens and self.num_plannable <= 0

    def lose_row(self) -> int:
        """Reset the job, whose row and blocks are gone. Drop the tokens that its policy drops; return how many."""
        self.state = RequestState.PREEMPTED
        self.generation += 1
        self.num_computed_tokens = self.num_stored_tokens = 0
        self.num_planned_outputs = self.num_generated
        self.drafts = self.drafts_in_flight = ()
        return self.drop_tokens()

    def drop_tokens(self) -> int:
        """Drop the tokens that the policy `keep` drops from a text of this length. Return how many were dropped."""
        removed_tokens = [] if self.keep is None else self.keep.remove_surplus(self.tokens)
        self.dropped_tokens += removed_tokens
        self.drops += bool(removed_tokens)
        return len(removed_tokens)

    @property
    def has_outgrown_row(self) -> bool:
        """Whether its answer is longer than a row, so that it would have ended without `keep`."""
        return self.keep is not None and self.num_generated > self.keep.max_row_tokens

    def reset_arrival(self, now: float) -> None:
        """Set its arrival to `now`, on the scheduler's clock, and its order accordingly. It must not be in a queue."""
        self.order = (self.order[0] + now - self.arrival, self.number)
        self.arrival = now

    @property
    def has_unscored_tokens(self) -> bool:
        """Whether tokens of its text still lack their log-probabilities."""
        return self.num_scored_tokens < len(self.request.scored_tokens)

    @property
    def is_pooling(self) -> bool:
        """Whether its result is its prompt's pooled states, not an answer. It ends with its prompt and takes no row."""
        return self.request.pooling is not None

    def num_sharable(self, tokens: int) -> int:
        """Return how many of its first `tokens` tokens it may share with other jobs in the prefix cache."""
        pooling_spec = self.request.pooling
        return tokens if pooling_spec is None else min(tokens, pooling_spec.shared)

    @property
    def num_reusable_tokens(self) -> int:
        """How many of its first tokens may be taken from the cache instead of computed: usually all but the last. While
        its text is scored, only tokens before the next one to score. If its states are pooled, only shared tokens
        before the next one to pool.
        """
        max_reusable = len(self.tokens) - 1
        if self.is_pooling:
            return self.num_sharable(min(max_reusable, self.num_pooled_tokens))
        return min(max_reusable, self.num_scored_tokens - 1) if self.has_unscored_tokens else max_reusable

    def positions_to_score(self, first: int, end: int) -> range:
        """Return the positions of the tokens that get log-probabilities when the tokens `first .. end` are computed."""
        return range(max(first + 1, self.num_scored_tokens), min(end + 1, len(self.request.scored_tokens)))

    def positions_to_pool(self, first: int, end: int) -> range:
        """Return the positions of the tokens whose states are pooled when the tokens `first .. end` are computed."""
        return range(max(first, self.num_pooled_tokens), end) if self.is_pooling else range(0)

    def note_prompt_results(self, scored_range: range, pooled_range: range) -> bool:
        """Note which tokens of the prompt were scored, and which were pooled. Return whether that ends the job."""
        if scored_range:
            self.num_scored_tokens = scored_range.stop
        if pooled_range:
            self.num_pooled_tokens = pooled_range.stop
        return self.is_pooling and self.num_pooled_tokens == self.prompt_length

    def append_token(self, token: int) -> FinishReason | None:
        """Append the job's next token, and drop drafts that it contradicts. Return why the answer ends with it: it is
        a stop token, or the answer has as many tokens as it may have; None if it goes on. Its text may end the
        answer, too (`Scheduler.finish`).
        """
        self.tokens.append(token)
        if self.drafts:
            self.drafts = self.drafts[1:] if self.drafts[0] == token else ()
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_generated >= self.max_new_tokens else None

    def drop_rejected_drafts(self) -> None:
        """Forget what was computed for drafts that turned out wrong: everything from its newest token on."""
        self.drafts_in_flight = ()
        self.num_computed_tokens = self.state_at = len(self.tokens) - 1
        self.num_planned_outputs = self.num_generated

    def note_refusal(self) -> None:
        """Note that memory was refused to a step in which this job's share was the largest. `refusals` counts the
        refusals that followed another one without progress in between, so it is 0 after the first.
        """
        num_computed = self.num_computed_tokens + len(self.dropped_tokens)
        has_progressed = num_computed > self.refused_at
        self.refusals = 0 if has_progressed else self.refusals + 1
        self.refused_at = max(self.refused_at, num_computed)

    @property
    def is_running(self) -> bool:
        """Whether it has a row and blocks."""
        return self.state in (RequestState.PREFILLING, RequestState.DECODING)

    @property
    def can_decode(self) -> bool:
        """Whether it decodes and another token can be planned: see `num_plannable`. Runs for each row in each step."""
        if self.state is not RequestState.DECODING or self.num_planned_outputs >= self.max_new_tokens:
            return False
        return self.keep is None or self.num_computed_tokens < self.keep.max_row_tokens

    @property
    def needs_history(self) -> bool:
        """Whether its sampling needs the tokens so far: it has penalties or logits processors."""
        p = self.params
        has_penalties = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        return has_penalties or self.has_logits_processors

    def check_invariants(self, length: int) -> None:
        """Raise AssertionError if the numbers of a running job do not fit its `length` in the cache."""
        assert self.num_stored_tokens <= self.num_computed_tokens == length, (
            f"job {self.id} has other tokens than blocks"
        )
        assert self.num_generated <= self.num_planned_outputs <= self.max_new_tokens, (
            f"job {self.id} has more tokens than it may have"
        )


def adapter_order(job: Job) -> int:
    """Return the sort key of a job in a step: rows of one adapter are computed together."""
    return job.adapter


@dataclass(frozen=True)
class RowTokens:
    """The tokens that a step chose for a job: one, several if drafts were verified, none if a pooling job has ended."""

    job: Job
    tokens: Sequence[int]
    first: int
    """The index of the first token in the step's result. The others follow it."""
    finish_reason: FinishReason | None
    """Why the last token ends the answer; None: it does not."""
    num_drafted: int = 0
    """How many drafted tokens the step verified."""
    num_accepted: int = 0
    """How many of these were right."""


@dataclass(frozen=True)
class Lane:
    """A job's place in a decode window."""

    job: Job
    generation: int
    """The job's generation when the window opened."""
    base: int
    """How many tokens of the job were in the arena then."""

    @property
    def is_live(self) -> bool:
        """Whether the job still has the row with which the window began."""
        return self.job.generation == self.generation and self.job.state is RequestState.DECODING
