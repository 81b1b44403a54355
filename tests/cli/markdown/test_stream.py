"""Streamed Markdown: whatever pieces the text comes in, the same lines come out, each once, and none too late."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from cortexmlx.cli.markdown import stream as streaming
from cortexmlx.cli.markdown.stream import PARSE_BURST, PARSE_RATE, MarkdownStream, ParseBudget
from support.cli.answers import answer
from support.cli.terminal import pieces as cut_in_tokens
from support.effort import examples

ANSWER = """\
# Why the sky is blue

Light from the sun is **white**: a mixture of all colours. When it meets the molecules of the air it is *scattered*.
Short waves are scattered more than long ones, by a factor that grows with `1 / wavelength ** 4`.

1. Violet is scattered most,
   but the sun sends little of it.
2. Blue comes next.
   - We see it from everywhere.
   - Our eyes like it.
10. Red goes straight on.

```python
def scattered(wavelength: float) -> float:
    '''A docstring
    of two lines.'''

    return 1 / wavelength**4
```

> Rayleigh found the law in 1871, and it explains the red of the evening as well, when the light has a longer way.

---

That is *all*. A [link](https://example.org), <b>no HTML</b>, snake_case_names and 2 * 3 = 6.
"""

TABLE = """
| colour | nm  |
|--------|-----|
| blue   | 450 |
| red    | 700 |
"""


def streamed(pieces: list[str], width: int = 60, room: int = 12) -> list[str]:
    stream = MarkdownStream()
    lines = []
    for piece in pieces:
        stream.feed(piece)
        lines += stream.take_final_rows(width, room)
    lines += stream.take_remaining_rows(width)
    return [line.plain for line in lines]


def settled(stream: MarkdownStream, text: str, width: int = 60) -> list[str]:
    stream.feed(text)
    return [line.plain for line in stream.take_final_rows(width, 12)]


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def test_a_whole_answer_looks_as_it_should() -> None:
    assert "\n".join(streamed(list(ANSWER))) == (
        """\
Why the sky is blue

Light from the sun is white: a mixture of all colours. When
it meets the molecules of the air it is scattered.
Short waves are scattered more than long ones, by a factor
that grows with 1 / wavelength ** 4.

1. Violet is scattered most,
   but the sun sends little of it.
2. Blue comes next.
   • We see it from everywhere.
   • Our eyes like it.
10. Red goes straight on.

def scattered(wavelength: float) -> float:
    '''A docstring
    of two lines.'''

    return 1 / wavelength**4

▌ Rayleigh found the law in 1871, and it explains the red of
▌ the evening as well, when the light has a longer way.

────────────────────────

That is all. A link (https://example.org), <b>no HTML</b>,
snake_case_names and 2 * 3 = 6."""
    )


WRITTEN = """word |two words|**bold|** |*it|`co|de` |- |1. |12. |  - |# |> |~~~|---|===|    |[x](y)|<b>|\\|_|&amp;"""
TABLES = ["\n", "\n\n", "```\n", "\n| a | b |\n", "\n| a | b |\n|---|---|\n", "| 1 | 2 |\n", "long" * 9]
PIECES = st.lists(st.sampled_from([*WRITTEN.split("|"), *TABLES]), max_size=25)


@example(["> ", "** ", "** ", "word "], [], 20)
@example(["- ", "** ", "** ", "word ", "\n\n", "two words"], [], 20)
@example(["word word *it12. 12. ", "long" * 9, "**bold", "word "], [58], 20)
@example(["> ", "\n", "> ", "\n"], [], 20)
@example(["> ", "```\n", "> ", "```\n"], [], 20)
@example(["> ", "```\n", "> ", "word "], [], 20)
@given(PIECES, st.lists(st.integers(0, 10_000), max_size=12), st.sampled_from([20, 34, 80]))
@settings(max_examples=examples(60))
def test_the_lines_do_not_depend_on_how_the_text_was_cut(pieces: list[str], places: list[int], width: int) -> None:
    text = "".join(pieces)
    assert streamed(cut(text, places), width) == streamed([text], width) == streamed(pieces, width)


def test_the_lines_of_a_whole_answer_do_not_depend_on_its_pieces() -> None:
    words = [word + " " for word in (ANSWER + TABLE).split(" ")]
    text = "".join(words)
    assert streamed(words, 34) == streamed([text], 34) == streamed(cut(text, [100, 500, 700, 900]), 34)


def test_the_words_are_those_that_were_written() -> None:
    for seed, width in ((3, 34), (4, 80)):
        made = answer(seed, blocks=6)
        made.check(streamed(cut_in_tokens(made.text, seed), width))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 80, 10))
def test_the_words_are_those_that_were_written_at_any_changing_width(first: int) -> None:
    for seed in range(first, first + 10):
        made, chance = answer(seed), random.Random(seed)
        stream, lines, width, room = MarkdownStream(), [], 80, 8
        for piece in cut_in_tokens(made.text, seed):
            if chance.random() < 0.02:
                width, room = chance.choice((34, 40, 80, 100)), chance.choice((3, 8, 12))
            stream.feed(piece)
            if chance.random() < 0.3:
                lines += stream.take_final_rows(width, room)
                assert len(stream.pending) <= room + 8, "no more waits than two rows of a table with wrapped cells"
        made.check([line.plain for line in [*lines, *stream.take_remaining_rows(width)]])


