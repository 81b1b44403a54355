"""A turn of a conversation: question, answer and the model's tokens; and dropping the oldest turns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from cortexmlx.core.prompt import (
    ChatTokens,
    PromptSource,
    common_length,
    count_thinking_tag_tokens,
    render,
    thoughts_of_answer,
    trailing_thinking_tags,
)
from cortexmlx.core.text import TextKind, ThoughtSplitter
from cortexmlx.errors import CortexError, PromptTooLong
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.messages import TemplateVars
from cortexmlx.types.request import Completion, FinishReason, Message
from cortexmlx.types.sampling_params import SamplingParams

Render = Callable[[Sequence[Message]], str | None]
"""Returns messages as the chat template renders them; None if it cannot."""


@dataclass(frozen=True)
class Turn:
    """A turn that has begun: the messages to answer, their prompt, and the thinking tag that the prompt opens."""

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
    reader: SharedTokenizer,
    transcript: Transcript,
    messages: tuple[Message, ...],
    sent_messages: Sequence[Message],
    variables: TemplateVars,
    calls: AllowedCalls | None,
) -> Turn:
    """Render and tokenize `sent_messages`, the part of `messages` that the model reads, and return the turn. Where the
    text agrees with the transcript's, the transcript's tokens are reused.
    """
    render_messages = partial(render, reader, variables=variables, calls=calls)
    rendered_prompt = render_messages(sent_messages)
    thoughts = thoughts_of_answer(reader, rendered_prompt, calls)
    if not isinstance(rendered_prompt, str):
        tag = thoughts.open if thoughts is not None and thoughts.opened_by_prompt else ""
        return Turn(messages, Transcript(), ChatTokens(rendered_prompt, thoughts, calls), tag)
    encode = partial(reader.encode, add_special_tokens=False)
    read = transcript.with_prompt(rendered_prompt, encode)
    tag = (
        rendered_prompt[rendered_prompt.rindex(thoughts.open) :]
        if thoughts is not None and thoughts.opened_by_prompt
        else ""
    )
    tag_tokens = count_thinking_tag_tokens(reader, rendered_prompt, read.tokens, thoughts)
    anchor = find_anchor(read, sent_messages, thoughts, text_renderer(render_messages), encode)
    source = PromptSource(sent_messages, rendered_prompt, variables, render_messages)
    images = None if reader.images is None else reader.images.find_images(read.tokens)
    prompt = ChatTokens(
        read.tokens,
        thoughts,
        calls,
        thinking_tag_length=tag_tokens,
        anchor_length=anchor,
        source=source,
        images=images,
    )
    return Turn(messages, read, prompt, tag)


def text_renderer(render: Callable[[Sequence[Message]], str | list[int]]) -> Render:
    """Return a function that renders messages as a text; it returns None where the chat template cannot."""

    def render_text(messages: Sequence[Message]) -> str | None:
        try:
            text = render(messages)
        except CortexError:
            return None
        return text if isinstance(text, str) else None

    return render_text


def find_anchor(
    prompt: Transcript,
    messages: Sequence[Message],
    thoughts: Thoughts | None,
    render: Render,
    encode: Encode,
) -> int:
    """Return how many tokens of `prompt` the next turn's prompt will keep; 0 if it keeps all, or if that
    cannot be told. Many templates leave out a turn's thoughts in later prompts: some since the user's last message,
    some since the turn's first one. Others move the tools to the new message. So the next turn is rendered.
    """
    if all(message.get("role") != "user" for message in messages):
        return 0
    next_turn_text = render([*drop_last_answer(tuple(messages)), *_NEXT_TURN])
    common_chars = len(prompt.text) if next_turn_text is None else common_length(prompt.text, next_turn_text)
    if common_chars == len(prompt.text):
        return 0
    if thoughts is not None:
        for text_index, token_index in prompt.boundaries[:0:-1]:
            open_tags = trailing_thinking_tags(prompt.text[:text_index], thoughts)
            if text_index - len(open_tags) <= common_chars:
                tag_tokens = tuple(encode(open_tags)) if open_tags else ()
                has_whole_tags = (
                    not tag_tokens or prompt.tokens[token_index - len(tag_tokens) : token_index] == tag_tokens
                )
                return token_index - len(tag_tokens) if has_whole_tags and token_index < len(prompt.tokens) else 0
    text_index, token_index = next(each for each in reversed(prompt.boundaries) if each[0] <= common_chars)
    token_pairs = zip(encode(prompt.text[text_index:common_chars]), prompt.tokens[token_index:], strict=False)
    return token_index + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], token_pairs))


_NEXT_TURN: tuple[Message, ...] = ({"role": "assistant", "content": "."}, {"role": "user", "content": "."})


def drop_last_answer(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages without the last one if that is an answer."""
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def last_question(messages: tuple[Message, ...]) -> tuple[int, tuple[Message, ...]]:
    """Return the index of the last turn's first message, and the turn's question: the messages before its first answer.

    Calls, their results and the answer after them are one turn.
    """
    question_messages = drop_last_answer(messages)
    begin = 0
    for i in range(len(question_messages) - 1, -1, -1):
        calls = (
            question_messages[i].get("tool_calls")
            and i + 1 < len(question_messages)
            and question_messages[i + 1]["role"] == "tool"
        )
        if question_messages[i]["role"] == "assistant" and not calls:
            begin = i + 1
            break
    end = next(
        (i for i in range(begin, len(question_messages)) if question_messages[i]["role"] == "assistant"),
        len(question_messages),
    )
    return begin, question_messages[begin:end]


