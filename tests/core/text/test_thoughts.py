"""Thoughts are told from the answer, however the text arrives, and nothing of it is lost."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cortexmlx.core.text import MAX_TAG_BLANKS, TextKind, TextPart, ThinkingTokenCounter, ThoughtSplitter
from cortexmlx.structured.output import Thoughts

PLAIN = Thoughts("<think>", "</think>")
HARMONY = Thoughts("<|a|>think<|m|>", "<|e|><|a|>final<|m|>", skip_text="<|a|>final<|m|>")
"""Tags of several tokens, one of which another begins with."""
KINDS = st.sampled_from(
    [PLAIN, replace(PLAIN, opened_by_prompt=True), HARMONY, replace(HARMONY, opened_by_prompt=True)]
)
BITS = ["<think>", "</think>", "<|a|>think<|m|>", "<|a|>final<|m|>", "<|e|>", "</thi", "<", "a", "é", " ", "\n", "```"]
TEXTS = st.lists(st.sampled_from(BITS) | st.text(max_size=3), max_size=12).map("".join)


def split(text: str, thoughts: Thoughts, cuts: list[int] | None = None) -> list[TextPart]:
    """The parts of a text that comes in pieces, with neighbours of one kind joined."""
    splitter = ThoughtSplitter(thoughts)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts or ()), len(text)]
    parts = [part for a, b in itertools.pairwise(places) for part in splitter.feed(text[a:b])]
    joined: list[TextPart] = []
    for part in [*parts, *splitter.rest()]:
        assert part.text
        if joined and joined[-1].kind is part.kind:
            part = TextPart(joined.pop().text + part.text, part.kind)
        joined.append(part)
    return joined


def only(kind: TextKind, parts: list[TextPart]) -> str:
    return "".join(part.text for part in parts if part.kind is kind)


def defined(text: str, thoughts: Thoughts) -> tuple[str, str]:
    """Thoughts and answer by a pattern over the whole text, which is no stream."""
    tag, close = map(re.escape, (thoughts.open, thoughts.close))
    skipped = re.escape(thoughts.skip_text) if thoughts.skip_text else "(?!)"
    begins = rf"\s*(?:{tag})?\s*" if thoughts.opened_by_prompt else rf"\s{{0,{MAX_TAG_BLANKS}}}{tag}\s*"
    if found := re.match(
        rf"{begins}((?:(?!{close}).)*?)(?:\s{{0,{MAX_TAG_BLANKS}}}{close}\s*(.*))?\Z", text, re.DOTALL
    ):
        return found[1], found[2] or ""
    found = re.match(rf"\s{{0,{MAX_TAG_BLANKS}}}{skipped}\s*(.*)\Z", text, re.DOTALL)
    return "", found[1] if found else text


@given(TEXTS, KINDS, st.lists(st.integers(0, 200), max_size=8))
@example("<think>a</think>b", PLAIN, list(range(20)))
@example("\0", PLAIN, [])
@example(" " * 70 + "<think>a" + " " * 70 + "</think>b", PLAIN, list(range(200)))
@example("a" + " " * 70 + "</think>b", replace(PLAIN, opened_by_prompt=True), list(range(100)))
def test_any_cutting_gives_the_parts_of_the_definition_and_loses_nothing(
    text: str, thoughts: Thoughts, cuts: list[int]
) -> None:
    parts = split(text, thoughts, cuts)
    assert "".join(part.text for part in parts) == text
    assert parts == split(text, thoughts, list(range(len(text))))
    assert (only(TextKind.THOUGHT, parts), only(TextKind.ANSWER, parts)) == defined(text, thoughts)


@given(TEXTS, KINDS, st.lists(st.integers(0, 200), max_size=12))
@example("<think>\nab </think>c", PLAIN, [7, 8, 8, 9, 9, 10, 11, 15])
@example("ab</think>c", replace(PLAIN, opened_by_prompt=True), [0, 0, 1, 2])
@example("<think>ab", PLAIN, [3, 8, 9, 9])
def test_a_token_is_the_thoughts_that_has_a_part_of_them_or_none_yet_where_they_go_on(
    text: str, thoughts: Thoughts, cuts: list[int]
) -> None:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    splitter, tokens = ThoughtSplitter(thoughts), ThinkingTokenCounter()
    for a, b in itertools.pairwise(places):
        tokens.add_token(text[a:b])
        tokens.add_parts(splitter.feed(text[a:b]))
    tokens.add_parts(splitter.rest())
    kinds = [part.kind for part in split(text, thoughts) for _ in part.text]
    touched = [kinds[a : max(b, a + 1)] for a, b in itertools.pairwise(places)]
    assert tokens.count == sum(TextKind.THOUGHT in each for each in touched)


@pytest.mark.parametrize(
    ("thoughts", "text", "thinking", "answer"),
    [
        (PLAIN, "<think>\nlet me see\n</think>\n\nYes.\n", "let me see", "Yes.\n"),
        (PLAIN, "  Hello <b>", "", "  Hello <b>"),
        (PLAIN, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (PLAIN, "Write `<think>` and `</think>`:\n<think>", "", "Write `<think>` and `</think>`:\n<think>"),
        (PLAIN, "<think>x</think>```\n<think>y</think>```", "x", "```\n<think>y</think>```"),
        (PLAIN, "<think>half a thou", "half a thou", ""),
        (PLAIN, "<think>half </thi", "half </thi", ""),
        (PLAIN, "<thi", "", "<thi"),
        (replace(PLAIN, opened_by_prompt=True), "\nso\n</think>\n\nYes.", "so", "Yes."),
        (replace(PLAIN, opened_by_prompt=True), "<think>\nso</think>Yes.", "so", "Yes."),
        (replace(PLAIN, opened_by_prompt=True), "</think>Yes.", "", "Yes."),
        (replace(PLAIN, opened_by_prompt=True), "a < b <think> c</think>d", "a < b <think> c", "d"),
        (HARMONY, "<|a|>think<|m|>so<|e|><|a|>final<|m|>Yes.", "so", "Yes."),
        (HARMONY, "<|a|>final<|m|>Yes.", "", "Yes."),
    ],
)
def test_what_models_write(thoughts: Thoughts, text: str, thinking: str, answer: str) -> None:
    parts = split(text, thoughts, list(range(len(text))))
    assert (only(TextKind.THOUGHT, parts), only(TextKind.ANSWER, parts)) == (thinking, answer)


def test_nothing_certain_is_held_back() -> None:
    splitter = ThoughtSplitter(PLAIN)
    said = ["<think>", "a", " ", "b<", "/think", ">", "\n", "yes", "<think>"]
    given = [[(part.text, part.kind) for part in splitter.feed(piece)] for piece in said]
    assert given[1] == [("a", TextKind.THOUGHT)] and given[3] == [(" b", TextKind.THOUGHT)]
    assert given[7] == [("yes", TextKind.ANSWER)] and given[8] == [("<think>", TextKind.ANSWER)]
    assert [*splitter.rest()] == []
