"""A turn of a conversation: question, answer and the model's tokens; and dropping the oldest turns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cortexmlx.request import Completion, Message, Thoughts
from cortexmlx.sampling_params import SamplingParams
from cortexmlx.serving.prompt import Reader
from cortexmlx.serving.text.thoughts import Kind, ThoughtSplitter
from cortexmlx.sessions.transcript import Transcript


@dataclass(frozen=True)
class Turn:
    """A turn that has begun: the messages to be answered, what the model reads, and the tag that it finds opened there
    for its thoughts.
    """

    messages: tuple[Message, ...]
    transcript: Transcript
    prompt: list[int]
    opened: str


@dataclass(frozen=True)
class FinishedTurn:
    """A turn that has ended, and all answers that it has got."""

    turn: Turn
    params: SamplingParams
    answers: tuple[Completion, ...]


def without_answer(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """All up to the last question: without the answer to it, if it is there."""
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def place_that_leaves(
    answer: int, longest: int, messages: Sequence[Message], tokens: Callable[[int], int], begin: int
) -> int:
    """Where the messages are to begin that are sent to the model, which has room for `longest` tokens, so that `answer`
    of them are left: at `begin` or a user's message behind it, the first that does; at the last, if none does; and at
    `begin` if not even that one fits. `tokens` of a place are those of the messages from there on, fewer behind it.
    """
    places = [begin, *(i for i in range(begin + 1, len(messages)) if messages[i]["role"] == "user")]
    first = bisect_left(places, True, key=lambda place: tokens(place) + answer <= longest)
    if first < len(places):
        return places[first]
    return places[-1] if tokens(places[-1]) < longest else begin


def said_by_model(turn: Turn, answer: Completion, apart: bool) -> Message:
    """The answer as the chat template wants it back: with the thoughts in a field of their own if it takes them
    `apart`, else as the model wrote it.
    """
    if not apart:
        return {"role": "assistant", "content": turn.opened + answer.raw_text}
    thoughts = {"reasoning_content": answer.thinking} if answer.thinking else {}
    return {"role": "assistant", "content": answer.text, **thoughts}


def with_so_far(turn: Turn, text: str, thinking: str, reader: Reader) -> tuple[Message, ...]:
    """The messages of a turn with as much of the answer as there is. Of the tags around its thoughts those are written
    that must have been there.
    """
    if not text and not thinking:
        return turn.messages
    thoughts = reader.thoughts
    if reader.reads_thoughts_field or thoughts is None or not thinking:
        apart = {"reasoning_content": thinking} if thinking else {}
        return (*turn.messages, {"role": "assistant", "content": text, **apart})
    raw = (turn.opened or thoughts.open) + thinking + (thoughts.close + text if text else "")
    return (*turn.messages, {"role": "assistant", "content": raw})


def thoughts_in(said: Message, thoughts: Thoughts | None) -> str:
    """The thoughts in a model's message, as `said_by_model` or anybody else put them there."""
    apart, content = said.get("reasoning_content"), said.get("content")
    if isinstance(apart, str) or thoughts is None or not isinstance(content, str):
        return apart if isinstance(apart, str) else ""
    splitter = ThoughtSplitter(thoughts)
    parts = [*splitter.feed(content), *splitter.rest()]
    return "".join(part.text for part in parts if part.kind is Kind.THOUGHT)
