"""The parser's work is bounded by the length of an answer, whatever signs are in it, and nothing of it is lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.cli.markdown import stream as streaming
from cortexmlx.cli.markdown.stream import PARSE_BURST, PARSE_RATE, MarkdownStream, ParseBudget

SIGNS = "*a |_b |`c |~~e |<f |\"h |'i |word |**|a_b_|\\*|***x|__|[d |&g |!|](|\n|\\|天 "
DENSE = st.lists(st.sampled_from(SIGNS.split("|")), min_size=1, max_size=40).map("".join)
BEGINNINGS = st.sampled_from(["", "> ", "- ", "1. ", "# ", "> - "])


def work(monkeypatch: pytest.MonkeyPatch, text: str, piece: int, width: int = 34) -> tuple[int, int, list[str]]:
    """Characters that the parser reads while `text` comes in pieces, all that it reads, and the rows."""
    read, real = [0], streaming.parse_blocks

    def counted(part: str) -> list[streaming.MarkdownBlock]:
        read[0] += len(part)
        return real(part)

    with monkeypatch.context() as patched:
        patched.setattr(streaming, "parse_blocks", counted)
        stream, rows = MarkdownStream(), []
        for at in range(0, len(text), piece):
            stream.feed(text[at : at + piece])
            rows += stream.take_final_rows(width, 8)
        meanwhile = read[0]
        rows += stream.take_remaining_rows(width)
    return meanwhile, read[0], [row.plain for row in rows]


def test_what_is_read_may_overdraw_once() -> None:
    budget = ParseBudget()
    budget.spend(PARSE_BURST + 1000)
    assert not budget.allows()
    budget.earn(1 + 1000 // PARSE_RATE)
    assert budget.allows() and not budget.allows(PARSE_RATE)


@given(unit=DENSE, begin=BEGINNINGS, prefixed=st.booleans(), piece=st.sampled_from([10, 40]))
@settings(max_examples=6)
def test_the_work_is_bounded_for_any_text(unit: str, begin: str, prefixed: bool, piece: int) -> None:
    """Of 800 characters; each line of them begins with the signs of a quote or an item, or the first alone."""
    unit = unit.replace("\n", f"\n{begin}") if prefixed else unit
    text = (begin + unit * (800 // len(unit) + 1))[:800]
    with pytest.MonkeyPatch.context() as patched:
        meanwhile, whole, _ = work(patched, text, piece)
    assert meanwhile <= PARSE_RATE * len(text) + PARSE_BURST + 8 * len(text)
    assert whole - meanwhile <= 8 * len(text)


@pytest.mark.parametrize(
    ("begin", "length"), [("> ", 3000), *(pytest.param(b, 20_000, marks=pytest.mark.slow) for b in ("", "> ", "- "))]
)
def test_a_very_long_block_is_not_read_again_for_each_piece(
    begin: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"{begin if begin == '> ' else '  '}word and *more of it\n"
    text = (begin + line * 1000)[:length]
    meanwhile, _, rows = work(monkeypatch, text, 40)
    assert meanwhile <= PARSE_RATE * len(text) + PARSE_BURST + 8 * len(text)
    assert letters("".join(rows)) == letters(text)


@pytest.mark.parametrize("seed", [21, *(pytest.param(n, marks=pytest.mark.slow) for n in range(22, 50))])
def test_past_the_budget_every_letter_is_there_once_and_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    signs = ["*a ", "_b ", "`c ", "~~e ", "<f ", '"h ', "'i ", "word ", "**", "j* ", "`k` ", "*l* ", "天 "]
    text = "".join(chance.choice(signs) for _ in range(400))
    _, _, rows = work(monkeypatch, text, piece=30)
    assert letters("".join(rows)) == letters(text)
    assert "".join(rows).count("\\") <= text.count("\\")


def test_what_came_since_the_last_reading_is_seen_as_it_was_written() -> None:
    stream = MarkdownStream()
    stream.feed("so *it is")
    stream.take_final_rows(20, 4)
    stream._budget.spend(10**6)
    stream.feed(" and so **on")
    assert stream.take_final_rows(20, 4) == []
    assert [row.plain for row in stream.pending] == ["so *it is", "and so **on"]
    assert [row.plain for row in stream.take_remaining_rows(40)] == ["so *it is and so **on"]


def test_of_a_long_line_of_code_the_end_is_looked_at() -> None:
    stream = MarkdownStream()
    stream.feed("```\n" + "x" * 10_000)
    stream.take_final_rows(20, 4)
    assert sum(len(row.plain) for row in stream.pending) <= 100
    assert [row.plain for row in stream.take_remaining_rows(20)] == ["x" * 10_000]


def letters(text: str) -> list[str]:
    return [sign for sign in text if sign.isalnum()]


@pytest.mark.parametrize(
    "line",
    [
        '  "na_me": ["a*b", "c[d]"],\n',
        "def __init__(self, *args): self._x = args[0]  # `x`\n",
        "`^[a-z_]+$` or [*_~`]*; ",
    ],
)
def test_signs_that_have_found_their_end_keep_no_rows_back(line: str) -> None:
    """Code without a fence: pairs of its signs mean emphasis, and its rows waited for the end of the answer."""
    text, stream, most = line * (800 // len(line)), MarkdownStream(), 0
    for at in range(0, len(text), 16):
        stream.feed(text[at : at + 8])
        stream.take_final_rows(80, 8)
        most = max(most, len(stream.pending))
    assert most < 3 * 8


def test_signs_in_code_below_an_open_sign_stay_as_they_are() -> None:
    code = "".join(f"  int *p{number} = &a[{number}];\n" for number in range(14))
    stream, rows = MarkdownStream(), []
    for piece in f"- an *item\n\n  ```c\n{code}  ```\n- more\n":
        stream.feed(piece)
        rows += stream.take_final_rows(80, 3)
    rows += stream.take_remaining_rows(80)
    assert [row.plain.strip() for row in rows if "int" in row.plain] == [line.strip() for line in code.splitlines()]
