"""Texts are stored once as far as they begin alike, apart for each client, and within bounds."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.speculation.suffix import LONGEST_MATCH, ClientTexts, RowText, TextStore


def stored(shelf: ClientTexts) -> int:
    return sum(len(text.tokens) for text in shelf.texts.values())


def begin(texts: TextStore, shelf: ClientTexts, tokens: list[int]) -> RowText:
    return texts.add(shelf, array("i", tokens))[0]


def test_rows_of_one_prompt_store_it_once() -> None:
    texts, prompt = TextStore(), list(range(1000))
    shelf = texts.client_texts(None)
    rows = [begin(texts, shelf, prompt) for _ in range(16)]
    assert stored(shelf) == 1000 + 15 * LONGEST_MATCH
    assert all(list(row.tokens) == prompt[-LONGEST_MATCH:] and row.start == 1000 - LONGEST_MATCH for row in rows[1:])


def test_the_next_turn_stores_what_is_new() -> None:
    texts, turn = TextStore(), list(range(500))
    shelf = texts.client_texts(None)
    for more in range(10):
        row = begin(texts, shelf, turn)
        row.tokens.extend(range(1000 * more + 600, 1000 * more + 700))
        turn = [*turn, *range(1000 * more + 600, 1000 * more + 700), *range(1000 * more + 800, 1000 * more + 820)]
        texts.finish(None, row)
    assert stored(shelf) == 500 + 10 * 100 + 9 * (20 + LONGEST_MATCH)


def test_an_answer_that_was_given_before_is_not_stored_again() -> None:
    texts = TextStore()
    shelf = texts.client_texts(None)
    first, second, third = (begin(texts, shelf, [1, 2, 3]) for _ in range(3))
    for row, answer in ((first, [4, 5, 6]), (second, [4, 5]), (third, [4, 7])):
        row.tokens.extend(answer)
        texts.finish(None, row)
    assert list(shelf.texts) == [third.number, first.number]
    following, path = texts.add(shelf, array("i", [1, 2, 3, 4, 7, 8]))
    assert path == {first.number: 4, third.number: 5} and following.branch == 5


def test_clients_texts_are_apart() -> None:
    texts = TextStore()
    begin(texts, texts.client_texts("a"), [1, 2, 3])
    assert begin(texts, texts.client_texts("b"), [1, 2, 3]).branch == 0
    assert begin(texts, texts.client_texts(None), [1, 2, 3]).branch == 0
    assert begin(texts, texts.client_texts("a"), [1, 2, 3]).branch == 3


def test_the_client_who_asked_last_keeps_its_texts_longest() -> None:
    texts = TextStore(max_tokens=500)
    for client in ("a", "b", "a", "c"):
        texts.finish(client, begin(texts, texts.client_texts(client), list(range(ord(client), ord(client) + 70))))
    assert list(texts.texts_by_client) == ["a", "c"]


def test_a_client_loses_the_text_that_was_used_least_recently() -> None:
    texts = TextStore(max_client_tokens=600)
    shelf = texts.client_texts(None)
    for first in (1, 2, 3):
        texts.finish(None, begin(texts, shelf, [first] * 60))
    begin(texts, shelf, [1] * 60 + [9])
    texts.finish(None, begin(texts, shelf, [4] * 60))
    assert [text.tokens[0] for text in shelf.texts.values() if not text.is_live] == [3, 1, 4]


def test_a_text_outlives_those_that_branch_off_it() -> None:
    texts = TextStore(max_client_tokens=520)
    shelf = texts.client_texts(None)
    root = begin(texts, shelf, list(range(50)))
    texts.finish(None, root)
    for branch in (100, 200, 300, 400):
        texts.finish(None, begin(texts, shelf, [*range(50), branch]))
        assert root.number in shelf.texts


@given(st.data())
def test_texts_are_found_again_and_stay_within_their_bounds(data: st.DataObject) -> None:
    """Any row's tokens are those of the texts that it begins with, and of its own; nothing is left of what is gone."""
    texts = TextStore(max_tokens=1500, max_client_tokens=800)
    live: list[tuple[str, RowText, list[int]]] = []
    said: list[list[int]] = [[1]]
    for _ in range(data.draw(st.integers(1, 25))):
        salt = data.draw(st.sampled_from("ab"))
        if live and data.draw(st.booleans()):
            salt, text, row = live.pop(data.draw(st.integers(0, len(live) - 1)))
            answer = data.draw(st.lists(st.integers(1, 3), max_size=40))
            text.tokens.extend(answer)
            said.append(row + answer)
            texts.finish(salt, text)
        else:
            row = [*data.draw(st.sampled_from(said)), *data.draw(st.lists(st.integers(1, 3), max_size=40))]
            text, path = texts.add(texts.client_texts(salt), array("i", row))
            at = 0
            for number, end in path.items():
                known = texts.texts_by_client[salt].texts[number]
                assert at < end and list(known.tokens[at - known.start : end - known.start]) == row[at:end]
                at = end
            assert text.branch == at and list(text.tokens) == row[text.start :]
            live.append((salt, text, row))
        assert texts.size == sum(shelf.size for shelf in texts.texts_by_client.values()) <= 1500
        for salt, shelf in texts.texts_by_client.items():
            assert shelf.size == sum(text.size for text in shelf.texts.values() if not text.is_live) <= 800
            assert set(shelf._branches.values()) <= set(shelf.texts) and set(shelf.unindexed_texts) <= set(shelf.texts)
            assert all(text.number in shelf.texts for other, text, _ in live if other == salt)
            order = list(shelf.texts)
            for text in shelf.texts.values():
                parent = shelf.texts.get(text.parent)
                assert parent is None or text.is_live or order.index(parent.number) > order.index(text.number)
    for salt, text, _ in live:
        texts.finish(salt, text)
    assert all(not text.is_live for shelf in texts.texts_by_client.values() for text in shelf.texts.values())
