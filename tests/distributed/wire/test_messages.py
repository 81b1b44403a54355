"""Every call and every answer comes back from its bytes, and no other bytes do any harm."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from types import NoneType
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cortexmlx.distributed.wire.codec import Codec
from cortexmlx.distributed.wire.messages import (
    ANSWER,
    CALL,
    Answer,
    AnyCall,
    Call,
    Dispatch,
    Failed,
    RankState,
    Value,
    read_by_sampler,
)
from cortexmlx.errors import HostLost
from cortexmlx.execution.boundary import StepResult
from cortexmlx.scheduling.plan import SamplingRow, StepKind, StepPlan
from support.effort import examples
from support.hosts.values import same, values

CALLS = list(get_args(AnyCall))
VALUES = list(get_args(Value))
HUGE = b"\xff" * 5 + b"\x7f"
EMPTY = np.zeros(0, np.int32)
PLAN = StepPlan(7, StepKind.FLUSH, (), EMPTY, None, EMPTY, EMPTY, (), EMPTY, None, None, (), 0, 0, (3,), None)


def _as_sent(value: Any) -> Any:
    """A call with only what the sampler reads of its rows."""
    plan = getattr(value, "plan", None)
    if not isinstance(plan, StepPlan) or plan.sampling is None:
        return value
    rows = tuple(
        SamplingRow(row.params, row.seed, *(np.asarray(part, np.int32) for part in read_by_sampler(row)))
        for row in plan.sampling
    )
    return replace(value, plan=replace(plan, sampling=rows))


@pytest.mark.parametrize("kind", CALLS)
@settings(max_examples=15)
@given(data=st.data())
def test_a_call_comes_back(kind: type, data: st.DataObject) -> None:
    call = Call(data.draw(st.integers(0, 2**40)), data.draw(values(kind)))
    back = CALL.decode(bytes(CALL.encode(call)))
    assert back.number == call.number and same(_as_sent(call.asks), back.asks)


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=15)
@given(data=st.data())
def test_an_answer_comes_back(kind: type, data: st.DataObject) -> None:
    answer = Answer(3, data.draw(values(kind)), data.draw(values(RankState | None)), data.draw(values(bytes | None)))
    assert same(answer, ANSWER.decode(bytes(ANSWER.encode(answer))))


MESSAGES = [(CALL, Call, kind) for kind in CALLS] + [(ANSWER, Answer, kind) for kind in VALUES if kind is not NoneType]


@settings(max_examples=examples(60))
@given(data=st.data())
def test_other_bytes_are_one_error(data: st.DataObject) -> None:
    codec, envelope, kind = data.draw(st.sampled_from(MESSAGES))
    message = bytes(codec.encode(envelope(1, data.draw(values(kind)))))
    for end in range(len(message)):
        with pytest.raises(HostLost, match="cannot be read"):
            codec.decode(message[:end])
    with pytest.raises(HostLost, match="follow after its end"):
        codec.decode(message + b"\0")
    changed = bytearray(message)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(message) - 1))
        changed[place] = data.draw(st.integers(0, 255))
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


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (CALL, Call(1, Dispatch(PLAN))),
        (ANSWER, Answer(1, StepResult(0.5, [1, 2], [0.5], top_ids=[[1]], failures={1: HostLost("x")}))),
    ],
)
def test_announced_sizes_are_not_believed(codec: Codec[Any], message: Any) -> None:
    """A huge number is put in the place of each byte: nothing as large is allocated."""
    encoded = bytes(codec.encode(message))
    tracemalloc.start()
    try:
        for place in range(len(encoded)):
            with suppress(HostLost):
                codec.decode(encoded[:place] + HUGE + encoded[place + 1 :])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_array_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        CALL.encode(Call(1, Dispatch(replace(PLAN, positions=np.zeros(2, np.int64)))))  # type: ignore[arg-type]


def test_a_failure_keeps_its_class() -> None:
    back = ANSWER.decode(bytes(ANSWER.encode(Answer(1, Failed(HostLost("gone", host="b"))))))
    assert isinstance(back.value, Failed) and isinstance(back.value.error, HostLost)
    assert (str(back.value.error), back.value.error.host) == ("gone", "b")


def test_messages_need_no_mlx() -> None:
    code = (
        "import sys, cortexmlx.distributed.remote_runner, cortexmlx.distributed.rank_server\n"
        "sys.exit('mlx' in sys.modules or 'mlx.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0
