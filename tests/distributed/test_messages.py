"""Every call and every answer comes back from its bytes, and no other bytes do any harm."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from msgspec import Struct

from cortexmlx import errors
from cortexmlx.disk.tier import PieceLoad
from cortexmlx.distributed import messages
from cortexmlx.distributed.messages import (
    ANSWER,
    CALL,
    AnyCall,
    CallAnswer,
    CanResize,
    Choose,
    Codec,
    Dispatch,
    NumberedCall,
    RankState,
    SentPlan,
    Value,
    answer_with,
    copy_error,
    from_sent_plan,
    sampler_tokens,
    to_sent_plan,
)
from cortexmlx.errors import CortexError, HostLost, InvalidRequest, ModelNotFound
from cortexmlx.execution.boundary import StepResult, TokenMask
from cortexmlx.execution.sampling import BatchSampler
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import SamplingRow, Segment, StepKind, StepPlan
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples

ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CortexError)]
_INTS = st.one_of(st.integers(-3, 300), st.integers(-(2**63), 2**64 - 1))
_NUMBERS = st.integers(0, 2**31)
_TOKENS = st.lists(st.integers(-1, 2**31 - 1), max_size=40)
_PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.0, 2.0),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    top_k=st.integers(0, 50),
    min_p=st.floats(0.0, 1.0, exclude_max=True),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    repetition_context=st.integers(1, 30),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, 300), st.floats(-100.0, 100.0), max_size=3),
    logprobs=st.none() | st.integers(0, 5),
)
_SPECIAL: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: _INTS,
    float: st.floats(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    NoneType: st.none(),
    range: st.builds(range, _INTS, _INTS),
    tuple[PieceLoad, ...]: st.just(()),
    SamplingRow: st.builds(SamplingRow, _PARAMS, st.integers(-(2**63), 2**64 - 1), _TOKENS, _TOKENS),
    CortexError: st.builds(lambda kind, text: kind(text), st.sampled_from(ERRORS), st.text(max_size=20))
    | st.builds(HostLost, st.text(max_size=9), host=st.none() | st.text(max_size=9))
    | st.builds(InvalidRequest, st.text(max_size=9), field=st.none() | st.text(max_size=9)),
}


@cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type."""
    if kind in _SPECIAL:
        return _SPECIAL[kind]
    if hasattr(kind, "__supertype__"):
        return values(kind.__supertype__)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return st.one_of([values(arg) for arg in args])
    if origin is np.ndarray:
        return _array(np.dtype(get_args(args[1])[0]).name)
    if origin in (list, Sequence) or (origin is tuple and args[-1] is Ellipsis):
        return st.lists(values(args[0]), max_size=3).map(list if origin is list else tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin is Mapping:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    if kind is SentPlan:
        return values(StepPlan).map(to_sent_plan)
    if kind is StepPlan:
        drawn = values_of_fields(kind)
        return drawn.map(lambda plan: replace(plan, logit_segments=tuple(s for s in plan.segments if s.logits)))
    return values_of_fields(kind)


def values_of_fields(kind: Any) -> st.SearchStrategy[Any]:
    """Objects of a class whose fields have values of their types."""
    names = kind.__struct_fields__ if issubclass(kind, Struct) else [field.name for field in fields(kind)]
    hints = get_type_hints(kind)
    # Not `builds`, which follows the annotations by itself.
    return st.tuples(*(values(hints[name]) for name in names)).map(lambda given: kind(*given))


def _array(dtype: str) -> st.SearchStrategy[Any]:
    return arrays.arrays(np.dtype(dtype), arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same. Lists and tuples may be; NaN is NaN."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, SamplingParams):
        return bool(a == b)
    if isinstance(a, CortexError):
        return type(a) is type(b) and str(a) == str(b) and vars(a) == vars(b)
    if is_dataclass(a) or isinstance(a, Struct):
        names = a.__struct_fields__ if isinstance(a, Struct) else [field.name for field in fields(a)]
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Sequence) and not isinstance(a, str | bytes | range):
        return isinstance(b, Sequence) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)


