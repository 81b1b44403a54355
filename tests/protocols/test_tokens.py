"""Tokens as text and bytes, and where they begin in the answer."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.logprobs import TokenLogprob
from cortexmlx.protocols.tokens import chat_tokens, completion_tokens, name_of, offsets, simple_tokens
from cortexmlx.request import Completion, FinishReason, Timings, Usage

BYTES = {1: b"a", 2: b"\xe2\x80", 3: b"\x94 b", 4: b"a"}.__getitem__


def test_a_token_that_is_no_whole_character_is_named_by_its_bytes() -> None:
    assert [name_of(b" a"), name_of("é".encode()), name_of(b"\xe2\x80")] == [" a", "é", r"bytes:\xe2\x80"]


def test_a_chat_has_text_and_bytes_of_each_and_no_infinity() -> None:
    told = [TokenLogprob(2, -0.5, ((2, -0.5), (1, -math.inf)))]
    top = [
        {"token": r"bytes:\xe2\x80", "bytes": [0xE2, 0x80], "logprob": -0.5},
        {"token": "a", "bytes": [97], "logprob": -9999.0},
    ]
    assert chat_tokens(told, BYTES) == [{**top[0], "top_logprobs": top}]


def test_a_simple_record_has_ids_and_text() -> None:
    told = [None, TokenLogprob(1, -0.5, ((1, -0.5),))]
    one = {"token_id": 1, "token": "a", "logprob": -0.5}
    assert simple_tokens(told, BYTES) == [None, {**one, "top": [one]}]


def test_of_two_tokens_with_one_text_the_likelier_has_the_name() -> None:
    logprobs = (TokenLogprob(1, -0.5, ((1, -0.5), (4, -2.0))),)
    answer = Completion("a", (1,), FinishReason.STOP, Usage(1, 1), Timings(0, 0, 0, 0, 0), logprobs)
    listed = completion_tokens(answer, None, "a", BYTES)
    assert listed == {"text_offset": [0], "tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]}


def test_a_character_in_two_tokens_begins_with_the_first_and_a_cut_text_ends_them() -> None:
    assert offsets([b"a", b"\xe2\x80", b"\x94 b", b"c"], "a— bc") == [0, 1, 1, 4]
    assert offsets([b"ab", b"cd", b"ef"], "abc") == [0, 2, 3]
    assert offsets([b" one", b" two"], "one two") == [0, 3]


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4), max_size=6))
def test_tokens_of_whole_characters_begin_where_their_text_does(pieces: list[str]) -> None:
    places = offsets([piece.encode() for piece in pieces], text := "".join(pieces))
    assert all(text[place:].startswith(piece) for place, piece in zip(places, pieces, strict=True))
