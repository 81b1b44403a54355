"""A turn of a conversation: question, answer and the model's tokens; and dropping the oldest turns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from cortexmlx.core.prompt import (
    ChatTokenizer,
    ChatTokens,
    count_tail_tokens,
    render,
    thoughts_of_answer,
    trailing_thinking_tags,
)
from cortexmlx.core.text import TextKind, ThoughtSplitter
from cortexmlx.errors import CortexError
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.messages import TemplateVars
from cortexmlx.types.request import Completion, FinishReason, Message
from cortexmlx.types.sampling_params import SamplingParams

Render = Callable[[Sequence[Message]], str | None]
"""Returns messages as the chat template renders them; None if it cannot."""


@dataclass(frozen=True)
class Turn:
    """A turn that has begun: the messages to answer, the prompt that they became, and the thinking tag that the prompt
    opens.
    """

    messages: tuple[Message, ...]
    transcript: Transcript
    prompt: list[int]
    opened: str


@dataclass(frozen=True)
class FinishedTurn:
    """A turn that has ended, with all its answers."""

    turn: Turn
    params: SamplingParams
    answers: tuple[Completion, ...]


def begin_turn(
    reader: ChatTokenizer,
    transcript: Transcript,
    messages: tuple[Message, ...],
    said: Sequence[Message],
    variables: TemplateVars,
    calls: AllowedCalls | None,
) -> Turn:
    """Render and tokenize `said`, the part of `messages` that the model reads, and return the turn. Where the text
    agrees with the transcript's, its tokens are reused.
    """
    again = partial(render, reader, variables=variables, calls=calls)
    rendered = again(said)
    thoughts = thoughts_of_answer(reader, rendered, calls)
    if not isinstance(rendered, str):
        tag = thoughts.open if thoughts is not None and thoughts.begun else ""
        return Turn(messages, Transcript(), ChatTokens(rendered, thoughts, calls), tag)
    encode = partial(reader.encode, add_special_tokens=False)
    read = transcript.with_prompt(rendered, encode)
    tag = rendered[rendered.rindex(thoughts.open) :] if thoughts is not None and thoughts.begun else ""
    tail = count_tail_tokens(reader, rendered, read.tokens, thoughts)
    anchor = find_anchor(read, said, thoughts, text_renderer(again), encode)
    return Turn(messages, read, ChatTokens(read.tokens, thoughts, calls, tail=tail, anchor=anchor), tag)


def text_renderer(render: Callable[[Sequence[Message]], str | list[int]]) -> Render:
    """Return a function that renders messages as a text, or returns None where the chat template cannot."""

    def rendered(messages: Sequence[Message]) -> str | None:
        try:
            said = render(messages)
        except CortexError:
            return None
        return said if isinstance(said, str) else None

    return rendered


def find_anchor(
    read: Transcript,
    messages: Sequence[Message],
    thoughts: Thoughts | None,
    render: Render,
    encode: Encode,
) -> int:
    """Return how many of a transcript's tokens the next turn's prompt will keep; 0 if it keeps all, or if that cannot
    be told. Many templates leave out the turn's thoughts then: some those since the last user's message, some those
    since the turn's first one. Others move the tools to the new message. So the template is asked.
    """
    if all(message.get("role") != "user" for message in messages):
        return 0
    later = render([*drop_last_answer(tuple(messages)), *_NEXT_TURN])
    stays = len(read.text) if later is None else common_length(read.text, later)
    if stays == len(read.text):
        return 0
    if thoughts is not None:
        for place, cut in read.cuts[:0:-1]:
            opened = trailing_thinking_tags(read.text[:place], thoughts)
            if place - len(opened) <= stays:
                tail = tuple(encode(opened)) if opened else ()
                whole = not tail or read.tokens[cut - len(tail) : cut] == tail
                return cut - len(tail) if whole and cut < len(read.tokens) else 0
    place, cut = next(each for each in reversed(read.cuts) if each[0] <= stays)
    both = zip(encode(read.text[place:stays]), read.tokens[cut:], strict=False)
    return cut + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


_NEXT_TURN: tuple[Message, ...] = ({"role": "assistant", "content": "."}, {"role": "user", "content": "."})


def drop_last_answer(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages without an answer after the last question."""
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def last_question(messages: tuple[Message, ...]) -> tuple[int, tuple[Message, ...]]:
    """Return the index of the last turn's first message, and the turn's question: the messages before its first answer.

    Calls, their results and the answer after them are one turn.
    """
    asked = drop_last_answer(messages)
    begin = 0
    for i in range(len(asked) - 1, -1, -1):
        calls = asked[i].get("tool_calls") and i + 1 < len(asked) and asked[i + 1]["role"] == "tool"
        if asked[i]["role"] == "assistant" and not calls:
            begin = i + 1
            break
    end = next((i for i in range(begin, len(asked)) if asked[i]["role"] == "assistant"), len(asked))
    return begin, asked[begin:end]


def first_message_that_fits(
    answer: int, longest: int, messages: Sequence[Message], tokens: Callable[[int], int], begin: int
) -> int:
    """Return the index of the first message to send, so that `answer` of the model's `longest` tokens are left for the
    answer.

    It is `begin`, or the first user's message after it that leaves as much; or the last user's message if none does; or
    `begin` if not even that one fits. `tokens(index)` counts the tokens of the messages from an index on, fewer for a
    larger index.
    """
    places = [begin, *(i for i in range(begin + 1, len(messages)) if messages[i]["role"] == "user")]
    first = bisect_left(places, True, key=lambda place: tokens(place) + answer <= longest)
    if first < len(places):
        return places[first]
    return places[-1] if tokens(places[-1]) < longest else begin


