"""The reader of answers: what it takes, whatever the pieces are, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.calls.json_formats import Hermes
from cortexmlx.structured.calls.reader import (
    MAX_HEADER,
    MAX_TAG_BLANKS,
    AnswerReader,
    NotACall,
    Reading,
    parse_strict_json,
)
from cortexmlx.structured.tools import Tool


def run(make: Callable[[AnswerReader], Reading[Any]], pieces: list[str]) -> tuple[Any, AnswerReader]:
    """What a parser returns for an answer in pieces."""
    reader = AnswerReader(iter(["a", "b", "c"]), streaming=True)
    parser = make(reader)
    try:
        next(parser)
        for piece in pieces:
            reader.add(piece)
            next(parser)
        reader.is_ended = True
        next(parser)
    except StopIteration as end:
        return end.value, reader
    raise EOFError("the parser waits for more than there is")


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(ends)]


PLACES = st.lists(st.integers(0, 1000), max_size=6)


@given(st.text(alphabet="ab<> \n", max_size=30), PLACES)
def test_text_up_to_a_tag_is_the_same_in_any_pieces(text: str, places: list[int]) -> None:
    tags = ("<a>", "<b>")
    found, reader = run(lambda r: r.read_text_up_to(*tags), cut(text, places))
    first = min((text.find(tag) for tag in tags if tag in text), default=None)
    if first is None:
        assert (found, "".join(reader.text)) == ("", text)
    else:
        assert (found, "".join(reader.text)) == (text[first : first + 3], text[:first].rstrip())


def test_at_most_so_many_blanks_before_a_tag_are_dropped() -> None:
    for pieces in (["a" + " " * 100 + "<a>"], [*("a" + " " * 100), "<a>"]):
        found, reader = run(lambda r: r.read_text_up_to("<a>"), pieces)
        assert found == "<a>" and "".join(reader.text) == "a" + " " * (100 - MAX_TAG_BLANKS)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ).map(lambda value: {"a": value}),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]),
    PLACES,
)
def test_json_ends_where_it_ends(value: Any, separators: tuple[str, str], places: list[int]) -> None:
    import json

    for text in (json.dumps(value, separators=separators), json.dumps(value, ensure_ascii=False, indent=1)):
        pieces = cut(text + "}]rest", places)
        read, reader = run(lambda r: r.read_json(), pieces)
        assert read == text
        rest = reader._buffer[reader._position :]  # what is left for the next parser
        assert "}]rest".startswith(rest) and len(rest) >= len(pieces[-1]) - len(text)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda r: r.skip_text("abc"), "abd"),
        (lambda r: r.read_one_of("abc", "b"), "c"),
        (lambda r: r.read_one_of("abc"), "abd"),
        (lambda r: r.read_json_string(), "{"),
        (lambda r: r.read_json_string(), '"\n"'),
        (lambda r: r.read_up_to("]"), "x" * (MAX_HEADER + 1)),
    ],
)
def test_what_does_not_fit_is_no_call(make: Callable[[AnswerReader], Reading[Any]], text: str) -> None:
    for pieces in ([text], list(text)):
        with pytest.raises(NotACall):
            run(make, [*pieces, "more"])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda r: r.skip_text("abc"), "ab"),
        (lambda r: r.skip_text("abc"), ""),
        (lambda r: r.read_one_of("abc", "b"), "a"),
        (lambda r: r.read_json_string(), ""),
        (lambda r: r.read_json_string(), '"a\\'),
        (lambda r: r.read_json(), '{"a": [1, {'),
        (lambda r: r.read_up_to("]"), "name"),
    ],
)
def test_an_answer_that_ends_early_is_cut(make: Callable[[AnswerReader], Reading[Any]], text: str) -> None:
    for pieces in ([text], list(text)):
        with pytest.raises(EOFError):
            run(make, pieces)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', "", "{", "1 2", "'a'", "[" * 100_000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(NotACall):
        parse_strict_json(text)


def test_a_beginning_waits_for_the_longest_one() -> None:
    def begins(reader: AnswerReader) -> Reading[str]:
        return (yield from reader.peek_one_of("<a", "<ab>", "<c>"))

    assert run(begins, ["<", "a", "b", ">"])[0] == "<ab>"
    assert run(begins, ["<", "a", "c"])[0] == "<a"
    assert run(begins, ["<a"])[0] == "<a"
    assert run(begins, ["x"])[0] == ""
    assert run(begins, [])[0] == ""


def test_an_enforced_call_stays_a_call_though_an_open_object_has_a_key_twice() -> None:
    """Its pieces were told already, and the whole call was told again as text."""
    tool = Tool.named("f", "", {"type": "object", "additionalProperties": True})
    parser = AllowedCalls(Hermes(), (tool,), "required").make_parser("k", streaming=True)
    assert parser is not None
    text, deltas = parser.feed('<tool_call>\n{"name": "f", "arguments": {"a": 1, "a": 2}}\n</tool_call>')[:2]
    assert [call.arguments for call in parser.calls] == ['{"a": 1, "a": 2}'] and deltas and not text
