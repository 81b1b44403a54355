"""The limit of thoughts: what counts, when the tag is forced, and which part of it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.core.text import Encode, StopConditions, TextStream, ThinkingBudget, ThinkingLimit
from cortexmlx.structured.output import Thoughts
from support.cli.cli_fakes import Words

BEGUN = Thoughts("<t>", "</t>", opened_by_prompt=True)
OWN = Thoughts("<t>", "</t>")


class Answer:
    """An answer of single characters: each is a token, and its code the id."""

    def __init__(self, limit: int, thoughts: Thoughts = BEGUN, encode: Encode = lambda text, _: list(map(ord, text))):
        self.text = TextStream(Words(), StopConditions(), thoughts)
        made = ThinkingLimit.for_request(limit, thoughts, encode, 0x11_0000)
        assert made is not None
        self.budget = ThinkingBudget(made, self.text)
        self.said = ""

    def write(self, text: str, steered: bool = True) -> str:
        """Write characters, or, if it is steered, those that are forced instead. Return those that were forced."""
        forced_ones = ""
        for char in text:
            forced = self.budget.forced_tokens()
            if forced and steered:
                char = chr(forced[0])
                forced_ones += char
            self.said += char
            self.text.push(char)  # type: ignore[arg-type]
            self.budget.count_token(ord(char))
        return forced_ones


def test_there_is_no_limit_where_there_are_no_thoughts() -> None:
    def encode(text: str, special: bool) -> list[int]:
        raise AssertionError

    assert ThinkingLimit.for_request(None, BEGUN, encode, 5) is None
    assert ThinkingLimit.for_request(5, None, encode, 5) is None


@given(st.integers(0, 9), st.text("x<t>/", max_size=24), st.sampled_from([BEGUN, OWN]))
def test_no_token_is_forced_among_as_many_as_may_be_drafted(limit: int, text: str, thoughts: Thoughts) -> None:
    """Whatever comes next, the token after `max_drafts` others is free, too."""
    answer, free = Answer(limit, thoughts), 0
    for char in text:
        assert not (answer.budget.forced_tokens() and free > 0)
        free = max(free - 1, answer.budget.max_drafts)
        answer.write(char)


@pytest.mark.parametrize("limit", [0, 1, 2, 7])
def test_the_tag_comes_after_so_many_tokens(limit: int) -> None:
    answer = Answer(limit)
    assert answer.write("x" * 30) == "</t>"
    assert answer.said == "x" * limit + "</t>" + "x" * (26 - limit)
    assert answer.text.thinking_tokens == limit and not answer.budget.may_force_soon
    answer = Answer(limit)
    assert answer.write("x" * (limit + 4)) == "</t>" and not answer.budget.may_force_soon  # at once


def test_the_tag_that_opens_thoughts_does_not_count() -> None:
    answer = Answer(3, OWN)
    assert answer.write("<t>" + "x" * 20) == "</t>"
    assert answer.said.startswith("<t>xxx</t>")
    at_once = Answer(0, OWN)
    at_once.write("<t>" + "x" * 20)
    assert at_once.said.startswith("<t></t>x")


def test_a_tag_that_is_half_written_is_not_written_twice() -> None:
    for half in range(4):
        answer = Answer(5 + half)
        answer.write("abcde"[:5] + "</t>"[:half] + "x" * 10)
        assert answer.said.startswith("abcde</t>")
        assert answer.text.thinking == "abcde"


def test_a_special_token_is_forced_as_a_whole() -> None:
    """Its name in other tokens is no tag to a model or a grammar."""

    def encode(text: str, special: bool) -> list[int]:
        return [7 if part == "</t>" else 8 for part in re.findall("</t>|.", text)]

    for half in range(4):
        answer = Answer(half, encode=encode)
        answer.write("</t>"[:half], steered=False)
        assert answer.budget.forced_tokens() == [7]
    several = Answer(4, replace(BEGUN, close="</t>x"), encode)
    several.write("</t>", steered=False)
    assert several.budget.forced_tokens() == [8]


def test_thoughts_that_are_closed_or_never_begun_are_left_alone() -> None:
    closed = Answer(9)
    assert closed.write("abc</t>" + "x" * 30) == "" and not closed.budget.may_force_soon
    for text in ("Hello <t> there" * 3, "  \n Hello"):
        free = Answer(0, OWN)
        assert free.write(text) == "" and not free.budget.may_force_soon


def test_a_character_is_not_torn() -> None:
    """Tokens without text are parts of one, so the tag waits for the last part, but not for ever."""
    answer = Answer(2)
    answer.write("a")
    for part in range(5):
        forced = answer.budget.forced_tokens()
        assert bool(forced) is (part == 4)
        if not forced:
            answer.text.push("")  # type: ignore[arg-type]
            answer.budget.count_token(0)


@given(
    st.integers(0, 12),
    st.sampled_from([BEGUN, OWN]),
    st.text(alphabet="<t>/ x\n", max_size=40),
)
def test_thoughts_never_have_more_tokens(limit: int, thoughts: Thoughts, text: str) -> None:
    answer = Answer(limit, thoughts)
    due_before = answer.budget.may_force_soon
    for char in text + "x" * 20:
        forced = list(answer.budget.forced_tokens())
        assert due_before or not forced, "a tag was forced that nobody could expect"
        due_before = answer.budget.may_force_soon
        answer.write(char)
    assert answer.text.thinking_tokens <= limit + 4
    assert not answer.text.in_thoughts


def test_masks_allow_the_forced_tokens_one_by_one() -> None:
    answer = Answer(0)
    masks = answer.budget.forced_masks()
    for char, mask in zip("</t>", masks, strict=True):
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == [ord(char)]
