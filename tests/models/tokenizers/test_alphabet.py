"""The byte-level alphabet, judged by the tokenizers library, which writes bytes so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from cortexmlx.models.tokenizers.alphabet import alphabet_bytes, byte_level_token_bytes

WRITER = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def test_it_has_a_character_for_every_byte() -> None:
    table = alphabet_bytes()
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(table.values()) == [*range(256)]


@given(st.text())
def test_a_token_stands_for_the_bytes_that_were_written_so(text: str) -> None:
    written = "".join(piece for piece, _ in WRITER.pre_tokenize_str(text))
    assert byte_level_token_bytes(written) == text.encode()


def test_a_token_outside_the_alphabet_is_its_own_text() -> None:
    for token in ("<|a b|>", "<｜end▁of｜>", "  "):
        assert byte_level_token_bytes(token) == token.encode()
