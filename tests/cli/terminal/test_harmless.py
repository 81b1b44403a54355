"""Which characters a terminal gets, and which are shown as something else."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.terminal.harmless import harmless, in_a_line
from support.cli.hostile import BIDI, HOSTILE, is_obeyed


@pytest.mark.parametrize(
    "text",
    [
        "plain ASCII,\twith\nlines",
        "שלום עולם",
        "مرحبا بالعالم",
        "می‌خواهم",  # with a joiner inside the word
        "क्‍ष",
        "👩‍👩‍👧‍👦 👍🏽 ❤️ 🇫🇷",
        "天空是蓝色的。",
        "naïve café — “quotes” … ½",
    ],
)
def test_usual_text_stays_as_it_is(text: str) -> None:
    assert harmless(text) == text


@given(st.text())
def test_nothing_is_left_that_a_terminal_obeys_or_turns(text: str) -> None:
    assert not any(is_obeyed(sign) for sign in harmless(text))
    assert harmless(harmless(text)) == harmless(text)


@given(st.text(), st.integers(0, 50))
def test_a_sequence_in_two_pieces_is_as_harmless(text: str, at: int) -> None:
    assert harmless(text[:at]) + harmless(text[at:]) == harmless(text)


def test_every_character_that_turns_text_is_known() -> None:
    """As the Unicode database of Python has them."""
    turning = {
        chr(c)
        for c in range(0x110000)
        if unicodedata.bidirectional(chr(c)) in {*["LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"]}
    }
    assert turning <= set(BIDI) and not any(sign in harmless("".join(turning)) for sign in turning)


def test_hostile_text_is_seen_and_a_name_stays_in_its_line() -> None:
    assert harmless("a\x1b[2Jb\x07 \x9bc\x08\x7f\r\nd") == "a␛[2Jb␇ \ufffdc␈␡\nd"
    assert harmless("safe\u202egpj.exe\u200e") == "safe\ufffdgpj.exe"
    assert in_a_line("model\nerror: pay\r\there") == "model␊error: pay␍␉here"
    for text in HOSTILE:
        assert not any(is_obeyed(sign) for sign in harmless(text))