CALLS = list(get_args(AnyCall))
VALUES = list(get_args(Value))
EMPTY = np.zeros(0, np.int32)
PLAN = StepPlan(7, StepKind.FLUSH, (), EMPTY, None, EMPTY, EMPTY, (), EMPTY, None, None, (), 0, 0, (3,), None)
RESULT = StepResult(0.5, [1, 2], [0.5], top_ids=[[1]], failures={1: HostLost("x")})


def row_as_read(row: SamplingRow) -> SamplingRow:
    """A row with only what the sampler reads of it."""
    return SamplingRow(row.params, row.seed, *(np.asarray(part, np.int32) for part in sampler_tokens(row)))


@pytest.mark.parametrize("kind", CALLS)
@settings(max_examples=examples(15, few=8))
@given(data=st.data())
def test_a_call_comes_back(kind: type, data: st.DataObject) -> None:
    call = NumberedCall(data.draw(st.integers(0, 2**40)), data.draw(values(kind)))
    assert same(CALL.decode(CALL.encode(call)), call)


@settings(max_examples=examples(40, few=12))
@given(values(StepPlan))
def test_a_plan_comes_back_with_what_the_sampler_reads(plan: StepPlan) -> None:
    call = CALL.decode(CALL.encode(NumberedCall(1, Dispatch(to_sent_plan(plan))))).call
    assert isinstance(call, Dispatch) and call.plan is not None
    rows = None if plan.sampling is None else tuple(map(row_as_read, plan.sampling))
    assert same(from_sent_plan(call.plan), replace(plan, sampling=rows))


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=examples(15, few=8))
@given(data=st.data())
def test_an_answer_comes_back(kind: type, data: st.DataObject) -> None:
    value, state = data.draw(values(kind)), data.draw(values(RankState | None))
    answer = answer_with(3, value, state, data.draw(values(bytes | None)))
    back = ANSWER.decode(ANSWER.encode(answer))
    assert same(back, answer) and same(back.value, value)


# -- other bytes ------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60, few=15))
@given(data=st.data())
def test_other_bytes_are_one_error(data: st.DataObject) -> None:
    codec: Codec[Any] = data.draw(st.sampled_from([CALL, ANSWER]))
    drawn = data.draw(values(data.draw(st.sampled_from(CALLS if codec is CALL else VALUES))))
    message = codec.encode(NumberedCall(1, drawn) if codec is CALL else answer_with(1, drawn))
    for end in range(len(message)):
        with pytest.raises(HostLost, match="cannot be read"):
            codec.decode(message[:end])
    with pytest.raises(HostLost, match="trailing"):
        codec.decode(message + b"\0")
    changed = bytearray(message)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    assume(changed != message)
    try:
        codec.decode(bytes(changed))  # another value is possible: a channel brings bytes as they were sent
    except HostLost as error:
        assert "cannot be read" in str(error)


@given(st.binary(max_size=60))
def test_random_bytes_are_one_error_or_a_value(message: bytes) -> None:
    for codec in (CALL, ANSWER):
        try:
            codec.decode(message)
        except HostLost as error:
            assert "cannot be read" in str(error)


def test_announced_sizes_are_not_believed() -> None:
    """The head of a huge list, map, text or array of bytes is put in the place of each byte: nothing as large is
    allocated.
    """
    mask = TokenMask(np.zeros(3, np.int32), np.zeros((3, 9), np.uint32))
    for codec, message in (
        (CALL, CALL.encode(NumberedCall(1, Dispatch(to_sent_plan(PLAN))))),
        (CALL, CALL.encode(NumberedCall(1, Choose(mask)))),
        (ANSWER, ANSWER.encode(answer_with(1, RESULT))),
    ):
        tracemalloc.start()
        try:
            for place in range(len(message)):
                for head in b"\xc6\xc9\xdb\xdd\xdf":
                    with suppress(HostLost):
                        codec.decode(message[:place] + bytes([head]) + b"\x7f\xff\xff\xff" + message[place + 1 :])  # type: ignore[attr-defined]
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


