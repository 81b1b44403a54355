"""Blocks of a text, and which beginnings of lines say for certain what they begin."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.cli.markdown.blocks import lines_length, parse_blocks, stable_prefix
from support.effort import examples


def test_each_item_of_a_list_is_a_block() -> None:
    found = parse_blocks("para\n\n- a\n  - b\n- c\n\n```\ncode\n```\n")
    assert [(block.kind, block.begin, block.end) for block in found] == [
        ("paragraph_open", 0, 1),
        ("list_item_open", 2, 4),
        ("list_item_open", 4, 6),
        ("fence", 6, 9),
    ]


@pytest.mark.parametrize(
    "line", ["word", "- word", "1. word", "> - **bold", "# Title", "2024 was", "1.5", "(so", "`x", "-5 °"]
)
def test_a_line_whose_block_is_certain(line: str) -> None:
    assert stable_prefix(f"before\n{line}") == f"before\n{line}"


@pytest.mark.parametrize(
    "line", ["-", "- ", "1", "1.", "*", "**", "``", "```", "#", ">", "> -", "  ", "|", "_", "~~", "=", "+"]
)
def test_a_line_that_may_become_another_block(line: str) -> None:
    assert stable_prefix(f"before\n{line}") == "before\n"


BEGINNINGS = st.text("ab1.-*+#>`~|_ (", min_size=1, max_size=8)


@given(BEGINNINGS, BEGINNINGS, st.sampled_from(["", "word\n", "- item\n", "> quote\n", "1. one\n\n", "```\nx\n```\n"]))
@settings(max_examples=examples(300))
def test_what_is_certain_stays_however_the_line_goes_on(line: str, more: str, before: str) -> None:
    """But for tables, whose heading is a line of a paragraph until the line below it is whole."""
    if stable_prefix(before + line) == before + line and "|" not in line + more:
        now, later = parse_blocks(before + line), parse_blocks(before + line + more)
        assert [(b.kind, b.begin) for b in now] == [(b.kind, b.begin) for b in later]


def test_the_first_lines_by_their_characters() -> None:
    assert [lines_length("ab\n\nc\n", count) for count in range(4)] == [0, 3, 4, 6]
