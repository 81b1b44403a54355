"""StepPlan: one step as plain data, made by the scheduler and run by the runner. Without mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cortexmlx.disk.tier import PieceLoad
from cortexmlx.kv.snapshots import NO_STATE_OPS, StateOps
from cortexmlx.kv.spec import GroupCounts
from cortexmlx.kv.step import BlockCopy, GroupStep
from cortexmlx.scheduling.job import JobId
from cortexmlx.types.arrays import IntArray, TokenList
from cortexmlx.types.images import FeaturePiece
from cortexmlx.types.sampling_params import SamplingParams

SCRATCH_SLOT = -1
"""The last slot of the arena, whatever its size. Its content is never read."""


class StepKind(Enum):
    """What a step computes."""

    MIXED = "mixed"
    """Pieces of prompts and one token for every decoding row, written straight into the arena, with nothing else in
    flight.
    """
    DECODE = "decode"
    """One token for every row, written to one column of the tail."""
    FLUSH = "flush"
    """Nothing: the tail is written to the arena."""


@dataclass(frozen=True)
class Segment:
    """`count` consecutive tokens of one job in a step, from position `first`."""

    job: JobId
    generation: int
    """The job's generation when the step was planned. A result for an older one is dropped."""
    first: int
    count: int
    logits: range = range(0)
    """Positions of the segment's tokens that need logits. A token is chosen after each of them."""
    live: bool = True
    """False for a lane of the decode window whose job has ended. It is computed and ignored."""
    scored: range = range(0)
    """Positions in the job's text of the tokens whose log-probabilities the step computes. Each follows a token of the
    segment.
    """
    pooled: range = range(0)
    """Positions of the segment's tokens whose states are summed up."""


@dataclass(frozen=True)
class SamplingRow:
    """How to choose a token for one row of logits, as plain data."""

    params: SamplingParams
    """Without logits processors, which are functions and stay on the runner's side."""
    seed: int
    prompt: TokenList
    output: TokenList
    """The answer's tokens that are known when the row is planned."""
    processed_for: JobId | None = None
    """The job whose logits processors change the row; None: it has none."""


@dataclass(frozen=True)
class Scoring:
    """The tokens of prompts that get log-probabilities in a step, segment by segment."""

    rows: IntArray
    """`[n]` flat indices of the tokens before them."""
    tokens: IntArray
    """`[n]` ids."""
    top: int
    """How many of the likeliest tokens are scored beside each."""


@dataclass(frozen=True)
class Pooling:
    """The hidden states of prompts that a step sums up, for each of `n` segments."""

    rows: IntArray
    """`[k]` flat indices of the tokens whose states count."""
    weights: npt.NDArray[np.float32]
    """`[k]` by what each state is multiplied."""
    counts: IntArray
    """`[n]` how many of these tokens each segment has."""
    logits: tuple[tuple[int, ...], ...]
    """`n` times the tokens whose logits are asked for instead; empty: states are."""


@dataclass(frozen=True)
class ArenaWrite:
    """Arena slots that a step writes in a layer group: `slots` for new tokens, in order, and `zeros`, to be zeroed."""

    slots: IntArray
    zeros: IntArray

    @property
    def run_start(self) -> int | None:
        """The first slot if all slots are consecutive, so that one slice takes them; otherwise None."""
        all_slots = np.concatenate([self.slots, self.zeros])
        return int(all_slots[0]) if len(all_slots) and all_slots[0] >= 0 and (np.diff(all_slots) == 1).all() else None


@dataclass(frozen=True)
class Flush:
    """Tail columns `0 .. columns` that go to the arena: in each layer group to `[rows * columns]` slots, row by row."""

    columns: int
    writes: tuple[ArenaWrite, ...]