POSITIONS = to_sent_plan(PLAN).__struct_fields__.index("positions")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (["int32", [1] * 5, bytes(4)], "shape"),
        (["int32", [2, -1], bytes(4)], "shape"),
        (["int32", [2, True], bytes(8)], "shape"),
        (["int32", [1 << 40, 1 << 40], bytes(4)], "has 4 bytes"),
        (["int32", [2], bytes(7)], "has 7 bytes"),
        (["float32", [1], bytes(4)], "float32"),
        (["object", [1], bytes(8)], "object"),
        (["int32", [1]], "came instead"),
        ({}, "came instead"),
        (None, "came instead"),
    ],
)
def test_an_array_that_is_none_is_refused(array: Any, why: str) -> None:
    call = msgspec.msgpack.decode(CALL.encode(NumberedCall(1, Dispatch(to_sent_plan(PLAN)))))
    call[1][1][POSITIONS] = array
    with pytest.raises(HostLost, match=why):
        CALL.decode(msgspec.msgpack.encode(call))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ([1, ["CanResize", [1.5]]], "Expected `int`"),
        ([1, ["CanResize", [1], 2]], "length"),
        ([1, ["CanResize"]], "length"),
        ([1, ["Collect", 1]], "Expected `bool`"),
        ([1, ["Exit"]], "Exit"),
        ([1, ["CanResize", [2**64 - 1]], 0], "length"),
        ({"number": 1}, "Expected `array`"),
    ],
)
def test_what_a_type_does_not_allow_is_refused(call: Any, why: str) -> None:
    with pytest.raises(HostLost, match=why):
        CALL.decode(msgspec.msgpack.encode(call))


def test_an_answer_has_no_other_fields_and_no_other_errors() -> None:
    for answer, why in (
        ({"number": 1, "more": 2}, "more"),
        ({"number": 1, "error": ["SystemExit", "why", None]}, "no error 'SystemExit'"),
        ({"number": 1, "error": ["HostLost", "why", 3]}, "came instead"),
        ({}, "number"),
    ):
        with pytest.raises(HostLost, match=why):
            ANSWER.decode(msgspec.msgpack.encode(answer))


# -- what cannot be sent ----------------------------------------------------------------------------------------------


def test_what_has_no_bytes_is_refused() -> None:
    numbers = replace(PLAN, positions=np.zeros(2, np.int64))  # type: ignore[arg-type]
    lane = Segment(JobId(1), 0, 0, 8, logits=range(0, 8, 2))
    steps = replace(PLAN, segments=(lane,), logit_segments=(lane,))
    for plan, why in ((numbers, "int64"), (steps, "steps of 2"), (replace(PLAN, loads=(object(),)), "object")):
        with pytest.raises(TypeError, match=why):
            CALL.encode(NumberedCall(1, Dispatch(to_sent_plan(plan))))
    with pytest.raises(TypeError, match="cannot be sent"):
        CALL.encode(NumberedCall(1, CanResize((object(),))))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="not Unicode"):
        ANSWER.encode(answer_with(1, messages.Refusal("m\udc80", False)))


def test_functions_cannot_be_sent() -> None:
    row = SamplingRow(SamplingParams(), 7, (), (), processed_for=JobId(3))
    with pytest.raises(InvalidRequest, match="logits_processors"):
        to_sent_plan(replace(PLAN, sampling=(row,)))


def test_an_array_is_a_copy_that_may_be_changed() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    mask = CALL.decode(
        CALL.encode(NumberedCall(1, Choose(TokenMask(array[:, ::2], np.zeros((3, 1), np.uint32)))))
    ).call.mask  # type: ignore[union-attr]
    mask.rows[:] += 1
    assert mask.rows.tolist() == (array[:, ::2] + 1).tolist()


# -- sampling rows ----------------------------------------------------------------------------------------------------

VOCABULARY, LIKELY = 301, 11


def sent(row: SamplingRow) -> SamplingRow:
    """A row on the other side."""
    call = CALL.decode(CALL.encode(NumberedCall(1, Dispatch(to_sent_plan(replace(PLAN, sampling=(row,)))))))
    (back,) = from_sent_plan(call.call.plan).sampling or ()  # type: ignore[union-attr, arg-type]
    return back


