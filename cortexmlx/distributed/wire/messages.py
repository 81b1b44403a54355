"""Calls of the controller and answers of a worker, with their bytes. Without mlx.

Every message begins with the number of its call. A worker answers all calls, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cortexmlx.disk.tier import PieceLoad
from cortexmlx.distributed.options import RankInfo, RankOptions
from cortexmlx.distributed.wire import error_names, sampling  # noqa: F401  (they register their codecs)
from cortexmlx.distributed.wire.codec import Codec, Reader, broken, codec, read_array, register
from cortexmlx.distributed.wire.disk import (
    AnyTold,
    DropReads,
    FlushStore,
    Join,
    Joined,
    Keep,
    Kept,
    LookAgain,
    RankPiece,
    ReadPieces,
)
from cortexmlx.distributed.wire.window_step import WindowStep
from cortexmlx.errors import CortexError
from cortexmlx.execution.boundary import Arrays, MemoryInUse, Refused, Shapes, StepResult, TokenMask
from cortexmlx.kv.snapshots import StateOps
from cortexmlx.kv.spec import Counts, LayerGroup
from cortexmlx.kv.step import BlockCopy
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.stats import CommandBuffers

# -- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """Load this rank's part of a model. Answered by a RankInfo."""

    options: RankOptions


@dataclass(frozen=True)
class Arrange:
    """Make the runner. Answered by Arranged."""

    groups: tuple[LayerGroup, ...]


@dataclass(frozen=True)
class Begin:
    """`Runner.begin`. A call that is named after a method is answered by what the method returns."""

    blocks: Counts


@dataclass(frozen=True)
class CanResize:
    """`Runner.can_resize`."""

    blocks: Counts


@dataclass(frozen=True)
class Resize:
    """`Runner.resize`."""

    blocks: Counts


@dataclass(frozen=True)
class Copy:
    """`Runner.copy`."""

    copies: Sequence[BlockCopy]


@dataclass(frozen=True)
class CopyOut:
    """`Runner.copy_out`, answered by Copies or Refused."""

    group: int
    names: Sequence[int]


@dataclass(frozen=True)
class Release:
    """`Runner.release`."""


@dataclass(frozen=True)
class Trim:
    """`Runner.trim`."""


@dataclass(frozen=True)
class TellCommandBuffers:
    """`Runner.command_buffers`."""


@dataclass(frozen=True)
class Prepare:
    """`RankRunner.prepare`."""

    plan: StepPlan


@dataclass(frozen=True)
class Dispatch:
    """`Runner.dispatch`. None: the plan that was prepared."""

    plan: StepPlan | WindowStep | None


@dataclass(frozen=True)
class Forward:
    """`Runner.forward`. None: the plan that was prepared."""

    plan: StepPlan | WindowStep | None


@dataclass(frozen=True)
class Choose:
    """`Runner.choose`. Only rank 0 gets the mask, since it chooses the tokens."""

    mask: TokenMask | None


@dataclass(frozen=True)
class Collect:
    """`Runner.collect`."""

    tell: bool
    """Whether the result is told. One rank's is enough."""


@dataclass(frozen=True)
class Settle:
    """`Runner.settle`."""

    ops: StateOps


@dataclass(frozen=True)
class Forget:
    """`Runner.forget`."""


@dataclass(frozen=True)
class Close:
    """`Runner.close`. The worker ends after it."""


AnyCall = (
    Open
    | Arrange
    | Begin
    | CanResize
    | Resize
    | Copy
    | CopyOut
    | Release
    | Trim
    | TellCommandBuffers
    | Prepare
    | Dispatch
    | Forward
    | Choose
    | Collect
    | Settle
    | Forget
    | Close
    | Join
    | Keep
    | ReadPieces
    | DropReads
    | LookAgain
    | FlushStore
)


@dataclass(frozen=True)
class Call:
    """A call with its number, which grows."""

    number: int
    asks: AnyCall


# -- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arranged:
    """What does not change about a runner: see `Runner`."""

    computes_at_dispatch: bool
    shapes: Sequence[Shapes]


@dataclass(frozen=True)
class Copies:
    """Copies of blocks or snapshots."""

    each: Sequence[Arrays | None]


@dataclass(frozen=True)
class Failed:
    """The call raised. The rank carries out no further call but Close."""

    error: CortexError


@dataclass(frozen=True)
class RankState:
    """What a rank's runner holds, and how long it has worked so far: see `Runner`."""

    bytes: MemoryInUse
    blocks: Counts
    build_seconds: float
    wait_seconds: float


Value = (
    None
    | bool
    | RankInfo
    | Arranged
    | StepResult
    | Refused
    | Copies
    | CommandBuffers
    | Failed
    | Joined
    | Kept
    | AnyTold
)

UNASKED = 0
"""The number of an answer that answers no call."""


@dataclass(frozen=True)
class Answer:
    """The answer to the call with this number. A rank tells `AnyTold` by itself, on any thread, between two answers."""

    number: int
    value: Value
    state: RankState | None = None
    """None before `Arrange`, and for the calls that start a part of a step."""
    digest: bytes | None = None
    """What the plans so far come to, if they are compared now (`PlanDigest`)."""


# -- arrays of blocks, and pieces from disk ---------------------------------------------------------------------------

_DTYPES = [np.dtype(name) for name in ("uint8", "uint16", "uint32", "int32", "float16", "float32")]
"""Those of the copies of blocks and snapshots."""


def _write_array(out: bytearray, array: np.ndarray) -> None:
    number = _DTYPES.index(array.dtype)
    out.append(number)
    codec(np.ndarray[Any, np.dtype[_DTYPES[number].type]]).write(out, array)  # type: ignore[misc]


def _read_array(reader: Reader) -> np.ndarray:
    number = reader.natural()
    if number >= len(_DTYPES):
        broken(f"there is no dtype number {number}")
    return read_array(reader, _DTYPES[number])


_LOAD = codec(tuple[int, int, int, int])


def _write_load(out: bytearray, load: PieceLoad) -> None:
    if not isinstance(load.content, RankPiece):
        raise TypeError(f"a load of {type(load.content)} cannot be sent: each rank has its own part")
    _LOAD.write(out, (load.group, load.target, load.content.read, load.content.index))


def _read_load(reader: Reader) -> PieceLoad:
    group, target, read, index = _LOAD.read(reader)
    return PieceLoad(group, target, RankPiece(read, index))


register(np.ndarray, Codec(_write_array, _read_array))
register(PieceLoad, Codec(_write_load, _read_load))

CALL: Codec[Call] = codec(Call)
ANSWER: Codec[Answer] = codec(Answer)
PLAN: Codec[StepPlan] = codec(StepPlan)
