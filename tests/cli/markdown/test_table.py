"""Tables in windows of all widths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.markdown.stream import MarkdownStream
from cortexmlx.cli.markdown.table import fit_widths

TABLE = """
| name | price | meaning of it |
|:-----|------:|:-------------:|
| tea  | 3     | warm and **good** |
| water | 12 | `x` |
"""


def shown(text: str, width: int) -> list[str]:
    stream = MarkdownStream()
    stream.feed(text)
    return [line.plain for line in stream.take_remaining_rows(width)]


def test_columns_are_as_wide_as_their_cells_and_aligned() -> None:
    assert shown(TABLE, 60) == [
        "name  │ price │ meaning of it",
        "──────┼───────┼──────────────",
        "tea   │     3 │ warm and good",
        "water │    12 │       x",
    ]


def test_the_widest_column_gives_way_first() -> None:
    assert shown(TABLE, 24) == [
        "name  │ price │ meaning",
        "      │       │  of it",
        "──────┼───────┼─────────",
        "tea   │     3 │ warm and",
        "      │       │   good",
        "water │    12 │    x",
    ]


def test_without_room_for_columns_a_row_is_a_list() -> None:
    assert shown(TABLE, 18) == [
        "name: tea",
        "price: 3",
        "meaning of it:",
        "warm and good",
        "",
        "name: water",
        "price: 12",
        "meaning of it: x",
    ]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(6, 100))
def test_widths_fill_the_room_or_are_what_the_columns_wish(wished: list[int], room: int) -> None:
    """There is room for one character of each column."""
    widths = fit_widths(tuple(wished), room)
    assert sum(widths) == min(sum(wished), room)
    assert all(0 < width <= wish for width, wish in zip(widths, wished, strict=True))
