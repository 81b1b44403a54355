"""Job: one sequence on its way through the scheduler. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import NewType

from cortexmlx.kv.prefix import Key
from cortexmlx.kv.state.snapshots import Row
from cortexmlx.request import FinishReason, QueuedRequest, RequestState
from cortexmlx.sampling_params import SamplingParams
from cortexmlx.scheduling.keep_policy import KeepPolicy

JobId = NewType("JobId", int)
"""Names a job, and its sequence of blocks in the cache."""

SECONDS_PER_PRIORITY = 30.0
"""How much earlier a request counts as having come for each step of priority. High priority overtakes, but nobody waits
for ever.
"""

BACKGROUND_DELAY = 60.0
"""Seconds by which a background request counts as younger, half of them at least, so that watched requests go first."""

LONG_ANSWER = 256
"""Tokens of answer that halve the other half of that delay. So the longest background requests begin first: a long
answer that begins last would run alone while other rows are empty.
"""


@dataclass(eq=False)
class Job:
    """What the scheduler knows of a sequence: one answer of a request."""

    id: JobId
    request: QueuedRequest
    stop_ids: frozenset[int]
    """Tokens that end the answer."""
    max_new_tokens: int
    """Tokens that the answer may have."""
    arrival: float
    """When it came, on the scheduler's clock."""
    number: int
    """Jobs are counted."""
    keys: list[Key]
    """Names of the full blocks of `tokens` in the prefix cache, as far as they are known."""
    fork_of: Job | None = None
    """It begins as a copy of this job's prompt."""
    keep: KeepPolicy | None = None
    """Which tokens stay when the text outgrows the context; None: all."""
    salt: str | None = None
    """Blocks are shared with jobs of the same salt."""
    state: RequestState = RequestState.WAITING
    generation: int = 0
    """Changes when the job loses its row. Results for an older generation are dropped."""
    num_computed_tokens: int = 0
    """Tokens with keys and values, those of planned steps included."""
    num_stored_tokens: int = 0
    """Tokens of them in the arena."""
    num_planned_outputs: int = 0
    """Tokens of the answer that are planned or committed."""
    num_scored_tokens: int = 1
    """Tokens of `request.scored` that have their log-probabilities. The first needs none."""
    reserved: int = 0
    """Tokens for which it was promised room."""
    cached: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    preemptions: int = 0
    row: Row = (-1, -1)
    """Names its recurrent state."""
    state_at: int = 0
    """How many tokens its recurrent state has seen; 0: no step has computed one."""
    cuts: set[int] = field(default_factory=set)
    """After how many tokens a recurrent state is to be kept."""
    waited: bool = False
    """It has waited for another job's recurrent state."""
    refused_at: int = 0
    """Computed tokens when a step was refused memory, most of which it took."""
    refusals: int = 0
    """Such refusals since it had more computed tokens than before."""
    drops: int = 0
    """How often it has let tokens go since it was made."""
    turn: int = 0
    """The number of its first beginning; 0: it has not begun."""
    price: int = 0
    """Tokens that its client has paid for its prompt."""
    paid: int = 0
    """Tokens that its client has paid in all."""
    drafts: tuple[int, ...] = ()
    """Guesses at its next tokens."""
    verifying: tuple[int, ...] = ()
    """The guesses that a step in flight verifies."""
    finish_reason: FinishReason | None = None
    params: SamplingParams = field(init=False)
    """How its tokens are chosen, without the caller's functions: plain data, which goes into plans."""
    processed: bool = field(init=False)
    """The caller's functions change its logits. Whoever chooses tokens has them, under the job's id."""
    tokens: list[int] = field(init=False)
    """The prompt and the committed tokens, without those in `dropped`."""
    dropped: list[int] = field(init=False)
    """Tokens that `keep` has let go, in order."""
    prompt_length: int = field(init=False)
    order: tuple[float, int] = field(init=False)
    """Who comes first: by arrival, as if `SECONDS_PER_PRIORITY` earlier for each step of priority, and later by what is
    left of `BACKGROUND_DELAY`. Only `requeue_as_new` changes it.
    """

    def __post_init__(self) -> None:
        request, answer = self.request, self.max_new_tokens
        self.params, self.processed = request.params, bool(request.params.logits_processors)
        if self.processed:
            self.params = copy(request.params)  # `replace` would check all values again
            object.__setattr__(self.params, "logits_processors", ())
        self.tokens = list(request.prompt)
        self.prompt_length = len(self.tokens)
        self.dropped = [] if self.keep is None else self.keep.cut(self.tokens)
        delay = BACKGROUND_DELAY * (0.5 + 0.5 / (1 + answer / LONG_ANSWER)) if request.background else 0.0
        self.order = (self.arrival - SECONDS_PER_PRIORITY * request.params.priority + delay, self.number)

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
        """It has to drop tokens before its next one."""
        if self.keep is None or self.state is not RequestState.DECODING:
            return False
        return self.num_planned_outputs < self.max_new_tokens and self.plannable <= 0

    def wait_again(self) -> int:
        """Wait without a row and blocks. Drop what a text of its length does not keep; return how many tokens."""
        self.state = RequestState.PREEMPTED
        self.generation += 1
        self.num_computed_tokens = self.num_stored_tokens = 0
        self.num_planned_outputs = self.generated
        self.drafts = self.verifying = ()
        return self.drop()

    def drop(self) -> int:
        """Drop what a text of its length does not keep; return how many tokens."""
        gone = [] if self.keep is None else self.keep.cut(self.tokens)
        self.dropped += gone
        self.drops += bool(gone)
        return len(gone)

    @property
    def outgrown(self) -> bool:
        """Its answer is longer than all that a row keeps, so without `keep` it would have ended."""
        return self.keep is not None and self.generated > self.keep.most

    def requeue_as_new(self, now: float) -> None:
        """Count as one that comes now, on the scheduler's clock. It must not stand in a line."""
        self.order = (self.order[0] + now - self.arrival, self.number)
        self.arrival = now

    @property
    def being_scored(self) -> bool:
        """Tokens of its text still lack their log-probabilities."""
        return self.num_scored_tokens < len(self.request.scored)

    @property
    def num_reusable_tokens(self) -> int:
        """How many of its tokens need not be computed if they are cached: all but the last. While its text is scored,
        those before the next token to score.
        """
        most = len(self.tokens) - 1
        return min(most, self.num_scored_tokens - 1) if self.being_scored else most

    def scored_behind(self, first: int, end: int) -> range:
        """The positions of the tokens that get log-probabilities when the tokens `first .. end` are computed: each
        follows one of these.
        """
        return range(max(first + 1, self.num_scored_tokens), min(end + 1, len(self.request.scored)))

    def take(self, token: int, index: int = 0, read: Reader | None = None) -> FinishReason | None:
        """Take the job's next token, which is at `index` in the step's result. Return why it is the last, or None.

        This alone decides whether a token ends its answer: a stop token, a stop string that `read` finds complete, or
        as many tokens as the answer may have. Drafts that the token contradicts are dropped.
        """
        self.tokens.append(token)
        if self.drafts:
            self.drafts = self.drafts[1:] if self.drafts[0] == token else ()
        stops = token in self.stop_ids
        if read is not None and read(self, token, index, stops):
            stops = True
        if stops:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.generated >= self.max_new_tokens else None

    def cut_back(self) -> None:
        """Keep what was computed before its newest token: its drafts are verified, and the rest is wrong."""
        self.verifying = ()
        self.num_computed_tokens = self.state_at = len(self.tokens) - 1
        self.num_planned_outputs = self.generated

    def note_refusal(self) -> None:
        """Note that memory was refused to a step, of which it took most."""
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
        """It decodes, and another token can be planned: see `plannable`. Each step asks this of each row."""
        if self.state is not RequestState.DECODING or self.num_planned_outputs >= self.max_new_tokens:
            return False
        return self.keep is None or self.num_computed_tokens < self.keep.most

    @property
    def needs_history(self) -> bool:
        """Its sampling looks at the tokens so far."""
        p = self.params
        penalised = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        return penalised or self.processed

    def check_invariants(self, length: int) -> None:
        """Raise AssertionError if what a running job counts does not fit its `length` in the cache."""
        assert self.num_stored_tokens <= self.num_computed_tokens == length, (
            f"job {self.id} has other tokens than blocks"
        )
        assert self.generated <= self.num_planned_outputs <= self.max_new_tokens, (
            f"job {self.id} has more tokens than it may have"
        )


Reader = Callable[[Job, int, int, bool], bool]
"""`read(job, token, index, stop_token)` gets each token of a step and its index in the step's result, in order. It
returns whether the answer's text ends with this token, as a stop string is complete.
"""


@dataclass(frozen=True)
class Committed:
    """One token that a step brought to a job."""

    job: Job
    token: int
    result_index: int
    """The token's place in the step's result."""
    finish_reason: FinishReason | None
    """Why the token is the answer's last; None: it is not."""


@dataclass(frozen=True)
class Lane:
    """A job's row in a decode window: its generation at the opening, and the tokens that it had in the arena."""

    job: Job
    generation: int
    base: int

    @property
    def live(self) -> bool:
        """The job is still the one that the window began with."""
        return self.job.generation == self.generation and self.job.state is RequestState.DECODING
