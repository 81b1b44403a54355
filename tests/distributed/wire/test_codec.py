"""Bytes of plain data: what has no type of its own in the messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cortexmlx.distributed.wire.codec import Codec, Reader, codec, write_natural
from cortexmlx.errors import HostLost


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Thing:
    size: int
    colour: Colour
    parts: Sequence[tuple[str, float | None]]
    names: Mapping[str, list[bool]]


@given(st.integers(0, 2**69))
@example(127)
@example(128)
def test_a_number_takes_a_byte_for_seven_bits(number: int) -> None:
    out = bytearray()
    write_natural(out, number)
    assert len(out) == max(1, -(-number.bit_length() // 7))
    reader = Reader(bytes(out))
    assert reader.natural() == number
    reader.end()


@given(st.integers(-(2**63), 2**64 - 1))
def test_every_seed_comes_back(number: int) -> None:
    assert codec(int).decode(bytes(codec(int).encode(number))) == number


def test_a_value_is_what_its_types_say() -> None:
    thing = Thing(-3, Colour.BLUE, (("ä\udc80", 0.5), ("", None)), {"x": [True, False]})
    message = codec(Thing).encode(thing)
    assert codec(Thing).decode(bytes(message)) == thing
    assert len(message) == 1 + 1 + 1 + (1 + 5 + 1 + 8) + (1 + 1) + 1 + (1 + 1) + 1 + 2


@pytest.mark.parametrize(
    ("kind", "message", "why"),
    [
        (int, b"", "ends within a number"),
        (int, b"\x80", "ends within a number"),
        (int, b"\x80" * 11, "more than 10 bytes"),
        (bool, b"\x02", "neither true nor false"),
        (str, b"\x05abc", "5 bytes are announced, and 3 are left"),
        (str, b"\x01\xff", "codec can't decode"),
        (tuple[int, ...], b"\x7f\x00", "127 elements are announced in 1 bytes"),
        (Colour, b"\x02", "no Colour number 2"),
        (int | None, b"\x02", "no type number 2 of 2"),
        (npt.NDArray[np.int32], b"\x05" + b"\x01" * 5, "5 dimensions"),
        (npt.NDArray[np.int32], b"\x02\xff\xff\xff\xff\x0f\x00", "shape"),
        (npt.NDArray[np.int32], b"\x01\x02" + b"\x00" * 7, "8 bytes are announced, and 7"),
        (int, b"\x02\x02", "1 bytes follow after its end"),
    ],
)
def test_what_a_type_does_not_allow_is_refused(kind: Any, message: bytes, why: str) -> None:
    with pytest.raises(HostLost, match=why):
        codec(kind).decode(message)


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        (range, range(0, 8, 2), ValueError),
        (int | None, "x", TypeError),
        (npt.NDArray[np.int32], np.zeros(2, np.float32), TypeError),
        (tuple[int, str], (1,), ValueError),
    ],
)
def test_another_value_cannot_be_sent(kind: Any, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        codec(kind).encode(value)


@pytest.mark.parametrize("kind", [object, type, set[int], complex])
def test_other_types_cannot_be_sent(kind: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        codec(kind)


def test_an_array_is_a_copy_that_may_be_changed() -> None:
    numbers: Codec[Any] = codec(npt.NDArray[np.int32])
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    back = numbers.decode(bytes(numbers.encode(array[:, ::2])))
    back += 1
    assert back.tolist() == (array[:, ::2] + 1).tolist()
