"""Which of the oldest turns give way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.errors import InvalidRequest, PromptTooLong
from cortexmlx.sessions.turn import (
    Transcript,
    Turn,
    answer_tokens,
    drop_last_answer,
    find_anchor,
    first_message_that_fits,
    text_renderer,
    with_partial_answer,
)
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.request import FinishReason
from cortexmlx.types.sampling_params import SamplingParams


@given(
    st.lists(st.sampled_from(["user", "assistant", "tool"]), min_size=1, max_size=12),
    st.integers(0, 200),
    st.integers(1, 200),
    st.data(),
)
def test_it_is_what_trying_every_place_finds(roles: list[str], answer: int, longest: int, data: st.DataObject) -> None:
    messages = [{"role": role} for role in roles]
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=len(roles), max_size=len(roles)))
    begin = data.draw(st.integers(0, len(roles) - 1))

    def tokens(place: int) -> int:
        return sum(sizes[place:])

    allowed = [begin] + [i for i in range(begin + 1, len(roles)) if roles[i] == "user"]
    fitting = [i for i in allowed if tokens(i) + answer <= longest]
    if fitting or tokens(allowed[-1]) < longest:
        assert first_message_that_fits(answer, longest, messages, tokens, begin) == [*fitting, allowed[-1]][0]
    else:
        with pytest.raises(PromptTooLong):
            first_message_that_fits(answer, longest, messages, tokens, begin)


def test_an_answer_is_left_out_to_be_written_again() -> None:
    said = ({"role": "user"}, {"role": "assistant"})
    assert drop_last_answer(said) == said[:1] == drop_last_answer(said[:1]) and drop_last_answer(()) == ()


@pytest.mark.parametrize(
    ("text", "thinking", "opened", "apart", "content"),
    [
        ("", "", "", False, None),
        ("Yes", "", "", False, "Yes"),
        ("Yes", "", "", True, "Yes"),
        ("", "hm", "", False, "<think>hm"),
        ("Yes", "hm", "", False, "<think>hm</think>Yes"),
        ("Yes", "hm", "<think>\n", False, "<think>\nhm</think>Yes"),
        ("Yes", "hm", "", True, "Yes"),
    ],
)
def test_a_turn_with_what_there_is_of_its_answer(
    text: str, thinking: str, opened: str, apart: bool, content: str | None
) -> None:
    reader: Any = SimpleNamespace(images=None, thoughts=Thoughts("<think>", "</think>"), reads_thoughts_field=apart)
    question = {"role": "user", "content": "?"}
    said = with_partial_answer(Turn((question,), Transcript(), [1], opened), text, thinking, reader)
    assert said[0] == question and [m["content"] for m in said[1:]] == [content] * (content is not None)
    assert [m.get("reasoning_content") for m in said[1:]] == ["hm" if apart and thinking else None] * (len(said) - 1)


def completion(reason: FinishReason, *tokens: int, cut: str | None = None) -> Any:
    return SimpleNamespace(finish_reason=reason, token_ids=tokens, stop_string=cut)


def test_the_token_that_ends_an_answer_is_not_said() -> None:
    plain, stopping = SamplingParams(), SamplingParams(stop=("x",), stop_token_ids=(8,))
    assert answer_tokens(completion(FinishReason.STOP, 1, 2, 9), plain, {9}) == ((1, 2), True)
    assert answer_tokens(completion(FinishReason.TOOL_CALLS, 1, 9), plain, {9}) == ((1,), True)
    assert answer_tokens(completion(FinishReason.STOP, 1, 8), stopping, {9}) == ((1,), True)
    assert answer_tokens(completion(FinishReason.STOP, 1, 2), stopping, {9}) == (None, False), "a stop string cut it"
    assert answer_tokens(completion(FinishReason.STOP, 1, 2), plain, {9}) == ((1, 2), False)
    assert answer_tokens(completion(FinishReason.LENGTH, 1, 9), plain, {9}) == ((1, 9), False)
    assert answer_tokens(completion(FinishReason.CANCELLED), plain, {9}) == ((), False)
    for reason in FinishReason:
        held = completion(reason, 1, 9, cut="x")  # it was found in what was held back until the end
        assert answer_tokens(held, stopping, {9}) == (None, False), "a stop string cut it, whatever ended it"


def test_the_anchor_is_where_the_template_leaves_thoughts_out_in_the_next_turn() -> None:
    thoughts = Thoughts("<", ">")

    def encode(text: str) -> list[int]:
        return [ord(each) for each in text]

    def render(messages: Any, ends: str) -> str:
        """A template that leaves thoughts out until the last message of the role `ends`."""
        place = max(
            [i for i, each in enumerate(messages) if each["role"] in ends and not each.get("tool_calls")] or [0]
        )
        said = [each.get("thought", "") * (i > place) + each["content"] for i, each in enumerate(messages)]
        return "".join(each["role"][0] + text for each, text in zip(messages, said, strict=True)) + "a<"

    def anchor(messages: Sequence[Any], ends: str, known: bool = True, thoughts: Thoughts | None = thoughts) -> int:
        read, again = Transcript(), partial(render, ends=ends)
        for place, each in enumerate(messages) if known else ():
            if each["role"] == "assistant":
                written = each["thought"].removeprefix("<") + each["content"]
                read = read.with_prompt(again(messages[:place]), encode).with_answer(written, encode(written))
        return find_anchor(read.with_prompt(again(messages), encode), messages, thoughts, again, encode)

    user, tool, system = ({"role": role, "content": role[0]} for role in ("user", "tool", "system"))
    called = {"role": "assistant", "content": "c", "thought": "<t>", "tool_calls": [{}]}
    loop, reminded = [user, called, tool], [user, called, tool, user, called, tool]
    assert anchor(loop, "user") == anchor(loop, "assistant") == len("uua")
    assert anchor([user, system, called, tool], "user") == len("uussa"), "the end of the question"
    assert anchor(reminded, "user") == len("uuacttuua"), "thoughts before the reminder are gone"
    assert anchor(reminded, "assistant") == len("uua"), "they go with the answer"
    assert anchor([user], "user") == anchor(loop, "nobody") == 0, "the end"
    assert anchor([called, tool], "user") == 0, "no question"
    assert anchor(loop, "user", known=False) == len("uua"), "no cut is there"
    read = Transcript().with_prompt("u", encode)
    assert find_anchor(read, loop, thoughts, lambda messages: None, encode) == 0, "it cannot be rendered"


def test_the_anchor_is_where_the_template_moves_the_tools_away_from() -> None:
    merged = {"s[": 300, "at": 301}

    def encode(text: str) -> list[int]:
        """A tokenizer of pairs."""
        tokens = []
        while text:
            length = 2 if text[:2] in merged else 1
            tokens.append(merged.get(text[:2]) or ord(text[0]))
            text = text[length:]
        return tokens

    def render(messages: Sequence[Any]) -> str:
        last = max(i for i, each in enumerate(messages) if each["role"] == "user")
        return "".join("[tools]" * (i == last) + each["content"] for i, each in enumerate(messages))

    first, second = {"role": "user", "content": "first"}, {"role": "user", "content": "second"}
    said, again = {"role": "assistant", "content": "at"}, {"role": "assistant", "content": "s"}
    read = Transcript().with_prompt(render([first, said, second]), encode)
    assert find_anchor(read, [first, said, second], None, render, encode) == len("first") + 1, "`at` is a token"
    read = Transcript().with_prompt(render([first, again, second]), encode)
    assert find_anchor(read, [first, again, second], None, render, encode) == len("first"), "`s[` is not there any more"
    read = Transcript().with_prompt("first", encode)
    assert find_anchor(read, [first], None, lambda said: "".join(e["content"] for e in said), encode) == 0, "the end"


def test_a_template_that_refuses_is_none() -> None:
    def refuse(messages: object) -> str:
        raise InvalidRequest("roles must alternate")

    assert text_renderer(refuse)([]) is None
    assert text_renderer(lambda messages: [1, 2])([]) is None
    assert text_renderer(lambda messages: "text")([]) == "text"
