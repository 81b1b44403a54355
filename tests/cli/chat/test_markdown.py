"""Streamed Markdown: whatever pieces the text comes in, the same lines come out, each once, and none too late."""

from __future__ import annotations

import io
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.markdown import Markdown

from cortexmlx.cli.chat.markdown import MarkdownStream

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


def console(width: int = 60) -> Console:
    return Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)


def streamed(pieces: list[str], width: int = 60) -> list[str]:
    stream = MarkdownStream(console(width), width)
    lines = []
    for piece in pieces:
        stream.feed(piece)
        lines += [*stream.lines()]
    lines += [*stream.rest()]
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


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

  1 Violet is scattered most,
    but the sun sends little of it.
  2 Blue comes next.
     • We see it from everywhere.
     • Our eyes like it.
 10 Red goes straight on.


 def scattered(wavelength: float) -> float:
     '''A docstring
     of two lines.'''

     return 1 / wavelength**4


▌ Rayleigh found the law in 1871, and it explains the red
▌ of the evening as well, when the light has a longer way.

------------------------------------------------------------

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
@settings(max_examples=60)
def test_the_lines_do_not_depend_on_how_the_text_was_cut(pieces: list[str], places: list[int], width: int) -> None:
    text = "".join(pieces)
    assert streamed(cut(text, places), width) == streamed([text], width) == streamed(pieces, width)


def test_the_lines_of_a_whole_answer_do_not_depend_on_its_pieces() -> None:
    words = [word + " " for word in (ANSWER + TABLE).split(" ")]
    text = "".join(words)
    assert streamed(words, 34) == streamed([text], 34) == streamed(cut(text, [100, 500, 700, 900]), 34)


WORDS = st.sampled_from(["alpha", "beta", "**gamma**", "*delta*", "`eps`", "zeta-eta", "theta."])
SENTENCE = st.lists(WORDS, min_size=1, max_size=25).map(" ".join)
BLOCK = st.one_of(
    SENTENCE,
    SENTENCE.map("## {}".format),
    SENTENCE.map("> {}".format),
    st.lists(SENTENCE, min_size=1, max_size=4).map(lambda items: "\n".join(f"- {i}" for i in items)),
    st.lists(SENTENCE, min_size=1, max_size=4).map(
        # After a heading: two lists in a row would be one, and rich counts its items while we print their own numbers.
        lambda items: "# list\n" + "\n".join(f"{n}. {i}" for n, i in enumerate(items, 1))
    ),
    st.lists(SENTENCE, min_size=1, max_size=4).map(lambda lines: "```\n" + "\n".join(lines) + "\n```"),
)


@given(st.lists(BLOCK, min_size=1, max_size=5).map("\n\n".join))
@settings(max_examples=30)
def test_the_words_are_those_that_rich_prints_of_the_whole_text(text: str) -> None:
    whole = console()
    with whole.capture() as capture:
        whole.print(Markdown(text))
    assert " ".join(streamed(list(text))).split() == capture.get().split()


def test_a_paragraph_appears_line_by_line_before_it_ends() -> None:
    stream = MarkdownStream(console(20), 20)
    stream.feed("one two three four five six seven eight nine ten")
    assert ["".join(s.text for s in line).rstrip() for line in stream.lines()] == [
        "one two three four",
        "five six seven eight",
    ]
    assert stream.unfinished == "nine ten"


def test_emphasis_that_is_still_open_holds_its_line_back() -> None:
    stream = MarkdownStream(console(20), 20)
    stream.feed("one two three four five six seven eight **nine ten eleven twelve thirteen")
    assert ["".join(s.text for s in line).rstrip() for line in stream.lines()] == ["one two three four"]
    stream.feed("** fourteen")
    assert ["".join(s.text for s in line).rstrip() for line in stream.lines()] == [
        "five six seven eight",
        "nine ten eleven",
        "twelve thirteen",
    ]


def test_a_table_appears_as_a_whole() -> None:
    stream = MarkdownStream(console(), 60)
    stream.feed(TABLE)
    assert list(stream.lines()) == []
    stream.feed("\n")
    header, _, *rows = ["".join(s.text for s in line).split() for line in stream.lines()]
    assert [header, *rows] == [["colour", "nm"], ["blue", "450"], ["red", "700"]]


def test_code_appears_line_by_line_before_the_fence_closes() -> None:
    stream = MarkdownStream(console(), 60)
    stream.feed("```python\na = 1\nb = 2\nc")
    assert ["".join(s.text for s in line).strip() for line in stream.lines()] == ["", "a = 1"]


@pytest.mark.parametrize("text", ["", "\n\n", " "])
def test_nothing_prints_nothing(text: str) -> None:
    assert streamed([text]) == []


def test_the_work_does_not_grow_with_what_has_been_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    real = MarkdownStream._render

    def counting(self: MarkdownStream, block: object) -> object:
        parsed.append(len(self._open))
        return real(self, block)  # type: ignore[arg-type]

    monkeypatch.setattr(MarkdownStream, "_render", counting)
    paragraph = "word " * 30 + "\n\n"
    streamed([piece + " " for piece in (paragraph * 40).split(" ")])
    assert max(parsed) <= len(paragraph) + 10


@pytest.mark.parametrize("before", ["> q\n\n", "- item\n\n", "1. one\n2. two\n\n"])
@pytest.mark.parametrize("first", ["", "**Bold** ", "(So) ", "Éric "])
def test_a_paragraph_after_a_quote_or_a_list_comes_out_while_it_is_written(before: str, first: str) -> None:
    text = before + first + "word " * 150
    stream, shown = MarkdownStream(console(60), 60), 0
    for start in range(0, len(text), 5):
        stream.feed(text[start : start + 5])
        shown += len([*stream.lines()])
    assert shown > 10 and len([*stream.rest()]) <= 2