def first_message_that_fits(
    answer: int, longest_request: int, messages: Sequence[Message], count_tokens: Callable[[int], int], begin: int
) -> int:
    """Return the index of the first message to send, so that `answer` of the model's `longest_request` tokens are left
    for the answer.

    It is `begin`, or the first user's message after it that leaves as much; or the last user's message if none does.
    Raises PromptTooLong if not even that one fits. `count_tokens(index)` counts the tokens of the messages from an
    index on, fewer for a larger index.
    """
    candidates = [begin, *(i for i in range(begin + 1, len(messages)) if messages[i]["role"] == "user")]
    first = bisect_left(candidates, True, key=lambda place: count_tokens(place) + answer <= longest_request)
    if first < len(candidates):
        return candidates[first]
    if (tokens := count_tokens(candidates[-1])) >= longest_request:
        message = (
            f"without earlier turns, the prompt still has {tokens} tokens, and with its answer it may have "
            f"{longest_request}: shorten the question or the system prompt"
        )
        raise PromptTooLong(message, tokens=tokens, limit=longest_request)
    return candidates[-1]


def answer_tokens(
    answer: Completion, params: SamplingParams, end_token_ids: Collection[int]
) -> tuple[tuple[int, ...] | None, bool]:
    """Return the tokens of an answer's text, and whether an end token followed them. The end token is left out, since
    the template writes it. The tokens are None if a stop string cut the text: what is left is tokenized anew.
    """
    tokens = answer.token_ids
    if answer.stop_string is not None:
        return None, False
    if answer.finish_reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS) or not tokens:
        return tokens, False
    if tokens[-1] in {*end_token_ids, *params.stop_token_ids}:
        return tokens[:-1], True
    return (None if params.stop else tokens), False


def answer_message(turn: Turn, answer: Completion, reader: SharedTokenizer) -> Message:
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


def with_partial_answer(turn: Turn, text: str, thinking: str, reader: SharedTokenizer) -> tuple[Message, ...]:
    """Return a turn's messages with the part of its answer that was read so far, thinking tags included."""
    if not text and not thinking:
        return turn.messages
    thoughts = reader.thoughts
    if reader.reads_thoughts_field or thoughts is None or not thinking:
        apart = {"reasoning_content": thinking} if thinking else {}
        return (*turn.messages, {"role": "assistant", "content": text, **apart})
    return (*turn.messages, {"role": "assistant", "content": _join_thoughts(turn, text, thinking, thoughts)})