def test_a_paragraph_appears_row_by_row_and_the_rest_of_it_is_pending() -> None:
    stream = MarkdownStream()
    assert settled(stream, "one two three four five six seven eight nine ten", 20) == [
        "one two three four",
        "five six seven eight",
    ]
    assert [line.plain for line in stream.pending] == ["nine ten"]


def test_another_width_goes_on_with_the_next_word() -> None:
    stream = MarkdownStream()
    assert settled(stream, "- one two three four five six seven eight nine ten ", 20)[-1] == "  five six seven"
    assert settled(stream, "eleven twelve", 12) == ["  eight nine", "  ten eleven"]
    assert [line.plain for line in stream.take_remaining_rows(30)] == ["  twelve"]


def test_emphasis_that_is_still_open_holds_its_row_back() -> None:
    stream = MarkdownStream()
    assert settled(stream, "one two three four five six seven eight **nine ten eleven twelve thirteen", 20) == [
        "one two three four"
    ]
    assert settled(stream, "** fourteen", 20) == ["five six seven eight", "nine ten eleven", "twelve thirteen"]


@pytest.mark.parametrize(
    "text",
    [
        "Call it with *args and whatever else there is, so that `a*b` is computed.",
        "Call it with *args and whatever else there is, [a* b](c) is computed.",
        "A [link and whatever else there is, `a](b) and` so.",
        "A ~~sign and whatever else\nthere is at all `c~~ and` so.",
        "A *sign and whatever else there is, <https://x*y> so.",
    ],
)
def test_emphasis_that_ends_behind_an_open_sign_may_be_none_and_is_held_back(text: str) -> None:
    assert streamed(list(text), 20) == streamed([text], 20)


def test_what_holds_more_back_than_there_is_room_for_is_decided() -> None:
    stream, text = MarkdownStream(), "The **kwargs of `this call " + "and so on " * 20
    stream.feed(text)
    shown = stream.take_final_rows(20, 4)
    assert len(stream.pending) == 4 and shown[0].plain == "The **kwargs of"
    stream.feed("** and ` are only signs now: **bold**.")
    shown += stream.take_remaining_rows(20)
    words = f"{text}** and ` are only signs now: bold."
    assert " ".join(line.plain for line in shown).split() == words.split()


def test_a_table_appears_as_a_whole_or_with_the_columns_that_it_had_when_the_window_was_full() -> None:
    stream = MarkdownStream()
    assert settled(stream, TABLE) == []
    header, _, *rows = [line.split(" │ ") for line in settled(stream, "\nand")]
    assert [[cell.strip() for cell in row] for row in [header, *rows]] == [
        ["colour", "nm"],
        ["blue", "450"],
        ["red", "700"],
    ]
    long = "| a | b |\n|---|---|\n" + "".join(f"| {n} | {n * n} |\n" for n in range(24)) + "| longer | 1 |\n"
    shown = streamed(cut_in_tokens(long))
    assert len(shown) == 27 and shown[-3:] == ["22 │ 484", "23 │ 529", "longer │ 1"]
    assert streamed(cut_in_tokens(long), width=9) == streamed([long], width=9), "a list, with a line between the rows"


def test_code_appears_line_by_line_before_the_fence_closes() -> None:
    stream = MarkdownStream()
    assert settled(stream, "```python\na = 1\n    b = 2\nc") == ["a = 1", "    b = 2"]
    assert [line.plain for line in stream.pending] == ["c"]
    assert settled(stream, "\n```\nand") == ["c"]


def test_code_is_as_it_was_written_without_a_space_before_it_and_not_wrapped() -> None:
    code = ["x = 1" + " + 1" * 40, "", "if x:", "    pass", "  ```not the end", "# **not bold**"]
    for before, between in (("", ""), ("1. item\n\n   ", "   "), ("> quote\n> ", "> ")):
        fence = before + f"\n{between}".join(["````", *code, "````"])
        shown = streamed([fence])
        assert shown[-len(code) :] == code, before


def test_the_code_of_a_fence_is_what_markdown_says_it_is() -> None:
    for text in ("```\na\n````\n", "  ~~~~ c\n   a\n b\n~~~\n~~~~  \n", "```\n\ta\n   ```\n", "```\nopen\n\n"):
        content = MarkdownIt("commonmark").parse(text)[0].content
        assert streamed(list(text)) == content.expandtabs(8).removesuffix("\n").split("\n"), text


def test_control_characters_are_seen_and_not_obeyed() -> None:
    assert streamed(["a\x1b[2Jb\x07 \x9bc\r\nd"]) == ["a\u241b[2Jb\u2407 \ufffdc", "d"]


