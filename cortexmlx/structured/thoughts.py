"""Thoughts: how a model marks what it thinks before its answer. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thoughts:
    """How a model marks its thoughts: between the texts `open` and `close`, before its answer."""

    open: str
    close: str
    begun: bool = False
    """Whether the prompt has opened them."""
    skipped: str = ""
    """A text that may come before an answer without thoughts."""
