"""Tokens as text and bytes, and where they begin in the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.protocols.openai.logprobs import CompletionLogprobs, chat_logprobs, id_logprobs, token_name
from cortexmlx.types.logprobs import TokenLogprob

BYTES = {1: b"a", 2: b"\xe2\x80", 3: b"\x94 b", 4: b"a"}.__getitem__


def test_a_token_that_is_no_whole_character_is_named_by_its_bytes() -> None:
    assert [token_name(b" a"), token_name("é".encode()), token_name(b"\xe2\x80")] == [" a", "é", r"bytes:\xe2\x80"]


def test_a_chat_has_text_and_bytes_of_each_and_no_infinity() -> None:
    told = [TokenLogprob(2, -0.5, ((2, -0.5), (1, -math.inf)))]
    top = [
        {"token": r"bytes:\xe2\x80", "bytes": [0xE2, 0x80], "logprob": -0.5},
        {"token": "a", "bytes": [97], "logprob": -9999.0},
    ]
    assert chat_logprobs(told, BYTES) == [{**top[0], "top_logprobs": top}]


def test_a_simple_record_has_ids_and_text() -> None:
    told = [None, TokenLogprob(1, -0.5, ((1, -0.5),))]
    one = {"token_id": 1, "token": "a", "logprob": -0.5}
    assert id_logprobs(told, BYTES) == [None, {**one, "top": [one]}]


def lists_of(pieces: Sequence[bytes], text: str, told: Sequence[TokenLogprob | None] = ()) -> dict[str, Any]:
    lists = CompletionLogprobs(pieces.__getitem__)
    lists.add_tokens(range(len(pieces)), told or [None] * len(pieces))
    lists.add_text(text)
    return lists.pop_lists(is_complete=True)


def test_of_two_tokens_with_one_text_the_likelier_has_the_name() -> None:
    listed = lists_of([b"a", b"a"], "aa", [None, TokenLogprob(1, -0.5, ((1, -0.5), (0, -2.0)))])
    assert (listed["tokens"], listed["token_logprobs"]) == (["a", "a"], [None, -0.5])
    assert listed["top_logprobs"] == [None, {"a": -0.5}]


def offsets(pieces: Sequence[bytes], text: str) -> list[int]:
    places: list[int] = lists_of(pieces, text)["text_offset"]
    return places


def test_a_character_in_two_tokens_begins_with_the_first_and_a_cut_text_ends_them() -> None:
    assert offsets([b"a", b"\xe2\x80", b"\x94 b", b"c"], "a— bc") == [0, 1, 1, 4]
    assert offsets([b"ab", b"cd", b"ef"], "abc") == [0, 2, 3]
    assert offsets([b" one", b" two"], "one two") == [0, 3]


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4), max_size=6))
def test_tokens_of_whole_characters_begin_where_their_text_does(pieces: list[str]) -> None:
    places = offsets([piece.encode() for piece in pieces], text := "".join(pieces))
    assert all(text[place:].startswith(piece) for place, piece in zip(places, pieces, strict=True))


def test_a_token_is_told_when_the_text_has_reached_it_and_only_once() -> None:
    lists = CompletionLogprobs([b"ab", b"cd", b"ef"].__getitem__)
    lists.add_tokens([0, 1], [None, None])
    assert lists.pop_lists(is_complete=False)["tokens"] == ["ab"]
    lists.add_text("a")
    assert lists.pop_lists(is_complete=False)["tokens"] == []
    lists.add_text("b")
    assert lists.pop_lists(is_complete=False) == {
        "text_offset": [2],
        "tokens": ["cd"],
        "token_logprobs": [None],
        "top_logprobs": [None],
    }
    lists.add_tokens([2], [None])
    assert lists.pop_lists(is_complete=False)["tokens"] == []
    assert lists.pop_lists(is_complete=True)["text_offset"] == [2], "a stop string cut off all after `ab`"


def test_a_space_that_marks_the_first_token_has_no_place_if_the_text_goes_without() -> None:
    one, two = [b" one", b" two"], [b" ", b"two"]
    for pieces, text, places in (
        (one, "one two", [0, 3]),
        (one, " one two", [0, 4]),
        (two, "two", [0, 0]),
        (two, " two", [0, 1]),
    ):
        lists = CompletionLogprobs(pieces.__getitem__)
        lists.add_tokens([0, 1], [None, None])
        taken = lists.pop_lists(is_complete=False)["text_offset"]
        lists.add_text(text)
        assert taken + lists.pop_lists(is_complete=False)["text_offset"] == places