@dataclass(frozen=True)
class StepPlan:
    """One step as plain data: a forward pass over T flat tokens, single-token segments first; n of them need logits."""

    number: int
    kind: StepKind
    segments: tuple[Segment, ...]
    tokens: IntArray | None
    """`[T]` input ids; None: they are the lazy result of the step before, picked by `source`."""
    source: IntArray | None
    """`[T]` indices in that result; None: all of it, in order."""
    positions: IntArray
    """`[T]` positions of the tokens, by which they are rotated: their indices in their rows, but after an image."""
    logit_rows: IntArray
    """`[n]` flat indices of the tokens that need logits."""
    logit_segments: tuple[Segment, ...]
    """The segments that have such tokens, in the same order."""
    token_index: IntArray
    """`[n]`: how many tokens of its answer come before the token that is chosen there."""
    sampling: tuple[SamplingRow, ...] | None
    """`[n]`: how each token is chosen; None: as in the step before."""
    groups: tuple[GroupStep, ...] | None
    """Where each layer group's keys and values are; None within a decode window after its first step, since the arena
    part has not changed.
    """
    writes: tuple[ArenaWrite, ...]
    """Where each group's tokens go in a MIXED step."""
    column: int
    """The tail column of a DECODE step."""
    columns: int
    """The columns of the tail, the same in all steps of a decode window."""
    blocks: tuple[int, ...]
    """The arena's size in blocks of each group. `prepare_memory` resizes it, and carries out `flush`, `loads` and
    `copies`, before the pass.
    """
    flush: Flush | None
    copies: tuple[BlockCopy, ...] = ()
    states: StateOps = NO_STATE_OPS
    """What happens with the states of recurrent layers."""
    scoring: Scoring | None = None
    """Log-probabilities to compute besides; only in a MIXED step."""
    pooling: Pooling | None = None
    """States to sum up; only in a MIXED step."""
    loads: tuple[PieceLoad, ...] = ()
    runs_head: bool = False
    """Whether the model's draft head runs after the step."""
    following: IntArray | None = None
    """`[segments]` the text's token after each segment of a MIXED step, 0 where there is none yet, for the draft head;
    None if it does not run.
    """
    adapters: tuple[int, ...] | None = None
    """The number of each segment's adapter (`AdapterKey`), 0 for the base model; None: no segment has one."""

    axes: IntArray | None = None
    """`[3, T]`: positions by frame, height and width, in a MIXED step where they differ; None: `positions` thrice."""
    features: tuple[FeaturePiece, ...] = ()
    """Which of a MIXED step's tokens are those of images. Their ids are negative, but for the ends of rows."""

    @property
    def has_prompt_results(self) -> bool:
        """Whether the step scores or pools tokens of prompts."""
        return self.scoring is not None or self.pooling is not None


# The order of a step's memory operations.


class StepMemory(Protocol):
    """The memory that a step works on: the arena, the tail, and the snapshots of recurrent states."""

    @property
    def blocks(self) -> GroupCounts:
        """How many blocks each layer group has now."""

    def flush(self, flush: Flush) -> None:
        """Write columns of the tail to the arena."""

    def resize(self, blocks: GroupCounts) -> None:
        """Resize the arena to `blocks` blocks per layer group."""

    def load(self, loads: Sequence[PieceLoad]) -> None:
        """Write pieces from disk to blocks and snapshots."""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks. All sources are read before any target is written."""


def prepare_memory(plan: StepPlan, memory: StepMemory) -> None:
    """Carry out a step's memory operations before its forward pass, in the only correct order.

    1. **flush**: the tail belongs to the arena as the step before left it. Some of its blocks may be free by now, lie
    after the new end, or be a target of the following operations.

    2. **resize**: targets of the following operations may lie after the old end.

    3. **loads**: a loaded block is cached as soon as its load is planned, so a copy of the same step may read it.

    4. **copies**.

    5. Then the pass: it restores, saves and drops states (`StateOps`), writes new keys and values, and reads.

    No step may need copies before loads: no load writes the source of a copy. `KVCache.allocate_for` holds the source,
    and `Admission.admit` lets go of it when the step's last load is planned. What is planned after that takes blocks
    for the pass only, which writes them after the copies. A snapshot's number is never used twice, so loads of
    snapshots destroy nothing.
    """
    if plan.flush is not None:
        memory.flush(plan.flush)
    if plan.blocks != memory.blocks:
        memory.resize(plan.blocks)
    if plan.loads:
        memory.load(plan.loads)
    if plan.copies:
        memory.copy(plan.copies)
