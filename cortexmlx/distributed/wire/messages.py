"""Calls of the controller and answers of a worker, with their bytes. Without mlx.

Every message begins with the number of its call. A worker answers all calls, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np

from cortexmlx.disk.tier import PieceLoad
from cortexmlx.distributed.options import RankInfo, RankOptions
from cortexmlx.distributed.wire.codec import Codec, Reader, broken, codec, register, write_natural
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.execution.boundary import MemoryInUse, Refused, StepResult, TokenMask
from cortexmlx.kv.snapshots import StateOps
from cortexmlx.kv.spec import Counts, LayerGroup
from cortexmlx.kv.step import BlockCopy
from cortexmlx.scheduling.plan import SamplingRow, Segment, StepKind, StepPlan
from cortexmlx.stats import CommandBuffers
from cortexmlx.types.arrays import IntArray, TokenList
from cortexmlx.types.sampling_params import SamplingParams

# Sampling rows as bytes: of parameters and texts only what the sampler reads.


NOT_SENT = frozenset(
    {
        "best_of",
        "ignore_eos",
        "logits_processors",
        "max_thinking_tokens",
        "max_tokens",
        "n",
        "parallel_tool_calls",
        "priority",
        "prompt_logprobs",
        "seed",
        "stop",
        "stop_token_ids",
        "structured",
        "tool_choice",
        "tools",
    }
)
"""The parameters that do not change how a token is chosen from logits. A row has its own seed."""


def sent_kinds(params: type) -> dict[str, Any]:
    """Return the types of all other parameters by their names, so that a new one is sent unless `NOT_SENT` has it.
    Raises TypeError for a type that has no bytes, and for a name in `NOT_SENT` that is no parameter.
    """
    said = {field.name: field.type for field in fields(params)}
    if strange := NOT_SENT - said.keys():
        raise TypeError(f"not sent, and no parameters: {', '.join(sorted(strange))}")
    sent = {name: kind for name, kind in said.items() if name not in NOT_SENT}
    kinds = get_type_hints(SimpleNamespace(__annotations__=sent), {"Mapping": Mapping})
    for name, kind in kinds.items():
        try:
            codec(kind)
        except TypeError as error:
            raise TypeError(f"the sampling parameter {name!r} has no bytes: {error}; or it is NOT_SENT") from None
    return kinds


_DEFAULTS = SamplingParams()
_FIELDS = [
    (1 << bit, name, getattr(_DEFAULTS, name), codec(kind))
    for bit, (name, kind) in enumerate(sent_kinds(SamplingParams).items())
]
_INT32 = np.dtype(np.int32)
_MOST_KEPT = 128
_params_bytes: Codec[bytes] = codec(bytes)
_seed: Codec[int] = codec(int)


def _encoded(params: SamplingParams) -> bytes:
    """Return which parameters differ from the defaults, as bits, and their values."""
    bits, values = 0, bytearray()
    for bit, name, default, part in _FIELDS:
        value = getattr(params, name)
        if value != default:
            bits |= bit
            part.write(values, value)
    out = bytearray()
    write_natural(out, bits)
    return bytes(out + values)


def _decoded(encoded: bytes) -> SamplingParams:
    reader = Reader(encoded)
    bits = reader.natural()
    given = {name: part.read(reader) for bit, name, _, part in _FIELDS if bits & bit}
    reader.end()
    try:
        return SamplingParams(**given)
    except InvalidRequest as error:
        broken(str(error))


_kept = lru_cache(64)(_decoded)
"""Rows of a window mostly have the same parameters, and again in the next window. Checking them takes long."""


def read_by_sampler(row: SamplingRow) -> tuple[TokenList, TokenList]:
    """Return what the sampler reads of a row's prompt and output: the last tokens for a repetition penalty, and the
    whole output for penalties that count. The tests compare the tokens that it chooses with these and with all.
    """
    params = row.params
    last = params.repetition_context if params.repetition_penalty != 1.0 else 0
    missing = max(0, last - len(row.output))
    if not (params.presence_penalty or params.frequency_penalty):
        return row.prompt[-missing:] if missing else (), row.output[-last:] if last else ()
    return row.prompt[-missing:] if missing else (), row.output


def _write_tokens(out: bytearray, tokens: TokenList) -> None:
    write_natural(out, len(tokens))
    out += np.asarray(tokens, _INT32).tobytes()


def _read_tokens(reader: Reader) -> TokenList:
    return np.frombuffer(reader.take(4 * reader.natural()), _INT32)


def _write(out: bytearray, row: SamplingRow) -> None:
    if row.processed_for is not None:
        raise InvalidRequest(
            "logits_processors are functions of this process, and the model runs on hosts: leave them out, or run the "
            "model without hosts",
            field="logits_processors",
        )
    prompt, output = read_by_sampler(row)
    _params_bytes.write(out, _encoded(row.params))
    _seed.write(out, row.seed)
    _write_tokens(out, prompt)
    _write_tokens(out, output)


def _read(reader: Reader) -> SamplingRow:
    encoded = _params_bytes.read(reader)
    params = _kept(encoded) if len(encoded) <= _MOST_KEPT else _decoded(encoded)
    return SamplingRow(params, _seed.read(reader), _read_tokens(reader), _read_tokens(reader))


register(SamplingRow, Codec(_write, _read))


# WindowStep: a step of a decode window by what differs from the step before.
#
# Within a window, a step follows from the one before: each row is one token farther. A whole plan of 16 rows takes 700
# bytes, this takes ten.


_STEP_FIELDS = [field.name for field in fields(StepPlan)]


@dataclass(frozen=True)
class WindowStep:
    """What cannot be told from the step before."""

    number: int
    live: bytes
    """A bit for each lane, the lowest first: whether its job gets a token."""
    tokens: IntArray | None
    states: StateOps

    def after(self, before: StepPlan) -> StepPlan:
        """Return the whole plan. Raises HostLost if it cannot follow `before`."""
        lanes = len(before.segments)
        if before.kind is not StepKind.DECODE or len(self.live) != -(-lanes // 8):
            broken(f"a step of a window with {8 * len(self.live)} lanes follows a {before.kind.value} step of {lanes}")
        live = np.unpackbits(np.frombuffer(self.live, np.uint8), count=lanes, bitorder="little").astype(np.int32)
        segments = tuple(
            [
                Segment(s.job, s.generation, at := (s.first + 1) * bit, 1, range(at, at + 1), live=bit == 1)
                for s, bit in zip(before.segments, live.tolist(), strict=True)
            ]
        )
        return replace(
            before,
            number=self.number,
            segments=segments,
            logit_segments=segments,
            tokens=self.tokens,
            source=None,
            positions=(before.positions + 1) * live,
            token_index=(before.token_index + 1) * live,
            sampling=None,
            groups=None,
            column=before.column + 1,
            flush=None,
            copies=(),
            loads=(),
            states=self.states,
        )


def window_step(before: StepPlan | None, plan: StepPlan) -> WindowStep | None:
    """Return `plan` by what differs from the step `before` it; None if that does not say all of it."""
    if before is None or before.kind is not StepKind.DECODE or plan.groups is not None:
        return None
    if len(plan.segments) != len(before.segments):
        return None
    live = np.packbits(np.array([s.live for s in plan.segments], bool), bitorder="little").tobytes()
    step = WindowStep(plan.number, live, plan.tokens, plan.states)
    after = step.after(before)
    return step if all(_same(getattr(after, name), getattr(plan, name)) for name in _STEP_FIELDS) else None


def _same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return a is b or not (isinstance(a, np.ndarray) or isinstance(b, np.ndarray) or a != b)


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


Value = None | bool | RankInfo | Arranged | StepResult | Refused | CommandBuffers | Failed


@dataclass(frozen=True)
class Answer:
    """The answer to the call with this number."""

    number: int
    value: Value
    state: RankState | None = None
    """None before `Arrange`, and for the calls that start a part of a step."""
    digest: bytes | None = None
    """What the plans so far come to, if they are compared now (`PlanDigest`)."""


def _no_load(*args: object) -> Any:
    raise TypeError("a load from disk cannot be sent: no disk tier is on hosts")


register(PieceLoad, Codec(_no_load, _no_load))

CALL: Codec[Call] = codec(Call)
ANSWER: Codec[Answer] = codec(Answer)
PLAN: Codec[StepPlan] = codec(StepPlan)
