"""The machine that a plan is for: this one, or a Mac that somebody thinks of buying."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import parse_size
from cortexmlx.machine import memory_bytes, working_set_bytes

_GIB = 1 << 30
_TWO_THIRDS_UP_TO = 32 * _GIB
_AS_SOLD = re.compile(r"([kmgt])b\s*\Z", re.IGNORECASE)


@dataclass(frozen=True)
class Machine:
    """Memory in bytes: all of it, and what a model should use at most. `on_cpu`: MLX computes in float32 there;
    `here`: it is the machine that runs this.
    """

    memory: int
    working_set: int
    on_cpu: bool = False
    here: bool = True


def called(here: bool) -> str:
    """The machine in a sentence."""
    return "this machine" if here else "such a Mac"


def this_machine() -> Machine:
    """The machine that runs this."""
    return Machine(memory_bytes(), working_set_bytes(), sys.platform == "linux")


def mac(memory: int) -> Machine:
    """A Mac with so many bytes of memory, as it is delivered. What Metal recommends there has been reported as two
    thirds of it up to 32 GiB, as three quarters from 36 GiB on, and by newer systems as some more.
    """
    share = memory * 2 // 3 if memory <= _TWO_THIRDS_UP_TO else memory * 3 // 4
    return Machine(memory, share, here=False)


def sold_memory(text: str) -> int:
    """Bytes of a memory as it is sold: "64GB" are 64 GiB. Raises InvalidRequest if it is none, or less than 1 GiB."""
    try:
        size = parse_size(_AS_SOLD.sub(r"\1", text))
    except InvalidRequest:
        size = 0
    if size < _GIB:
        raise InvalidRequest(f"{text!r} is no Mac's memory: write it like 64GB")
    return size
