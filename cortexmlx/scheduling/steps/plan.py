"""StepPlan: one step as plain data, made by the scheduler and run by the runner. No mlx."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from cortexmlx.arrays import IntArray, TokenList
from cortexmlx.kv.disk_tier import PieceLoad
from cortexmlx.kv.state.snapshots import NOTHING, StateOps
from cortexmlx.kv.step import BlockCopy, GroupStep
from cortexmlx.sampling_params import SamplingParams
from cortexmlx.scheduling.job import JobId

SCRATCH_SLOT = -1
"""A slot whose content is never read: the last one of the arena, whatever its size."""


class StepKind(Enum):
    """MIXED computes pieces of prompts and one token for every decoding row, and writes them straight into the arena,
    with nothing else in flight. DECODE computes one token for every row, and writes one column of the tail. FLUSH
    computes nothing: it only brings the tail to the arena.
    """

    MIXED = "mixed"
    DECODE = "decode"
    FLUSH = "flush"


@dataclass(frozen=True)
class Segment:
    """`count` consecutive tokens of one job, from position `first`."""

    job: JobId
    generation: int
    """The job's when the step was planned. A result of an older generation is dropped."""
    first: int
    count: int
    logits: range = range(0)
    """Positions of the segment's tokens that need logits. A token is chosen after each of them."""
    live: bool = True
    """False: a lane of the decode window whose job has ended. It is computed and ignored."""
    scored: range = range(0)
    """Positions in the job's text of the tokens whose log-probabilities the step computes. Each follows a token of the
    segment.
    """


@dataclass(frozen=True)
class SamplingRow:
    """How a token is chosen for one row of logits. All of it is plain data."""

    params: SamplingParams
    """Without logits processors: these are functions, and stay on the runner's side."""
    seed: int
    prompt: TokenList
    output: TokenList
    """The answer's tokens that are known when the row is planned."""
    processed_for: JobId | None = None
    """The job whose logits processors change the row; None: there are none."""


@dataclass(frozen=True)
class Scoring:
    """Tokens of prompts that get their log-probabilities, segment by segment."""

    rows: IntArray
    """`[n]` flat indices: each token follows that one."""
    tokens: IntArray
    """`[n]` ids."""
    top: int
    """How many of the likeliest tokens are scored beside each."""


@dataclass(frozen=True)
class ArenaWrite:
    """Where one layer group's new tokens go: `slots` for the tokens in order, then zeros to `zeros` (the rest of
    opened blocks).

    `run` is the first slot when all of them are consecutive, so that one slice takes them.
    """

    slots: IntArray
    zeros: IntArray

    @property
    def run(self) -> int | None:
        every = np.concatenate([self.slots, self.zeros])
        return int(every[0]) if len(every) and every[0] >= 0 and (np.diff(every) == 1).all() else None


@dataclass(frozen=True)
class Flush:
    """Columns `0 .. columns` of the tail go to the arena: per layer group, `slots` `[rows * columns]`, row by row."""

    columns: int
    writes: tuple[ArenaWrite, ...]


@dataclass(frozen=True)
class StepPlan:
    """One forward pass over flat tokens, single-token segments first. `[T]` are the flat tokens, `[n]` those of them
    that need logits.
    """

    number: int
    kind: StepKind
    segments: tuple[Segment, ...]
    tokens: IntArray | None
    """`[T]` input ids; None: they are the lazy result of the step before, picked by `source`."""
    source: IntArray | None
    """`[T]` places in that result; None: all of it, in order."""
    positions: IntArray
    """`[T]`."""
    logit_rows: IntArray
    """`[n]` flat indices of the tokens that need logits."""
    logit_segments: tuple[Segment, ...]
    """The segments that have such tokens, in the same order."""
    token_index: IntArray
    """`[n]`: how many tokens of its answer come before the token that is chosen after each."""
    sampling: tuple[SamplingRow, ...] | None
    """`[n]`: how each token is chosen; None: as in the step before."""
    groups: tuple[GroupStep, ...] | None
    """Where each layer group's keys and values lie; None within a decode window after its first step, as the arena part
    is unchanged.
    """
    writes: tuple[ArenaWrite, ...]
    """Where each group's tokens go in a MIXED step."""
    column: int
    """The tail column of a DECODE step."""
    blocks: tuple[int, ...]
    """The arena's size in blocks of each group. `step_memory.prepare` brings it there, and carries out `flush`, `loads`
    and `copies`, before the pass.
    """
    flush: Flush | None
    copies: tuple[BlockCopy, ...] = ()
    states: StateOps = NOTHING
    """What becomes of the states of recurrent layers."""
    scoring: Scoring | None = None
    """Log-probabilities that are to be computed besides; only a MIXED step has any."""
    loads: tuple[PieceLoad, ...] = ()
