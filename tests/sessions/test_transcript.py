"""A later text has the tokens of an earlier one as far as both are alike, and always means its own text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.sessions.turn import Transcript

WORDS = {"<": 1, ">": 2, "a": 3, "b": 4, "ab": 5, "bb": 6, " ": 7}


def encode(text: str) -> list[int]:
    """The longest words first, from the left: tokens cross any place but those beside brackets."""
    ids = []
    while text:
        word = next(w for w in sorted(WORDS, key=len, reverse=True) if text.startswith(w))
        ids.append(WORDS[word])
        text = text[len(word) :]
    return ids


def decode(tokens: Any) -> str:
    names = {number: word for word, number in WORDS.items()}
    return "".join(names[token] for token in tokens)


def test_what_the_model_wrote_keeps_its_tokens() -> None:
    first = Transcript().with_prompt("<a>", encode).with_answer("ab", [3, 4])
    again = first.with_prompt("<a>ab<b>", encode)
    assert again.tokens == (1, 3, 2, 3, 4, 1, 4, 2), "not 5, which is the tokenizer's for ab"
    assert again.boundaries == ((0, 0), (3, 3), (5, 5), (8, 8))


def test_a_template_that_drops_what_was_said_is_followed_from_there() -> None:
    told = (
        Transcript()
        .with_prompt("<a>", encode)
        .with_answer("ab", [3, 4])
        .with_prompt("<a>ab<b>", encode)
        .with_answer("abb", [3, 4, 4])
    )
    changed = told.with_prompt("<a>ab<b>b<a>", encode)
    assert decode(changed.tokens) == "<a>ab<b>b<a>"
    assert changed.tokens[:8] == told.tokens[:8] and changed.tokens[8:] == (4, 1, 3, 2)


def test_a_token_across_a_cut_is_not_cut() -> None:
    told = Transcript().with_prompt("<a>", encode).with_answer("a", [3])
    assert told.with_prompt("<a>ab", encode).tokens == (1, 3, 2, 5), (
        "ab is one token, so the answer's place is given up"
    )
    assert told.with_prompt("<a>a<", encode).tokens == (1, 3, 2, 3, 1)


def test_the_same_text_is_the_same_transcript_and_nothing_is_encoded() -> None:
    told = Transcript().with_prompt("<a>", encode)
    assert told.with_prompt("<a>", lambda text: pytest.fail("encoded again")) == told


def test_only_the_last_answer_and_what_is_new_is_encoded() -> None:
    told = Transcript().with_prompt("<" * 100 + ">", encode).with_answer("ab", [5])
    seen: list[str] = []

    def noted(text: str) -> list[int]:
        seen.append(text)
        return encode(text)

    told.with_prompt("<" * 100 + ">ab<", noted)
    assert seen == ["ab<", "ab"]


TEXT = st.text("<>ab ", max_size=6)


@given(st.lists(st.tuples(st.integers(0, 3), TEXT, TEXT), max_size=8))
def test_tokens_always_decode_to_the_text_and_begin_with_those_of_a_shared_beginning(
    turns: list[tuple[int, str, str]],
) -> None:
    """A dialogue that goes on, goes back some turns, and is answered in single characters."""
    told, said = Transcript(), [""]
    for back, question, answer in turns:
        del said[len(said) - min(back, len(said) - 1) :]
        before, told = told, told.with_prompt(f"{said[-1]}<{question}>", encode)
        assert decode(told.tokens) == told.text == f"{said[-1]}<{question}>"
        for chars, count in before.boundaries:
            if told.text.startswith(before.text[:chars]) and told.text[chars : chars + 1] == "<":
                assert told.tokens[:count] == before.tokens[:count]
        told = told.with_answer(answer, [WORDS[c] for c in answer])
        said.append(told.text)
        assert decode(told.tokens) == told.text
        assert told.boundaries[-1] == (len(told.text), len(told.tokens))
