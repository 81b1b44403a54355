"""What crosses between the controller and its workers, and its bytes: calls and answers. Without pickles and mlx.

Every call has a number, and a worker answers all calls, in order. The bytes are MessagePack, written and checked by
msgspec as the types here say: a value that its type does not allow, a size that is larger than what is left of the
message, a field or a byte too much raises HostLost. Both sides have the same types (the handshake compares versions).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import UNSET, Struct

from cortexmlx import errors
from cortexmlx.errors import CortexError, HostLost, InvalidRequest
from cortexmlx.execution.boundary import MemoryInUse, Refusal, StepResult, TokenMask
from cortexmlx.kv.snapshots import StateOps
from cortexmlx.kv.spec import GroupCounts, LayerGroup
from cortexmlx.kv.step import BlockCopy, GroupStep
from cortexmlx.scheduling.plan import SamplingRow, Segment, StepPlan
from cortexmlx.stats import CommandBuffers
from cortexmlx.types import sampling_params
from cortexmlx.types.arrays import IntArray, TokenList
from cortexmlx.types.sampling_params import SamplingParams

# -- what a worker opens ---------------------------------------------------------------------------------------------

COMPARE_EVERY = 64
"""After how many steps plans are compared, if nobody asks for another number."""


class ShardingMode(Enum):
    """How a model is divided among ranks: by tensors or by layers."""

    AUTO = "auto"
    """Into tensors if its class can be cut so, else into a pipeline."""
    TENSOR = "tensor"
    """Each rank has a part of every layer's weights, and some of its heads."""
    PIPELINE = "pipeline"
    """Each rank has some of the layers."""


@dataclass(frozen=True)
class RankOptions:
    """The options for a worker to open its part of a model. Fields without a comment are those of `EngineConfig`."""

    model: str
    adapter: str | None
    dequantize: bool | None
    kv_bits: int | None
    kv_group_size: int | None
    block_size: int
    attention: str
    reproducible: bool
    max_rows: int
    prefill_budget: int
    cut: ShardingMode = ShardingMode.AUTO
    """How the model is divided."""
    compare_every: int = COMPARE_EVERY
    """After how many steps the ranks' plans and block tables are compared. 1 in debug runs."""


@dataclass(frozen=True)
class RankInfo:
    """The answer to `Open`: what a rank reports about its part of a model."""

    groups: tuple[LayerGroup, ...]
    """What its layers keep. `layers` index the caches of the part, and `spec` counts its own heads."""
    vocab_size: int
    context_length: int
    weight_bytes: int
    """Bytes of its own weights in memory."""
    parameters: int
    """Numbers that its own weights stand for."""
    dtype: str
    """The type of the activations."""
    name: str
    architecture: str
    """The model type of config.json."""
    notes: tuple[str, ...]
    """Lines for the user."""
    identity: str
    """Names the content of the model's files: `LoadedModel.identity`."""
    memory_bytes: int
    """Bytes that the weights and the KV cache should use at most on this machine."""
    backend: str
    """The name of what computes attention."""
    whole_bytes: int
    """Bytes that the weights of the whole model would take in memory."""
    whole_parameters: int
    """How many numbers those stand for."""


# -- calls ------------------------------------------------------------------------------------------------------------


