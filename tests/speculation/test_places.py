"""Places in texts are found by the two tokens before them, the newest first."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.speculation.places import ORDER, WAYS, PlaceTable, offset_of, text_of


def found(table: PlaceTable, first: int, second: int) -> list[tuple[int, int]]:
    return [(text_of(place), offset_of(place)) for place in table.after(first, second) if place]


def test_a_place_is_found_by_the_two_tokens_before_it() -> None:
    table = PlaceTable()
    table.add(7, array("i", [5, 6, 9]), 2)
    assert found(table, 5, 6) == [(7, 2)]
    assert found(table, 6, 5) == [] and found(table, 6, 9) == []


def test_the_newest_places_are_kept_and_come_first() -> None:
    table = PlaceTable()
    text = array("i", [1, 2] * (WAYS + 3))
    for offset in range(ORDER, len(text)):
        table.add(3, text, offset)
    newest = [(3, offset) for offset in range(2, len(text), 2)][::-1][:WAYS]
    assert found(table, 1, 2) == newest
    table.add_range(4, text, ORDER, len(text))
    assert found(table, 1, 2) == [(4, offset) for _, offset in newest]


@given(st.data())
def test_a_range_is_added_as_its_places_one_after_the_other(data: st.DataObject) -> None:
    one, many, pairs = PlaceTable(), PlaceTable(), set()
    for number in range(1, 4):
        text = array("i", data.draw(st.lists(st.sampled_from([1, 2, 70000, 250000]), min_size=ORDER, max_size=60)))
        begin = data.draw(st.integers(ORDER, len(text)))
        end = data.draw(st.integers(begin, len(text)))
        many.add_range(number, text, begin, end)
        for offset in range(begin, end):
            one.add(number, text, offset)
            pairs.add((text[offset - 2], text[offset - 1]))
    assert all(one.after(*pair) == many.after(*pair) for pair in pairs)


def test_the_table_takes_the_same_memory_whatever_is_in_it() -> None:
    table = PlaceTable()
    before = table.nbytes
    text = array("i", range(100_000))
    table.add_range(1, text, ORDER, len(text))
    assert table.nbytes == before < 5 << 20
