"""Streaming text: whatever the tokens are, what was shown is never taken back, and is all of the text in the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.models.tokenizers.detokenize import (
    ByteDetokenizer,
    LeadingSpace,
    PieceDetokenizer,
    TokenPiece,
    WindowDetokenizer,
)
from support.streaming import shown

PIECES = st.lists(st.binary(max_size=6) | st.text(max_size=3).map(str.encode), max_size=12)


@given(PIECES)
def test_byte_tokens_stream_to_what_python_decodes_of_them_all(pieces: list[bytes]) -> None:
    segments = shown(ByteDetokenizer(pieces), [*range(len(pieces))])
    assert "".join(segments) == b"".join(pieces).decode("utf-8", "replace")


@given(PIECES)
def test_the_bytes_of_single_tokens_are_those_of_the_text(pieces: list[bytes]) -> None:
    detokenizer = ByteDetokenizer(pieces)
    assert b"".join(map(detokenizer.token_bytes, range(len(pieces)))) == b"".join(pieces)
    assert detokenizer.token_bytes(len(pieces)) == detokenizer.token_bytes(-1) == b""


def test_a_piece_is_its_text_or_its_byte() -> None:
    detokenizer = PieceDetokenizer(
        [TokenPiece(" a", has_marker=True), TokenPiece("", byte=0xE2), TokenPiece("<s>", special=True)],
        LeadingSpace.DROP_ONE,
    )
    assert [detokenizer.token_bytes(token) for token in (0, 1, 2, 3, -1)] == [b" a", b"\xe2", b"<s>", b"", b""]
    assert WindowDetokenizer(lambda ids: "né" * len(ids)).token_bytes(0) == "né".encode()


RUNS = st.tuples(st.sampled_from([0x80, 0xE2, 0x82, 0xF0, 0x9F, 0xFF]), st.integers(1, 40))
BROKEN = st.lists(RUNS.map(lambda run: [run[0]] * run[1]) | st.text(max_size=3).map(lambda text: [*text.encode()])).map(
    lambda runs: [byte for run in runs[:8] for byte in run]
)


class Windows:
    """Decodes tokens that are bytes, and counts them."""

    def __init__(self) -> None:
        self.decoded = 0

    def __call__(self, tokens: list[int]) -> str:
        self.decoded += len(tokens)
        return bytes(tokens).decode("utf-8", "replace")


@given(BROKEN)
def test_a_window_shows_what_python_decodes_of_all_tokens_however_broken(tokens: list[int]) -> None:
    assert "".join(shown(WindowDetokenizer(Windows()), tokens)) == bytes(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize("run", [[0xFF], [0xE2], [0x80], [0xF0, 0x9F], [0xE2, 0x82, 0x41, 0xE2]])
def test_the_work_of_a_window_is_linear_in_a_run_of_broken_text(run: list[int]) -> None:
    """An answer of tokens that are no text, which a bias can force, is decoded on the engine's thread."""
    decode = Windows()
    shown(WindowDetokenizer(decode), run * 2000)
    assert decode.decoded < 100 * len(run) * 2000


@given(st.text(max_size=20))
def test_no_byte_of_a_character_shows_before_its_last(text: str) -> None:
    data = text.encode()
    for detokenizer in (
        ByteDetokenizer([bytes([byte]) for byte in range(256)]),
        PieceDetokenizer([TokenPiece("", byte=byte) for byte in range(256)], LeadingSpace.KEEP),
    ):
        segments = shown(detokenizer, [*data])
        assert [segment for segment in segments if segment] == [*text]


def test_an_unfinished_character_ends_as_replacement_characters() -> None:
    begun = [*"🙂".encode()[:3]]
    as_one = ByteDetokenizer([bytes([byte]) for byte in range(256)])
    assert shown(as_one, begun) == ["", "", "", "\ufffd"]
    one_each = PieceDetokenizer(
        [TokenPiece("", byte=byte) for byte in range(256)] + [TokenPiece("a")], LeadingSpace.KEEP
    )
    assert shown(one_each, begun) == ["", "", "", "\ufffd" * 3]
    one_each.reset()
    assert shown(one_each, [*begun, 256]) == ["", "", "", "\ufffd" * 3 + "a", ""]


@pytest.mark.parametrize(
    ("leading", "text"),
    [(LeadingSpace.KEEP, "<s>  a b"), (LeadingSpace.DROP_ONE, "<s> a b"), (LeadingSpace.DROP_ALL, "<s>a b")],
)
def test_spaces_at_the_beginning_are_dropped_as_they_were_added(leading: LeadingSpace, text: str) -> None:
    pieces = [
        TokenPiece("<s>", special=True),
        TokenPiece(" ", has_marker=True),
        TokenPiece(" a", has_marker=True),
        TokenPiece(" b", has_marker=True),
    ]
    detokenizer = PieceDetokenizer(pieces, leading)
    assert "".join(shown(detokenizer, [0, 1, 2, 3])) == text
    detokenizer.reset()
    assert "".join(shown(detokenizer, [0, 1, 2, 3])) == text, "a second answer begins as the first"


def test_ids_beyond_the_vocabulary_add_no_text() -> None:
    for detokenizer in (ByteDetokenizer([b"a"]), PieceDetokenizer([TokenPiece("a")], LeadingSpace.KEEP)):
        assert shown(detokenizer, [0, 1, -1, 10**6, 0]) == ["a", "", "", "", "a", ""]