@pytest.mark.parametrize("text", ["", "\n\n", " "])
def test_nothing_prints_nothing(text: str) -> None:
    assert streamed([text]) == []


def test_the_work_does_not_grow_with_what_has_been_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    real = streaming.parse_blocks
    monkeypatch.setattr(streaming, "parse_blocks", lambda text: parsed.append(len(text)) or real(text))  # type: ignore[func-returns-value]
    paragraph = "word " * 30 + "\n\n"
    streamed([piece + " " for piece in (paragraph * 12).split(" ")])
    assert max(parsed) <= len(paragraph) + 10
    parsed.clear()
    streamed(["| a | b |\n", "|---|---|\n", *["| word | word |\n"] * 60])
    assert max(parsed) <= 300
    parsed.clear()
    streamed([*("```\n" + "line of code\n" * 60)])
    assert max(parsed) <= 20


@pytest.mark.parametrize(
    ("before", "first"),
    [("> q\n\n", ""), ("- item\n\n", "**Bold** "), ("1. one\n2. two\n\n", "(So) "), ("- one\n- ", "2024 ")],
)
def test_what_follows_a_quote_or_a_list_comes_out_while_it_is_written(before: str, first: str) -> None:
    text = before + first + "word " * 150
    stream, shown = MarkdownStream(), 0
    for start in range(0, len(text), 5):
        shown += len(settled(stream, text[start : start + 5]))
    assert shown > 10 and len(stream.take_remaining_rows(60)) <= 2


@pytest.mark.parametrize(
    "text", ["> " * 60 + "deep", "- " * 60 + "deep", "\n".join("  " * n + f"- d{n}" for n in range(30))]
)
def test_what_is_nested_deeper_than_anybody_reads_is_there(text: str) -> None:
    letters = [c for c in text if c.isalnum()]
    assert [c for line in streamed([*text]) for c in line if c.isalnum()] == letters


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ("| `a|b` | desc |", "`a │ b` | desc"),
        ("> | 1 | 2 | 3 |", "1  │ 2 | 3"),
        ("1 | 2 | 3 | 4", "1  │ 2 | 3 | 4"),
        ("| 1 | 2 |", "1 │ 2"),
        ("| | 2 | 3 |", "│ 2 | 3"),
    ],
)
def test_what_stands_behind_the_last_column_is_there(row: str, shown: str) -> None:
    sign = "> " * row.startswith(">")
    lines = streamed([*f"{sign}| x | y |\n{sign}|---|---|\n{row}\n"])
    assert " ".join(lines[-1].replace("▌", "").split()) == " ".join(shown.split())


SAID = "word |*so* |**bold|** |snake_case_ |_it_ |`code` |`|[a](http://b) |[|](|) |~~s~~ |- |1. |# |&amp; |\\|<b>|👩‍💻 "
WORDS = st.sampled_from(
    [*SAID.split("|"), "long" * 9, "天空是蓝色的。", "\n", "\n", "| a | b |\n", "|---|---|\n", "\n\n"]
)


@given(st.lists(WORDS, min_size=20, max_size=100), st.sampled_from([20, 34, 80]), st.sampled_from([1, 3, 12]))
@settings(max_examples=20)
def test_what_is_forgotten_of_a_long_paragraph_changes_nothing(pieces: list[str], width: int, room: int) -> None:
    """Not a letter; and where there is room enough to hold back what may still change, nothing at all."""
    found = []
    for long in (60, 10**9):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(streaming, "LONG_PARAGRAPH", long)
            found.append(streamed(["so it ", *pieces], width, room))
    letters, without = (sorted(re.findall(r"[^\W_]", " ".join(rows).replace("amp;", ""))) for rows in found)
    assert letters == without
    assert room < 12 or found[0] == found[1]


@pytest.mark.parametrize("unit", ["a", "a_b_", "[a](", "a\n"])
def test_the_work_does_not_grow_with_a_paragraph(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that are read for each of 4,000 that came, however degenerate they are."""
    read = [0]
    parsed = streaming.parse_blocks

    def counted(text: str) -> list[streaming.MarkdownBlock]:
        read[0] += len(text)
        return parsed(text)

    monkeypatch.setattr(streaming, "parse_blocks", counted)
    stream, text = MarkdownStream(), unit * (4_000 // len(unit))
    for at in range(0, len(text), 400):  # so that some end with the same sign each time
        stream.feed(text[at : at + 400])
        stream.take_final_rows(80, 12)
    assert read[0] / len(text) < 20


# The parser's work is bounded by the length of an answer, whatever signs are in it, and nothing of it is lost.


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
    code = "".join(f"  int *p{number} = &a[{number}];\n" for number in range(9))
    stream, rows = MarkdownStream(), []
    for piece in f"- an *item\n\n  ```c\n{code}  ```\n- more\n":
        stream.feed(piece)
        rows += stream.take_final_rows(80, 3)
    rows += stream.take_remaining_rows(80)
    assert [row.plain.strip() for row in rows if "int" in row.plain] == [line.strip() for line in code.splitlines()]
