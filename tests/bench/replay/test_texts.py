"""The texts of a replay: always the same, of the promised length, and each kind repeats as its name says."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from cortexmlx.bench.replay.texts import AnswerKind, ReplayText, make_text


def encode(text: str) -> Sequence[int]:
    """A word or a sign is a token."""
    return [int.from_bytes(piece.encode(), "big") for piece in re.findall(r"\w+|\W", text)]


def decode(tokens: Sequence[int]) -> str:
    return b"".join(token.to_bytes(max(1, -(-token.bit_length() // 8)), "big") for token in tokens).decode()


@pytest.mark.parametrize("kind", AnswerKind)
def test_texts_are_the_same_each_time_and_others_in_each_row(kind: AnswerKind) -> None:
    rows = [make_text(kind, row, 150, encode) for row in range(8)]
    assert rows == [make_text(kind, row, 150, encode) for row in range(8)]
    assert len({row.answer for row in rows}) == len({row.prompt for row in rows}) == 8
    assert all(100 < len(row.answer) <= 150 for row in rows)


def test_an_edit_has_three_lines_that_are_not_in_the_file() -> None:
    for row in range(8):
        text = make_text(AnswerKind.EDIT, row, 200_000, encode)  # no file is longer: nothing is cut
        before = decode(text.prompt).splitlines()
        changed = [line for line in decode(text.answer).splitlines() if line not in before]
        assert len(changed) == 3 and all(f"renamed_{row}_{i}" in line for i, line in enumerate(changed))


def test_kinds_repeat_more_or_less() -> None:
    def share(kind: AnswerKind) -> float:
        return sum(make_text(kind, row, 250, encode).repetition(5) for row in range(8)) / 8

    assert share(AnswerKind.EDIT) > 0.8 > share(AnswerKind.QUOTES) > 0.4 > share(AnswerKind.PROSE)
    assert share(AnswerKind.JSON) > 0.2 and share(AnswerKind.PROSE) < 0.1


def test_repetition_is_the_share_of_the_answers_n_grams_that_came_before() -> None:
    text = ReplayText((1, 2, 3, 4), (2, 3, 4, 9, 1, 2, 3))
    assert text.repetition(3) == 2 / 7, "2 3 4 and 1 2 3 of the prompt; 3 4 2 and four others are new"
    assert ReplayText((), (1, 1, 1)).repetition(1) == 2 / 3
    assert ReplayText((1,), ()).repetition(3) == 0


def test_what_a_tokenizer_puts_before_each_text_is_in_no_answer() -> None:
    plain, begun = (make_text(AnswerKind.PROSE, 1, 50, code) for code in (encode, lambda text: [0, *encode(text)]))
    assert begun.prompt == (0, *plain.prompt) and begun.answer == plain.answer
