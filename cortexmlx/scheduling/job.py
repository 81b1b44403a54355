"""Job: one sequence on its way through the scheduler. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

from cortexmlx.kv.prefix import Key
from cortexmlx.kv.state.ops import Row
from cortexmlx.request import FinishReason, QueuedRequest, RequestState, SamplingParams
from cortexmlx.scheduling.keep import KeepPolicy

JobId = NewType("JobId", int)
"""Names a job, and its sequence of blocks in the cache."""

SECONDS_PER_PRIORITY = 30.0
"""How much earlier a request counts as having come for each step of priority: high priority overtakes, but nobody
waits for ever.
"""

BACKGROUND_DELAY = 60.0
"""Seconds by which a background request counts as younger, half of them at least, so that those whose tokens are
watched go first.
"""

LONG_ANSWER = 256
"""Tokens of answer that halve the other half: of the background ones the longest begin first, for a long answer that
begins last would go on alone while the other rows are empty.
"""


@dataclass(eq=False)
class Job:
    """What the scheduler knows of a sequence: one answer of a request.

    `tokens` is the prompt and every committed token, but for those that `keep` has let go: `dropped`, in their order,
    `drops` times since the job was made. Of the rest and those on their way, `num_computed_tokens` have their
    keys and values planned, and `num_stored_tokens` of them in the arena. `num_planned_outputs` tokens of the answer
    are planned in all, of at most `max_new_tokens`. `keys` name the full blocks of `tokens` in the prefix cache, as far
    as they are known, and `salt` is what they are shared under; `cached` tokens of the prompt were found there. A job
    with `fork_of` begins as a copy of that one's prompt. Of the text that is to be scored, `num_scored_tokens` have
    their log-probabilities, or need none, as the first. `arrival` is on the scheduler's clock, `number` counts jobs.
    `generation` changes when the job loses its row: results of an older one are dropped. Where there are recurrent
    states, the job's is that of `row`, `state_at` says after how many tokens it is (0: no step has computed one),
    `cuts` after how many it is to be kept, and `waited` that it has waited for one of another's. Steps
    that it took most of were refused memory when it had `refused_at` computed tokens, and `refusals` times since when
    it had no more. `turn` is the number of its first beginning (0: it has none yet). Its client has `paid` tokens for
    it, of which `price` for its prompt.
    `drafts` are guesses at its next tokens, and `verifying` those that a step in flight verifies.
    """

    id: JobId
    request: QueuedRequest
    stop_ids: frozenset[int]
    max_new_tokens: int
    arrival: float
    number: int
    keys: list[Key]
    fork_of: Job | None = None
    keep: KeepPolicy | None = None
    salt: str | None = None
    state: RequestState = RequestState.WAITING
    generation: int = 0
    num_computed_tokens: int = 0
    num_stored_tokens: int = 0
    num_planned_outputs: int = 0
    num_scored_tokens: int = 1
    reserved: int = 0
    cached: int = 0
    preemptions: int = 0
    row: Row = (-1, -1)
    state_at: int = 0
    cuts: set[int] = field(default_factory=set)
    waited: bool = False
    refused_at: int = 0
    refusals: int = 0
    drops: int = 0
    turn: int = 0
    price: int = 0
    paid: int = 0
    drafts: tuple[int, ...] = ()
    verifying: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    tokens: list[int] = field(init=False)
    dropped: list[int] = field(init=False)
    prompt_length: int = field(init=False)
    order: tuple[float, int] = field(init=False)
    """Who comes first: by arrival, as if `SECONDS_PER_PRIORITY` earlier for each step of priority, and later by what is
    left of `BACKGROUND_DELAY`. Only `come_again` changes it.
    """

    def __post_init__(self) -> None:
        request, answer = self.request, self.max_new_tokens
        self.tokens = list(request.prompt)
        self.prompt_length = len(self.tokens)
        self.dropped = [] if self.keep is None else self.keep.cut(self.tokens)
        delay = BACKGROUND_DELAY * (0.5 + 0.5 / (1 + answer / LONG_ANSWER)) if request.background else 0.0
        self.order = (self.arrival - SECONDS_PER_PRIORITY * request.params.priority + delay, self.number)

    @property
    def params(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self.request.params

    @property
    def seed(self) -> int:
        """The seed of its tokens."""
        return self.request.seed

    @property
    def client(self) -> str | None:
        """Whose it is."""
        return self.request.client

    @property
    def output(self) -> list[int]:
        """The generated tokens so far."""
        if self.keep is None or not self.dropped:
            return self.tokens[self.prompt_length :]
        first = self.keep.first
        return [*self.tokens[:first], *self.dropped, *self.tokens[first:]][self.prompt_length :]

    @property
    def generated(self) -> int:
        """How many tokens were generated and committed."""
        return len(self.tokens) + len(self.dropped) - self.prompt_length

    @property
    def prompt_kept(self) -> int:
        """How many tokens of the prompt it begins with."""
        return self.prompt_length - (0 if self.keep is None else self.keep.surplus(self.prompt_length))

    @property
    def max_total_tokens(self) -> int:
        """How many tokens it may have at once in the end, with its prompt."""
        total = self.prompt_length + self.max_new_tokens
        return total if self.keep is None else min(total, self.keep.most)

    @property
    def plannable(self) -> int:
        """How many tokens more can be planned before its end, or before it must drop some."""
        left = self.max_new_tokens - self.num_planned_outputs
        return left if self.keep is None else min(left, self.keep.most - self.num_computed_tokens)

    @property
    def must_drop(self) -> bool:
        """It cannot go on with all the tokens that it has."""
        if self.keep is None or self.state is not RequestState.DECODING:
            return False
        return self.num_planned_outputs < self.max_new_tokens and self.plannable <= 0

    def wait_again(self) -> int:
        """It has lost its row and its blocks, and lets go of what a text of its length does not keep. Returns how many
        tokens that is.
        """
        self.state = RequestState.PREEMPTED
        self.generation += 1
        self.num_computed_tokens = self.num_stored_tokens = 0
        self.num_planned_outputs = self.generated
        self.drafts = self.verifying = ()
        return self.drop()

    def drop(self) -> int:
        """Let go of what a text of its length does not keep; returns how many tokens."""
        gone = [] if self.keep is None else self.keep.cut(self.tokens)
        self.dropped += gone
        self.drops += bool(gone)
        return len(gone)

    @property
    def outgrown(self) -> bool:
        """Its answer is longer than all that a row keeps, so without `keep` it would have ended."""
        return self.keep is not None and self.generated > self.keep.most

    def come_again(self, now: float) -> None:
        """Count as one that comes now, on the scheduler's clock. It must not stand in a line."""
        self.order = (self.order[0] + now - self.arrival, self.number)
        self.arrival = now

    @property
    def being_scored(self) -> bool:
        """Tokens of its text still lack their log-probabilities."""
        return self.num_scored_tokens < len(self.request.scored)

    @property
    def num_reusable_tokens(self) -> int:
        """How many of its tokens need not be computed if they are cached: all but the last, and while its text is to be
        scored, those in front of what is to be scored next.
        """
        most = len(self.tokens) - 1
        return min(most, self.num_scored_tokens - 1) if self.being_scored else most

    def scored_behind(self, first: int, end: int) -> range:
        """The positions of the tokens that computing the tokens `first .. end` gives their log-probabilities: each
        stands behind one of those.
        """
        return range(max(first + 1, self.num_scored_tokens), min(end + 1, len(self.request.scored)))

    def take(self, token: int) -> FinishReason | None:
        """Its next token is known. Returns why it was the last, if it was. Drafts that it belies are dropped."""
        self.tokens.append(token)
        self.drafts = self.drafts[1:] if self.drafts[:1] == (token,) else ()
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.generated >= self.max_new_tokens else None

    def cut_back(self) -> None:
        """Its drafts are verified: of what was computed, what is in front of its newest token is right."""
        self.verifying = ()
        self.num_computed_tokens = self.state_at = len(self.tokens) - 1
        self.num_planned_outputs = self.generated

    def advance(self, count: int) -> None:
        """A step computes `count` more of its tokens."""
        self.num_computed_tokens += count
        self.state_at = self.num_computed_tokens

    def note_refusal(self) -> None:
        """Memory was refused to a step, most of which it took."""
        computed = self.num_computed_tokens + len(self.dropped)
        farther = computed > self.refused_at
        self.refusals = 0 if farther else self.refusals + 1
        self.refused_at = max(self.refused_at, computed)

    @property
    def running(self) -> bool:
        """It has blocks and a row."""
        return self.state in (RequestState.PREFILLING, RequestState.DECODING)

    @property
    def can_decode(self) -> bool:
        """It decodes, and not all of its tokens are planned."""
        return self.state is RequestState.DECODING and self.plannable > 0

    @property
    def needs_history(self) -> bool:
        """Its sampling looks at the tokens so far."""
        p = self.params
        penalised = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        return penalised or bool(p.logits_processors)

    def check_invariants(self, length: int) -> None:
        """Raise AssertionError if what a running job counts does not fit its `length` in the cache."""
        assert self.num_stored_tokens <= self.num_computed_tokens == length, (
            f"job {self.id} has other tokens than blocks"
        )
        assert self.generated <= self.num_planned_outputs <= self.max_new_tokens, (
            f"job {self.id} has more tokens than it may have"
        )


@dataclass(frozen=True)
class Committed:
    """One token that a step brought to a job; `result_index` is its place in the step's result, `finish_reason` set
    if it was the last one.
    """

    job: Job
    token: int
    result_index: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Lane:
    """A job's row in a decode window: its generation then, and the tokens it had in the arena."""

    job: Job
    generation: int
    base: int

    @property
    def live(self) -> bool:
        """The job is still the one that the window began with."""
        return self.job.generation == self.generation and self.job.state is RequestState.DECODING
