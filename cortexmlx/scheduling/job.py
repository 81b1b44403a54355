"""Job: one sequence on its way through the scheduler. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from cortexmlx.kv.prefix import Key
from cortexmlx.request import FinishReason, RequestState, SamplingParams

SECONDS_PER_PRIORITY = 30.0
"""How much earlier a request counts as having come for each step of priority: high priority overtakes, but nobody
waits for ever.
"""

PATIENCE = 60.0
"""Seconds by which a patient request counts as younger, half of them at least, so that those whose tokens are watched
go first.
"""

LONG_ANSWER = 256
"""Tokens of answer that halve the other half: of the patient ones the longest begin first, for a long answer that
begins last would go on alone while the other rows are empty.
"""


@dataclass(eq=False)
class Job:
    """What the scheduler knows of a sequence.

    `tokens` is the prompt and every committed token. `computed` tokens have their keys and values planned, `stored` of
    them in the arena; `sampled` tokens are planned in all, of at most `limit`. `keys` name the full blocks of `tokens`
    in the prefix cache, as far as they are known, and `salt` is what they are shared under; `cached` tokens of the
    prompt were found there. A job with `fork_of` begins as a copy of that one's prompt. A `patient` job is not held to
    the target of the time between two tokens, and lets others go first for a while. `generation` changes when the job
    loses its row: results of an older one are dropped.
    """

    id: int
    prompt_length: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    limit: int
    arrival: float
    number: int
    keys: list[Key]
    fork_of: Job | None = None
    client: str | None = None
    salt: str | None = None
    patient: bool = False
    state: RequestState = RequestState.WAITING
    generation: int = 0
    computed: int = 0
    stored: int = 0
    sampled: int = 0
    reserved: int = 0
    cached: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    order: tuple[float, int] = field(init=False)
    """Who comes first: by arrival, as if `SECONDS_PER_PRIORITY` earlier for each step of priority, and later by what is
    left of `PATIENCE`. It stays what it was at the beginning.
    """

    def __post_init__(self) -> None:
        waits = PATIENCE * (0.5 + 0.5 / (1 + self.limit / LONG_ANSWER)) if self.patient else 0.0
        self.order = (self.arrival - SECONDS_PER_PRIORITY * self.params.priority + waits, self.number)

    @property
    def output(self) -> list[int]:
        """The generated tokens so far."""
        return self.tokens[self.prompt_length :]

    @property
    def generated(self) -> int:
        """How many tokens were generated and committed."""
        return len(self.tokens) - self.prompt_length

    @property
    def most_tokens(self) -> int:
        """How many tokens it may have in the end."""
        return self.prompt_length + self.limit

    @property
    def running(self) -> bool:
        """It has blocks and a row."""
        return self.state in (RequestState.PREFILLING, RequestState.DECODING)

    @property
    def unfinished(self) -> bool:
        """It decodes, and not all of its tokens are planned."""
        return self.state is RequestState.DECODING and self.sampled < self.limit

    @property
    def needs_history(self) -> bool:
        """Its sampling looks at the tokens so far."""
        p = self.params
        penalised = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        return penalised or bool(p.logits_processors)


@dataclass(frozen=True)
class Committed:
    """One token that a step brought to a job; `place` is its index in the step's result, `finish_reason` set if it
    was the last one.
    """

    job: Job
    token: int
    place: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Lane:
    """A job's place in a decode window: its generation then, and the tokens it had in the arena."""

    job: Job
    generation: int
    base: int

    @property
    def live(self) -> bool:
        """The job is still the one that the window began with."""
        return self.job.generation == self.generation and self.job.state is RequestState.DECODING


@dataclass
class Window:
    """A decode window: its lanes, and the next tail column (0: not opened)."""

    lanes: tuple[Lane, ...] = ()
    column: int = 0
