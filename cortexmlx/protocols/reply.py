"""Metadata of a reply that every protocol needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
"""A JSON object."""

TokenBytes = Callable[[int], bytes]
"""The bytes that a token id stands for: `Engine.token_bytes`."""


@dataclass(frozen=True)
class ReplyInfo:
    """What every body and every chunk of one reply repeats."""

    id: str
    """Without the prefix that a protocol puts before it."""
    model: str
    created: int
    """Seconds since 1970."""
    token_bytes: TokenBytes
    repeatable: bool = False
    """Leave out what differs from run to run: how much of the prompt was cached."""
