"""Pooled: what is asked of the states of a prompt, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pooled:
    """What is asked of a prompt's states, by a request that has no answer and ends with its prompt."""

    first: int
    """The position of the first token whose state counts. Those from it to the end of the prompt are summed up."""
    weighted: bool = False
    """Whether each state is multiplied by its position, counted from 1."""
    logits: tuple[int, ...] = ()
    """Tokens whose logits after the last token are asked for, instead of states."""
    shared: int = 0
    """Tokens at the beginning of the prompt that other requests begin with, such as an instruction. They alone stay
    cached.
    """