@settings(max_examples=examples(40, few=12))
@given(st.lists(values(SamplingRow), min_size=1, max_size=3), st.integers(0, 9))
def test_rows_choose_the_same_tokens_after_they_were_sent(rows: list[SamplingRow], dice: int) -> None:
    rows = [
        SamplingRow(row.params, row.seed, *([abs(t) % LIKELY for t in part] for part in (row.prompt, row.output)))
        for row in rows
    ]
    numbers = np.random.default_rng(dice).normal(0, 0.5, (len(rows), VOCABULARY)).astype(np.float32)
    numbers[:, :LIKELY] += 4  # what the texts have is likely, so that a penalty decides
    logits = mx.array(numbers)
    index = np.array([len(row.output) for row in rows])
    own, other = BatchSampler(rows, VOCABULARY), BatchSampler([*map(sent, rows)], VOCABULARY)
    for step in range(3):  # penalties also count what was chosen before
        a, b = own(logits, index + step), other(logits, index + step)
        for x, y in zip(a.arrays(), b.arrays(), strict=True):
            assert np.array_equal(np.array(x), np.array(y), equal_nan=x.dtype == mx.float32)


def test_penalties_of_an_answer_read_all_of_it() -> None:
    row = SamplingRow(SamplingParams(frequency_penalty=0.5), 0, [5, 6], [*range(30)])
    assert tuple(map(list, sampler_tokens(row))) == ([], [*range(30)])


def test_a_plain_row_takes_a_few_bytes_however_long_its_text_is() -> None:
    row = SamplingRow(SamplingParams(stop=["x"], max_tokens=9), 7, list(range(4000)), list(range(4000)))
    with_it, without = (
        len(CALL.encode(NumberedCall(1, Dispatch(to_sent_plan(replace(PLAN, sampling=rows)))))) for rows in ((row,), ())
    )
    assert with_it - without <= 40


def test_parameters_out_of_range_are_refused() -> None:
    row = SamplingRow(SamplingParams(temperature=1.0), 7, (), ())
    message = CALL.encode(NumberedCall(1, Dispatch(to_sent_plan(replace(PLAN, sampling=(row,))))))
    call = CALL.decode(message.replace(np.float64(1.0).tobytes()[::-1], np.float64(np.inf).tobytes()[::-1]))
    with pytest.raises(HostLost, match="temperature"):
        from_sent_plan(call.call.plan)  # type: ignore[union-attr, arg-type]


# -- errors -----------------------------------------------------------------------------------------------------------


def error_sent(error: CortexError) -> CortexError:
    """An error on the other side."""
    back = ANSWER.decode(ANSWER.encode(CallAnswer(1, error=error))).error
    assert back is not None
    return back


def test_every_class_of_error_comes_back() -> None:
    assert len(ERRORS) > 20
    for kind in ERRORS:
        assert same(error_sent(kind("why")), kind("why"))
    lost = error_sent(HostLost("gone \udc80", host="b"))
    assert isinstance(lost, HostLost) and (str(lost), lost.host) == ("gone \\udc80", "b")


def test_a_class_of_another_module_becomes_the_nearest_of_ours() -> None:
    class NotOnTheHub(ModelNotFound):
        def __init__(self, name: str, place: str) -> None:
            super().__init__(f"{name} is not in {place}")

    error = error_sent(NotOnTheHub("a", "b"))
    assert type(error) is ModelNotFound and str(error) == "a is not in b"
    assert same(copy_error(NotOnTheHub("a", "b"), "mac"), ModelNotFound("mac: a is not in b"))


def test_a_copy_of_an_error_names_the_host_and_has_no_traceback() -> None:
    try:
        raise InvalidRequest("no", field="seed")
    except InvalidRequest as error:
        copy = copy_error(error, "mac")
    assert same(copy, InvalidRequest("mac: no", field="seed")) and copy.__traceback__ is None
    assert same(copy_error(ZeroDivisionError("odd"), "mac"), HostLost("mac: ZeroDivisionError: odd", host="mac"))
    assert same(copy_error(HostLost("gone", host="b"), "a"), HostLost("a: gone", host="b"))
    assert same(copy_error(HostLost("b is gone", host="b"), "a"), HostLost("b is gone", host="b"))
    assert same(copy_error(HostLost("gone")), HostLost("gone"))
    silent = HostLost("the link to mac2, rank 1 is silent", host="mac2, rank 1")
    assert same(copy_error(silent, "mac2, rank 1"), silent)
