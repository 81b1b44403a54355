"""The interface between the engine's core and the runner of its model: plain data without mlx, so a runner may live in
another process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from traceback import clear_frames
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from cortexmlx.errors import CortexError, MemoryRefused
from cortexmlx.kv.snapshots import StateOps
from cortexmlx.kv.spec import GroupCounts
from cortexmlx.kv.step import BlockCopy
from cortexmlx.models.adapters.low_rank import LowRankAdapter
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.stats import ArenaWrites, CommandBuffers
from cortexmlx.system.machine import is_memory_refusal
from cortexmlx.types.arrays import IntArray
from cortexmlx.types.sampling_params import LogitsProcessor

Arrays = tuple[np.ndarray, ...]

Vector = npt.NDArray[np.float32]
"""`[n] float32`"""

Shapes = tuple[tuple[tuple[int, ...], str], ...]
"""The shape and NumPy's dtype of each array."""


@dataclass(frozen=True)
class Refusal:
    """What a runner returns instead of a result if the system gave it no memory for the work."""

    why: str
    is_resize: bool
    """Whether a resize of the arena was refused. Then the arena has not changed. After any other refusal it may be half
    written.
    """


@dataclass(frozen=True)
class MemoryInUse:
    """Bytes that a runner holds, by use."""

    arena: int
    tail: int
    """The rows' newest tokens, which are not in the arena yet."""
    states: int
    """The rows' recurrent states and their snapshots."""
    active: int
    """All that MLX has allocated and not freed: weights, and what steps compute with, too."""
    peak: int
    """The largest value of `active` so far."""
    writes: ArenaWrites = field(default_factory=ArenaWrites)
    """Whether the arena is written in place."""


@dataclass(frozen=True)
class TokenMask:
    """The tokens that some rows of a step may choose. Rows that are not listed may choose any token."""

    rows: IntArray
    """`[k]`, ascending indices into the plan's `logit_rows`."""
    allowed: npt.NDArray[np.uint32]
    """`[k, ceil(vocabulary / 32)]`: bit `b` of word `w` is set if token `32 w + b` may be chosen."""


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of `n` given tokens, and the likeliest tokens at their places, on the host.

    `logprobs` `[n] float32` are their natural-log probabilities. `top_ids` `[n, k] int32` and `top_logprobs` `[n, k]
    float32` are the likeliest tokens at each place, the best first.
    """

    logprobs: npt.NDArray[np.float32]
    top_ids: IntArray
    top_logprobs: npt.NDArray[np.float32]

    def __getitem__(self, part: slice) -> TokenScores:
        return TokenScores(self.logprobs[part], self.top_ids[part], self.top_logprobs[part])


@dataclass(frozen=True)
class StepResult:
    """The results of a step, on the host: its tokens, and the log-probabilities and states that were asked for."""

    seconds: float
    """From the start of its dispatch to its end."""
    tokens: list[int] = field(default_factory=list)
    """`[n]`, one for each of the plan's `logit_rows`."""
    logprobs: list[float] | None = None
    """`[n]`, if some row asked for them."""
    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    scores: TokenScores | None = None
    """The log-probabilities of the plan's `scoring`."""
    failures: Mapping[int, CortexError] = field(default_factory=dict)
    """What the logits processors of single rows raised. The tokens of those rows are meaningless."""
    pooled: tuple[Vector, ...] = ()
    """For each segment of the plan's `pooling`: the weighted sum of its states, or the logits that it asks for."""


class Runner(Protocol):
    """Runs a model's steps, and owns the memory that they work on.

    `begin`, `resize`, `copy` and `release` may only be called while nothing is in flight.
    """

    processors: MutableMapping[JobId, Sequence[LogitsProcessor]]
    """The callers' own functions, by job. They stay on the runner's side: a plan only names the job."""
    build_seconds: float
    wait_seconds: float
    computes_at_dispatch: bool
    """Whether a step is computed, or nearly so, when `dispatch` returns."""

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> GroupCounts:
        """How many blocks each layer group has in the arena."""

    @property
    def bytes(self) -> MemoryInUse:
        """The bytes in use now."""

    @property
    def command_buffers(self) -> CommandBuffers | None:
        """The command buffers that a decode step takes on the GPU; None without a GPU, or if the number is unknown."""

    def begin(self, blocks: GroupCounts) -> Refusal | None:
        """Allocate an empty arena of `blocks` blocks. The old arena is freed first."""

    def can_resize(self, blocks: GroupCounts) -> bool:
        """Return whether a resize to `blocks` may be tried: memory is free now, or there is no arena to lose."""

    def resize(self, blocks: GroupCounts) -> Refusal | None:
        """Resize the arena to `blocks` blocks per layer group. Blocks that stay keep their content."""

    def copy(self, copies: Sequence[BlockCopy]) -> Refusal | None:
        """Copy blocks. All sources are read before any target is written."""

    def release(self) -> None:
        """Free the arena. It has no blocks until `resize`."""

    def trim(self) -> None:
        """Free memory that is only cached for later steps."""

    # -- steps --------------------------------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> Refusal | None:
        """Start a step after those in flight: its forward pass and the choice of its tokens."""

    def forward(self, plan: StepPlan) -> Refusal | None:
        """Start the forward pass of a step. The next call must be `choose`; masks can be made in between."""

    def choose(self, mask: TokenMask | None = None) -> Refusal | None:
        """Start choosing the tokens of the step whose forward pass was started last."""

    def collect(self) -> StepResult | Refusal:
        """Wait for the oldest step in flight, and return its result."""

    def settle(self, ops: StateOps) -> Refusal | None:
        """Carry out operations on recurrent states when no step follows soon, and drop the last step's data."""

    def forget(self) -> None:
        """Drop all steps in flight, and everything that is kept outside of the arena."""

    def close(self) -> None:
        """Free everything, the model included. The runner cannot be used afterwards. Safe to call again."""


class AdapterSet(Protocol):
    """The loaded adapters of a model. Plans name them by number."""

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters."""

    def check(self, name: str, adapter: LowRankAdapter) -> None:
        """Raise AdapterRefused if the model cannot serve an adapter per request. `name` is for the error."""

    def bytes_of(self, adapter: LowRankAdapter) -> int:
        """Return the bytes that an adapter takes if others have the same targets and rank."""

    def bytes_with(self, adapter: LowRankAdapter) -> int:
        """Return the bytes of all adapters once this one is added."""

    def add(self, number: int, adapter: LowRankAdapter) -> Refusal | None:
        """Add an adapter that `check` accepts, under its `number`. Steps in flight are not affected."""

    def remove(self, number: int) -> Refusal | None:
        """Remove an adapter that no later step names."""


P = ParamSpec("P")
T = TypeVar("T")


def raise_if_refused(answer: T | Refusal) -> T:
    """Return `answer`, or raise MemoryRefused if it is a refusal."""
    if isinstance(answer, Refusal):
        raise MemoryRefused(answer.why)
    return answer


def return_refusals(work: Callable[P, T]) -> Callable[P, T | Refusal]:
    """Decorate `work`: if the system gives it no memory, it returns a `Refusal` instead of raising."""

    @wraps(work)
    def run_or_refuse(*args: P.args, **kwargs: P.kwargs) -> T | Refusal:
        try:
            return work(*args, **kwargs)
        except Exception as error:
            if not is_memory_refusal(error):
                raise
            clear_frames(error.__traceback__)  # they hold arrays
            return Refusal(str(error), isinstance(error, MemoryRefused))

    return run_or_refuse