class _Message(Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    """Base of all calls from the controller to a rank. Encoded as a list of the class's name and its fields."""


class Open(_Message, frozen=True):
    """Call: load this rank's part of a model. Answered by a RankInfo."""

    options: RankOptions


class MakeRunner(_Message, frozen=True):
    """Call: make the runner of this rank's layers. Answered by the runner's constants."""

    groups: tuple[LayerGroup, ...]


class Begin(_Message, frozen=True):
    """Call of `Runner.begin`: make an empty arena. Calls named after a method are answered by what that returns."""

    blocks: GroupCounts


class CanResize(_Message, frozen=True):
    """Call of `Runner.can_resize`."""

    blocks: GroupCounts


class Resize(_Message, frozen=True):
    """Call of `Runner.resize`: change the arena's number of blocks."""

    blocks: GroupCounts


class Copy(_Message, frozen=True):
    """Call of `Runner.copy`: copy blocks within the arena."""

    copies: tuple[BlockCopy, ...]


class Release(_Message, frozen=True):
    """Call of `Runner.release`: free the arena."""


class Trim(_Message, frozen=True):
    """Call of `Runner.trim`: free memory that is kept for later steps."""


class TellCommandBuffers(_Message, frozen=True):
    """Call: answer with `Runner.command_buffers`."""


class SentRow(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A `SamplingRow` as it is sent: only what the sampler reads."""

    params: bytes
    """The parameters that differ from the defaults, by name."""
    seed: int
    prompt: IntArray
    output: IntArray


_PLAN_FIELDS = [field.name for field in fields(StepPlan) if field.name != "logit_segments"]
_PLAN_TYPES = get_type_hints(StepPlan) | {"sampling": tuple[SentRow, ...] | None, "loads": tuple[()]}

if TYPE_CHECKING:
    SentPlan = StepPlan  # a class that is made at import has no fields for a type checker
else:
    SentPlan = msgspec.defstruct(
        "SentPlan",
        [(name, _PLAN_TYPES[name]) for name in _PLAN_FIELDS],
        frozen=True,
        forbid_unknown_fields=True,
        array_like=True,
    )
    """The fields of a `StepPlan`, with `SentRow`s. Its `logit_segments` follow from its segments. It has no loads,
    since no disk tier is on hosts.
    """

_plan_values = attrgetter(*_PLAN_FIELDS)


def to_sent_plan(plan: StepPlan) -> SentPlan:
    """Convert a plan to the form in which it is sent. Raises InvalidRequest for rows with functions of this process."""
    assert plan.logit_segments == _logit_segments(plan.segments)
    values: dict[str, Any] = dict(zip(_PLAN_FIELDS, _plan_values(plan), strict=True))
    if plan.sampling is not None:
        values["sampling"] = tuple(to_sent_row(row) for row in plan.sampling)
    return SentPlan(**values)


def from_sent_plan(sent_plan: SentPlan) -> StepPlan:
    """Convert a received plan back: the inverse of `to_sent_plan`. Raises HostLost."""
    values: dict[str, Any] = dict(zip(_PLAN_FIELDS, _plan_values(sent_plan), strict=True))
    if sent_plan.sampling is not None:
        values["sampling"] = tuple(from_sent_row(row) for row in values["sampling"])
    return StepPlan(**values, logit_segments=_logit_segments(sent_plan.segments))


def _logit_segments(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return the segments for which logits are computed."""
    return tuple([segment for segment in segments if segment.logits])


class Prepare(_Message, frozen=True):
    """Call of `ModelRunner.prepare`: change the arena before a step's pass."""

    plan: SentPlan


class Dispatch(_Message, frozen=True):
    """Call of `Runner.dispatch`: start a step. Without a plan, it is the one that was prepared."""

    plan: SentPlan | None


class Forward(_Message, frozen=True):
    """Call of `Runner.forward`: start the forward pass of a step. Without a plan, it is the one that was prepared."""

    plan: SentPlan | None


class Choose(_Message, frozen=True):
    """Call of `Runner.choose`: choose the step's tokens. Only rank 0 gets the mask, since it chooses."""

    mask: TokenMask | None


class Collect(_Message, frozen=True):
    """Call of `Runner.collect`: wait for the step's result."""

    tell: bool
    """Whether the result is told. One rank's is enough."""


class Settle(_Message, frozen=True):
    """Call of `Runner.settle`: carry out state operations, and drop the last step."""

    ops: StateOps


class Forget(_Message, frozen=True):
    """Call of `Runner.forget`: drop everything in flight."""


class Close(_Message, frozen=True):
    """Call of `Runner.close`. The worker ends after it."""


AnyCall = (
    Open
    | MakeRunner
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


class NumberedCall(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A call with its number. The numbers increase from call to call."""

    number: int
    call: AnyCall


# -- answers ----------------------------------------------------------------------------------------------------------


class RunnerConstants(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to the call that makes a runner: what never changes about it."""

    computes_at_dispatch: bool


class RankState(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a rank's runner holds in memory: see `Runner`."""

    bytes: MemoryInUse
    blocks: GroupCounts


Value = None | bool | RankInfo | RunnerConstants | StepResult | Refusal | CommandBuffers | CortexError
"""What a call is answered by. An error: the call raised it, and the rank carries out no further call but Close."""


class CallAnswer(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The answer to the call with this number, with one value at most: see `answer_with`."""

    number: int
    yes: bool | None = None
    info: RankInfo | None = None
    arranged: RunnerConstants | None = None
    result: StepResult | None = None
    refused: Refusal | None = None
    buffers: CommandBuffers | None = None
    error: CortexError | None = None
    state: RankState | None = None
    """None before `MakeRunner`, and for the calls that start a part of a step."""
    digest: bytes | None = None
    """What the plans so far come to, if they are compared now (`PlanDigest`)."""

    @property
    def value(self) -> Value:
        """The value that the call is answered by: the one value field that is set, or None."""
        values = (self.yes, self.info, self.arranged, self.result, self.refused, self.buffers, self.error)
        return next((value for value in values if value is not None), None)


_ANSWER_FIELDS: dict[type, str] = {
    bool: "yes",
    RankInfo: "info",
    RunnerConstants: "arranged",
    StepResult: "result",
    Refusal: "refused",
    CommandBuffers: "buffers",
}


def answer_with(number: int, value: Value, state: RankState | None = None, digest: bytes | None = None) -> CallAnswer:
    """Make an answer with `value` in the field for values of its type."""
    value_field = {} if value is None else {_ANSWER_FIELDS.get(type(value), "error"): value}
    return CallAnswer(number, state=state, digest=digest, **value_field)  # type: ignore[arg-type]


# -- the parameters of a sampling row ---------------------------------------------------------------------------------


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


def sent_param_types(params: type) -> dict[str, Any]:
    """Return name and type of each sampling parameter that is sent: all that are not in `NOT_SENT`. Raises TypeError
    for a type that cannot be encoded, and for a name in `NOT_SENT` that is no parameter.
    """
    field_types = {field.name: field.type for field in fields(params)}
    if strange := NOT_SENT - field_types.keys():
        raise TypeError(f"not sent, and no parameters: {', '.join(sorted(strange))}")
    sent_types = {name: kind for name, kind in field_types.items() if name not in NOT_SENT}
    kinds = get_type_hints(SimpleNamespace(__annotations__=sent_types), vars(sampling_params))
    for name, kind in kinds.items():
        if isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType):
            raise TypeError(f"the sampling parameter {name!r} has no bytes: {kind}; or it is NOT_SENT")
    return kinds


_SENT = sent_param_types(SamplingParams)
_DEFAULTS = SamplingParams()
_SentParams = msgspec.defstruct(
    "_SentParams",
    [(name, kind | msgspec.UnsetType, UNSET) for name, kind in _SENT.items()],
    forbid_unknown_fields=True,
)


def sampler_tokens(row: SamplingRow) -> tuple[TokenList, TokenList]:
    """Return the tokens of a row's prompt and output that the sampler reads: the last ones for a repetition penalty,
    and the whole output for other penalties.
    """
    params = row.params
    last = params.repetition_context if params.repetition_penalty != 1.0 else 0
    num_prompt_tokens = max(0, last - len(row.output))
    if not (params.presence_penalty or params.frequency_penalty):
        return row.prompt[-num_prompt_tokens:] if num_prompt_tokens else (), row.output[-last:] if last else ()
    return row.prompt[-num_prompt_tokens:] if num_prompt_tokens else (), row.output


def to_sent_row(row: SamplingRow) -> SentRow:
    """Convert a sampling row to the form that is sent. Raises InvalidRequest if it has functions of this process."""
    if row.processed_for is not None:
        raise InvalidRequest(
            "logits_processors are functions of this process, and the model runs on hosts: leave them out, or run the "
            "model without hosts",
            field="logits_processors",
        )
    prompt, output = (np.asarray(part, np.int32) for part in sampler_tokens(row))
    changed_params = {name: value for name in _SENT if (value := getattr(row.params, name)) != getattr(_DEFAULTS, name)}
    return SentRow(_encoder.encode(changed_params), row.seed, prompt, output)


def from_sent_row(row: SentRow) -> SamplingRow:
    """Convert a received row back. It has only the tokens that the sampler reads. Raises HostLost."""
    return SamplingRow(_decode_params(row.params), row.seed, row.prompt, row.output)


@lru_cache(64)
def _decode_params(encoded_params: bytes) -> SamplingParams:
    """Decode a `SentRow`'s sampling parameters. Cached: a window's rows mostly share them, and checks take long."""
    sent_params = _PARAMS.decode(encoded_params)
    try:
        return SamplingParams(**{name: value for name in _SENT if (value := getattr(sent_params, name)) is not UNSET})
    except InvalidRequest as error:
        _raise_unreadable(str(error))


# -- bytes ------------------------------------------------------------------------------------------------------------

T = TypeVar("T")

_MAX_DIMS = 4

_DTYPES = {np.dtype(name): name for name in ("int32", "uint32", "float32")}
"""Those of the arrays in plans and results."""


class Codec(Generic[T]):
    """Encodes values of one type as MessagePack bytes, and decodes them."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_restore)

    def encode(self, value: T) -> bytes:
        """Encode a value as a message. Raises TypeError for a value that cannot be sent, and InvalidRequest for a text
        that is not Unicode, such as a path of undecodable bytes.
        """
        try:
            return _encoder.encode(value)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{error.object!r} is not Unicode, and cannot be sent to hosts") from error

    def decode(self, message: bytes) -> T:
        """Decode a whole message. Raises HostLost."""
        try:
            return self._decoder.decode(message)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            _raise_unreadable(str(error))


def _raise_unreadable(reason: str) -> NoReturn:
    """Raise HostLost for a message that cannot be read."""
    raise HostLost(f"a message cannot be read ({reason}): start the hosts again, with one version of cortexmlx on all")


def _simplify(value: Any) -> Any:
    """Convert a value that MessagePack does not know into ones that it does. Raises TypeError if it cannot be sent."""
    if isinstance(value, np.ndarray):
        if value.dtype not in _DTYPES:
            raise TypeError(f"an array of {value.dtype} cannot be sent to a host")
        return (_DTYPES[value.dtype], value.shape, value.tobytes())
    if isinstance(value, range):
        if value.step != 1:
            raise TypeError(f"{value} has steps of {value.step}: only ranges with steps of 1 can be sent")
        return (value.start, value.stop)
    if isinstance(value, CortexError):
        message = str(value).encode("utf-8", "backslashreplace").decode()
        return (_public_error_class(value).__name__, message, _error_detail(value))
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.integer | np.floating):
        return value.item()
    raise TypeError(f"values of {type(value)} cannot be sent to a host")


def _restore(kind: Any, value: Any) -> Any:
    """Undo `_simplify`. Raises ValueError and TypeError, which msgspec takes for a value that is not allowed."""
    if kind is range:
        begin, end = value
        return range(begin, end)  # raises TypeError for what is no integer
    if kind is CortexError:
        name, message, detail = _check_elements(value, str, str, str | None)
        if name not in _CLASSES:
            raise ValueError(f"there is no error {name!r}")
        return _make_error(_CLASSES[name], message, detail)
    if get_origin(kind) is np.ndarray:
        name, shape, data = _check_elements(value, str, list, bytes)
        (number,) = get_args(get_args(kind)[1])
        if name != number.__name__:
            raise ValueError(f"an array of {name!r} came instead of {number.__name__}")
        if len(shape) > _MAX_DIMS or not all(type(dim) is int and dim >= 0 for dim in shape):
            raise ValueError(f"an array has the shape {shape}")
        dtype = np.dtype(number)
        if math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"an array of the shape {shape} has {len(data)} bytes")
        return np.frombuffer(data, dtype).reshape(shape).copy()
    raise ValueError(f"values of {kind} cannot be read")


def _check_elements(value: Any, *kinds: Any) -> Sequence[Any]:
    """Return a received list if its elements have these types. Raises ValueError."""
    if not isinstance(value, list) or len(value) != len(kinds) or not all(map(isinstance, value, kinds)):
        raise ValueError(f"{type(value).__name__} came instead of {kinds}")
    return value


# Errors: the name of a class of `cortexmlx.errors`, its message, and what it has beside it.


_CLASSES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, CortexError)
}


def copy_error(error: Exception, host: str | None = None) -> CortexError:
    """Return a copy of an error without its traceback, whose frames may hold arrays. The name of `host` is in front of
    the message, unless the message names a host already. An error that is not ours becomes HostLost.
    """
    names = (host, error.host if isinstance(error, HostLost) else None)
    prefix = "" if host is None or any(name in str(error) for name in names if name) else f"{host}: "
    if not isinstance(error, CortexError):
        return HostLost(f"{prefix}{type(error).__name__}: {error}", host=host)
    if isinstance(error, HostLost):
        return HostLost(f"{prefix}{error}", host=error.host or host)
    return _make_error(_public_error_class(error), f"{prefix}{error}", _error_detail(error))


def _public_error_class(error: CortexError) -> type[CortexError]:
    """Return an error's class in `cortexmlx.errors`, or else its nearest base class there."""
    return next(base for base in type(error).__mro__ if base in _CLASSES.values())


def _error_detail(error: CortexError) -> str | None:
    """Return the host of a HostLost, or the field of an InvalidRequest."""
    return error.host if isinstance(error, HostLost) else error.field if isinstance(error, InvalidRequest) else None


def _make_error(kind: type[CortexError], message: str, detail: str | None) -> CortexError:
    """Make an error of a class, with its message and what `_error_detail` returns."""
    if issubclass(kind, HostLost):
        return kind(message, host=detail)
    return kind(message, field=detail) if issubclass(kind, InvalidRequest) else kind(message)


_encoder = msgspec.msgpack.Encoder(enc_hook=_simplify)
_PARAMS: Codec[Any] = Codec(_SentParams)
CALL = Codec(NumberedCall)
ANSWER = Codec(CallAnswer)


# -- a hash over the plans of all steps, which must be the same at the controller and at every rank -------------------


class PlanDigest:
    """A running hash of the plans of all steps, by which controller and ranks compare them. After every so many steps,
    it also covers the whole plan as it is carried out, with the block tables in force and the size of the arena.
    """

    def __init__(self, compare_every: int) -> None:
        self._compare_every = compare_every
        self._hash = hashlib.blake2b(digest_size=16)
        self._steps = 0
        self._groups: tuple[GroupStep, ...] | None = None

    def add_message(self, message: bytes) -> None:
        """Add an encoded message, which carries a plan, to the hash."""
        self._hash.update(message)

    def add_step(self, plan: StepPlan, blocks: GroupCounts) -> bytes | None:
        """Add a step that begins on an arena of `blocks`. Return the hash so far if it is to be compared now."""
        self._steps += 1
        if plan.groups is not None:
            self._groups = plan.groups
        if self._steps % self._compare_every:
            return None
        self._hash.update(_encoder.encode(to_sent_plan(replace(plan, groups=self._groups))))
        self._hash.update(repr(blocks).encode())
        return self._hash.digest()