def _join_thoughts(turn: Turn, text: str, thinking: str, thoughts: Thoughts) -> str:
    """Return thoughts and answer as one text with tags, as a model writes it. The closing tag comes with the answer."""
    if not thinking:
        return text
    return (turn.opened or thoughts.open) + thinking + (thoughts.close + text if text else "")


def thoughts_in(message: Message, thoughts: Thoughts | None) -> str:
    """Return the thoughts in an answer's message, from their field or from between tags."""
    reasoning_content, content = message.get("reasoning_content"), message.get("content")
    if isinstance(reasoning_content, str) or thoughts is None or not isinstance(content, str):
        return reasoning_content if isinstance(reasoning_content, str) else ""
    splitter = ThoughtSplitter(thoughts)
    parts = [*splitter.feed(content), *splitter.rest()]
    return "".join(part.text for part in parts if part.kind is TextKind.THOUGHT)


# The tokens of a conversation. Each turn's tokens begin with those of the turn before, so the prefix cache hits.


Encode = Callable[[str], Sequence[int]]
"""Returns the token ids of a rendered text, without any that a tokenizer adds."""

Boundary = tuple[int, int]
"""A place where text and tokens can be split: after this many characters, which are this many tokens."""


@dataclass(frozen=True)
class Transcript:
    """A text that a model read and wrote, with its tokens as they were computed, for the next turn to reuse.

    A tokenizer need not make the model's own tokens from the model's text: the model may have written a word in other
    pieces, or half a character. So its tokens are kept, and a later text that begins alike continues them. It can leave
    this transcript only at one of the `boundaries`: the ends of what was read and of what was written, (0, 0) first.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    boundaries: tuple[Boundary, ...] = ((0, 0),)

    def with_prompt(self, text: str, encode: Encode) -> Transcript:
        """Return the transcript of a new prompt. Where its text agrees with this transcript's, it reuses these tokens.

        Some templates change earlier text (many leave out old thoughts). Then tokens are new from the last boundary
        before the change on. They are also new if a tokenizer joins characters across a boundary.
        """
        common = common_length(self.text, text)
        kept_boundaries = [each for each in self.boundaries if each[0] <= common]
        while (new_tokens := _tokens_after(kept_boundaries, text, encode)) is None:
            kept_boundaries.pop()
        tokens = self.tokens[: kept_boundaries[-1][1]] + new_tokens
        return Transcript(text, tokens, _append_boundary(kept_boundaries, (len(text), len(tokens))))

    def with_answer(self, text: str, tokens: Sequence[int]) -> Transcript:
        """Return this transcript followed by the model's answer `text`, with the `tokens` that it generated."""
        if not text:
            return self
        full_text, ids = self.text + text, (*self.tokens, *tokens)
        return Transcript(full_text, ids, _append_boundary(self.boundaries, (len(full_text), len(ids))))


def _tokens_after(boundaries: Sequence[Boundary], text: str, encode: Encode) -> tuple[int, ...] | None:
    """Return the tokens of `text` after the last boundary; None if a token lies across it.

    The text is encoded from the boundary before that one. So its beginning has the tokens that it has after other text,
    and a long conversation is not encoded as a whole at each turn.
    """
    text_index = boundaries[-1][0]
    if text_index in (0, len(text)):
        return tuple(encode(text)) if not text_index else ()
    start = boundaries[-2][0]
    all_tokens, tokens_before = list(encode(text[start:])), list(encode(text[start:text_index]))
    return tuple(all_tokens[len(tokens_before) :]) if all_tokens[: len(tokens_before)] == tokens_before else None


def _append_boundary(boundaries: Sequence[Boundary], new: Boundary) -> tuple[Boundary, ...]:
    """Return the boundaries with `new` added, unless the last one is at the same place."""
    return tuple(boundaries) if new[0] == boundaries[-1][0] else (*boundaries, new)