def answer_tokens(
    answer: Completion, params: SamplingParams, ends: Collection[int]
) -> tuple[tuple[int, ...] | None, bool]:
    """Return the tokens of an answer's text, and whether an end token followed, which the template writes. The tokens
    are None if a stop string cut the text: those of the rest are those of its text.
    """
    tokens = answer.token_ids
    if answer.stop_string is not None:
        return None, False
    if answer.finish_reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS) or not tokens:
        return tokens, False
    if tokens[-1] in {*ends, *params.stop_token_ids}:
        return tokens[:-1], True
    return (None if params.stop else tokens), False


def answer_message(turn: Turn, answer: Completion, reader: ChatTokenizer) -> Message:
    """Return an answer as a message for the chat template: with tool calls in a field, and thoughts in a field too if
    the template reads one. Otherwise thoughts are in the text as the model wrote them.
    """
    calls = {"tool_calls": [call.as_mapping() for call in answer.tool_calls]} if answer.tool_calls else {}
    if reader.reads_thoughts_field or reader.thoughts is None:
        thoughts = {"reasoning_content": answer.thinking} if answer.thinking else {}
        return {"role": "assistant", "content": answer.text, **thoughts, **calls}
    if not calls:
        return {"role": "assistant", "content": turn.opened + answer.raw_text}
    return {
        "role": "assistant",
        "content": _join_thoughts(turn, answer.text, answer.thinking, reader.thoughts),
        **calls,
    }


def with_partial_answer(turn: Turn, text: str, thinking: str, reader: ChatTokenizer) -> tuple[Message, ...]:
    """Return the messages of a turn, with the part of its answer that was read so far. Of the tags around its
    thoughts, those are written that must have come.
    """
    if not text and not thinking:
        return turn.messages
    thoughts = reader.thoughts
    if reader.reads_thoughts_field or thoughts is None or not thinking:
        apart = {"reasoning_content": thinking} if thinking else {}
        return (*turn.messages, {"role": "assistant", "content": text, **apart})
    return (*turn.messages, {"role": "assistant", "content": _join_thoughts(turn, text, thinking, thoughts)})


def _join_thoughts(turn: Turn, text: str, thinking: str, thoughts: Thoughts) -> str:
    """Return thoughts and answer as one text, with tags, as a model writes them. The closing tag comes with the
    answer.
    """
    if not thinking:
        return text
    return (turn.opened or thoughts.open) + thinking + (thoughts.close + text if text else "")


def thoughts_in(said: Message, thoughts: Thoughts | None) -> str:
    """Return the thoughts in an answer's message, from their field or from between tags."""
    apart, content = said.get("reasoning_content"), said.get("content")
    if isinstance(apart, str) or thoughts is None or not isinstance(content, str):
        return apart if isinstance(apart, str) else ""
    splitter = ThoughtSplitter(thoughts)
    parts = [*splitter.feed(content), *splitter.rest()]
    return "".join(part.text for part in parts if part.kind is TextKind.THOUGHT)


# The tokens of a conversation. Each turn's tokens begin with those of the turn before, so the prefix cache hits.


Encode = Callable[[str], Sequence[int]]
"""Returns the token ids of a rendered text, without any that a tokenizer adds."""

Cut = tuple[int, int]
"""A place where text and tokens can be split: after this many characters, which are this many tokens."""


@dataclass(frozen=True)
class Transcript:
    """A text that a model read and wrote, with its tokens as they were computed, for the next turn to reuse.

    A tokenizer need not make the model's own tokens from the model's text: the model may have written a word in other
    pieces, or half a character. So its tokens are kept, and a later text that begins alike continues them. It can leave
    this transcript only at one of the `cuts`: the ends of what was read and of what was written, (0, 0) first.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    cuts: tuple[Cut, ...] = ((0, 0),)

    def with_prompt(self, text: str, encode: Encode) -> Transcript:
        """Return the transcript of a new prompt. Where its text agrees with this one's, it reuses the tokens.

        Some templates change earlier text (many leave out old thoughts). Then tokens are new from the last cut before
        the change on. They are also new if a tokenizer joins characters across a cut.
        """
        common = common_length(self.text, text)
        kept = [cut for cut in self.cuts if cut[0] <= common]
        while (new := _tokens_after(kept, text, encode)) is None:
            kept.pop()
        tokens = self.tokens[: kept[-1][1]] + new
        return Transcript(text, tokens, _append_cut(kept, (len(text), len(tokens))))

    def with_answer(self, text: str, tokens: Sequence[int]) -> Transcript:
        """Return this transcript followed by what the model wrote."""
        if not text:
            return self
        whole, ids = self.text + text, (*self.tokens, *tokens)
        return Transcript(whole, ids, _append_cut(self.cuts, (len(whole), len(ids))))


def _tokens_after(cuts: Sequence[Cut], text: str, encode: Encode) -> tuple[int, ...] | None:
    """Return the tokens of `text` after the last cut; None if a token lies across that cut.

    The text is encoded from the cut before that one. So its beginning has the tokens that it has after other text, and
    a long conversation is not encoded as a whole at each turn.
    """
    place = cuts[-1][0]
    if place in (0, len(text)):
        return tuple(encode(text)) if not place else ()
    start = cuts[-2][0]
    both, before = list(encode(text[start:])), list(encode(text[start:place]))
    return tuple(both[len(before) :]) if both[: len(before)] == before else None


def _append_cut(cuts: Sequence[Cut], cut: Cut) -> tuple[Cut, ...]:
    """Return the cuts with one more, unless it is at the last one's place."""
    return tuple(cuts) if cut[0] == cuts[-1][0] else (*cuts, cut)


def common_length(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common, found by comparing halves."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
