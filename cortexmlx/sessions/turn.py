"""A turn of a conversation: what is asked, what the model reads, and what it may answer."""

from __future__ import annotations

from dataclasses import dataclass

from cortexmlx.request import Completion, Message, SamplingParams
from cortexmlx.sessions.transcript import Transcript


@dataclass(frozen=True)
class Turn:
    """A turn that has begun: the messages to be answered, and what the model reads."""

    messages: tuple[Message, ...]
    transcript: Transcript
    prompt: list[int]
    thinking: str


@dataclass(frozen=True)
class Offered:
    """A turn that has ended, and all answers that it has got."""

    turn: Turn
    params: SamplingParams
    answers: tuple[Completion, ...]


def without_answer(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """All up to the last question: without the answer to it, if it is there."""
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
