"""The machine that a plan is for: this one, or a Mac that somebody considers buying."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import parse_size
from cortexmlx.system.machine import memory_bytes, working_set_bytes

_GIB = 1 << 30
_TWO_THIRDS_UP_TO = 32 * _GIB
_AS_SOLD = re.compile(r"([kmgt])b\s*\Z", re.IGNORECASE)


@dataclass(frozen=True)
class TargetMachine:
    """The machine that a plan is for: its memory, and whether it computes on a CPU."""

    memory: int
    """Bytes of memory."""
    working_set: int
    """Bytes that a model should use, at most."""
    on_cpu: bool = False
    """Whether MLX computes on the CPU, in float32."""
    is_local: bool = True
    """Whether it is this machine."""


def machine_phrase(is_local: bool) -> str:
    """Return what a sentence calls the machine: this one, or the Mac of --memory."""
    return "this machine" if is_local else "such a Mac"


def this_machine() -> TargetMachine:
    """Return the machine that runs this program."""
    return TargetMachine(memory_bytes(), working_set_bytes(), sys.platform == "linux")


def mac_with_memory(memory: int) -> TargetMachine:
    """Return a Mac with `memory` bytes, with its factory settings.

    Metal is reported to recommend two thirds of the memory up to 32 GiB, three quarters from 36 GiB on, and somewhat
    more on newer systems.
    """
    share = memory * 2 // 3 if memory <= _TWO_THIRDS_UP_TO else memory * 3 // 4
    return TargetMachine(memory, share, is_local=False)


def parse_sold_memory(text: str) -> int:
    """Return the bytes of a memory size as sold: "64GB" is 64 GiB. Raises InvalidRequest if wrong or below 1 GiB."""
    try:
        size = parse_size(_AS_SOLD.sub(r"\1", text))
    except InvalidRequest:
        size = 0
    if size < _GIB:
        raise InvalidRequest(f"{text!r} is no Mac's memory: write it like 64GB")
    return size
