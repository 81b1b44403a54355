"""Places in texts are found by the two tokens before them, the newest first."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.speculation.suffix import KEY_TOKENS, WAYS, PlaceTable, new_hash_key, place_offset, place_text_number

KEY = (0x67D4EB2F, 0x565667B1)


def found(table: PlaceTable, first: int, second: int) -> list[tuple[int, int]]:
    return [(place_text_number(place), place_offset(place)) for place in table.find_places(KEY, first, second) if place]


def test_a_place_is_found_by_the_two_tokens_before_it() -> None:
    table = PlaceTable()
    table.add_place(KEY, 7, array("i", [5, 6, 9]), 2)
    assert found(table, 5, 6) == [(7, 2)]
    assert found(table, 6, 5) == [] and found(table, 6, 9) == []


def test_the_newest_places_are_kept_and_come_first() -> None:
    table = PlaceTable()
    text = array("i", [1, 2] * (WAYS + 3))
    for offset in range(KEY_TOKENS, len(text)):
        table.add_place(KEY, 3, text, offset)
    newest = [(3, offset) for offset in range(2, len(text), 2)][::-1][:WAYS]
    assert found(table, 1, 2) == newest
    table.add_places(KEY, 4, text, KEY_TOKENS, len(text))
    assert found(table, 1, 2) == [(4, offset) for _, offset in newest]


@given(st.data())
def test_a_range_is_added_as_its_places_one_after_the_other(data: st.DataObject) -> None:
    one, many, pairs, key = PlaceTable(), PlaceTable(), set(), new_hash_key()
    some = st.sampled_from([1, 2, 70000, 250000, 2**31 - 1])
    for number in range(1, 4):
        text = array("i", data.draw(st.lists(some, min_size=KEY_TOKENS, max_size=60)))
        begin = data.draw(st.integers(KEY_TOKENS, len(text)))
        end = data.draw(st.integers(begin, len(text)))
        many.add_places(key, number, text, begin, end)
        for offset in range(begin, end):
            one.add_place(key, number, text, offset)
            pairs.add((text[offset - 2], text[offset - 1]))
    assert all(one.find_places(key, *pair) == many.find_places(key, *pair) for pair in pairs)


def test_the_table_takes_the_same_memory_whatever_is_in_it() -> None:
    table = PlaceTable()
    before = table.nbytes
    text = array("i", range(100_000))
    table.add_places(KEY, 1, text, KEY_TOKENS, len(text))
    assert table.nbytes == before < 5 << 20


def test_keys_are_two_odd_numbers_of_31_bits() -> None:
    keys = {new_hash_key() for _ in range(50)}
    assert len(keys) == 50
    assert all(number % 2 and number.bit_length() == 31 for key in keys for number in key)


def test_each_key_spreads_places_over_other_sets() -> None:
    text = array("i", range(20_000))
    sets = []
    for key in (KEY, (0x71374491, 0x428A2F99)):
        table = PlaceTable()
        table.add_places(key, 1, text, KEY_TOKENS, len(text))
        assert sum(table.find_places(key, a, a + 1)[0] != 0 for a in range(19_000)) == 19_000
        sets.append(table._next_ways.nonzero()[0])
    assert len(sets[0]) > 10_000 and len(set(sets[0]) & set(sets[1])) < 0.6 * len(sets[0])
