"""Three quotes: typed ones open and close a block, pasted ones are text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.chat.quotes import TypedQuotes, add_quotes, is_open_block, starts_block, strip_quotes
from cortexmlx.cli.chat.slash.commands import BY_NAME
from cortexmlx.cli.chat.slash.parse import ParsedInput, parse_input

TEXTS = st.lists(st.sampled_from(['"""', '"', "a", "\n", " ", "/system "]), max_size=9).map("".join)


@pytest.mark.parametrize(
    ("text", "opened"),
    [
        ("hi", False),
        ('"""', True),
        ('"""a\nb', True),
        ('"""a"""', False),
        ('"""a""" b\nc', False),
        ('  """a\nb"""  ', False),
        ('/system """a', True),
        ('/set system """a"""', False),
    ],
)
def test_a_block_is_open_from_a_line_that_begins_it_to_one_that_ends_it(text: str, opened: bool) -> None:
    assert is_open_block(text) is opened


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ('"""a\nb\n"""', "a\nb"),
        ('"""a"""', "a"),
        ('""""""', ""),
        ('"""he said "so\n"""', 'he said "so'),
        (' hi "', ' hi "'),
        ('"""Doc."""\nx = """a"""', '"""Doc."""\nx = """a"""'),
    ],
)
def test_quotes_go_where_they_are_around_all_of_it(text: str, inside: str) -> None:
    assert strip_quotes(text) == inside


@given(TEXTS)
def test_a_message_in_quotes_is_read_as_it_was(text: str) -> None:
    assert not is_open_block(add_quotes(text)) and strip_quotes(add_quotes(text)) == text


@given(TEXTS, TEXTS, TEXTS)
def test_a_paste_is_sent_with_the_next_enter_and_loses_nothing(before: str, pasted: str, after: str) -> None:
    """Unless typed quotes have opened a block before it; what is typed behind it does not matter."""
    quotes, text = TypedQuotes(), ""
    for sign in before:
        text += sign
        quotes.update(text, 0)
    if quotes.is_open(text) or '"' in before or before.lstrip().startswith("/"):
        return
    text += pasted
    quotes.update(text, 0)
    for sign in after:
        text += sign
        quotes.update(text, 0)
    if starts_block(pasted) or '"' not in after:  # else it is typing that makes three of them
        assert not quotes.is_open(text)
        if not text.startswith("/"):
            assert parse_input(quotes.protect_quotes(text), BY_NAME) == ParsedInput(None, text if text.strip() else "")


@given(TEXTS)
def test_only_typed_quotes_end_a_typed_block(pasted: str) -> None:
    quotes = TypedQuotes()
    for text in ('"', '""', '"""', '"""\n'):
        quotes.update(text, 0)
    quotes.update(text := text + pasted, 0)
    assert quotes.is_open(text) or len(pasted) == 1
    for sign in '\n"""':
        quotes.update(text := text + sign, 0)
    assert not quotes.is_open(text) and quotes.protect_quotes(text) == text
    assert strip_quotes(text).rstrip("\n") == pasted.rstrip("\n")


def test_an_entry_of_the_history_is_a_block_and_a_draft_is_none() -> None:
    quotes = TypedQuotes()
    quotes.begin('"""Doc.\nx')
    assert not quotes.is_open('"""Doc.\nx') and quotes.protect_quotes('"""Doc.\nx') == add_quotes('"""Doc.\nx')
    quotes.update(block := add_quotes("a"), 1)
    assert not quotes.is_open(block) and quotes.protect_quotes(block) == block
