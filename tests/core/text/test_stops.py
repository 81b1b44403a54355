"""A text ends before the first stop string that is complete, however it was cut."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cortexmlx.core.text import StopConditions, StopStringFilter, StopStringTable
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.sampling_params import MAX_STOP_CHARACTERS, SamplingParams

LETTERS = st.text(st.sampled_from("abc"), max_size=12)
STOPS = st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=6), max_size=6)


@given(LETTERS, STOPS, st.sets(st.integers(1, 11)))
@example("abab", ["bab", "ab", "abc"], {2})
@example("a\ud800\U0010ffff", ["\ud800\U0010ffff", "\U0010ffff"], {2})
def test_a_text_ends_where_the_first_stop_string_is_complete(text: str, stops: list[str], cuts: set[int]) -> None:
    """The judge looks at every ending of every beginning of the text."""
    stream = StopStringFilter(StopStringTable(stops))
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    shown = "".join(stream.feed(text[a:b]) for a, b in pairwise(places)) + stream.rest()
    ends = [(end, -len(s)) for s in stops for end in range(1, len(text) + 1) if text[:end].endswith(s)]
    assert stream.stopped is bool(ends)
    end, length = min(ends, default=(len(text), 0))
    assert shown == text[: end + length]
    assert stream.matched_string == (text[end + length : end] if ends else "")
    assert not ends or stream.feed("more") == ""


@given(LETTERS, STOPS)
def test_what_could_become_a_stop_string_is_held_back_and_nothing_else(text: str, stops: list[str]) -> None:
    stream, shown = StopStringFilter(StopStringTable(stops)), ""
    for end, character in enumerate(text, 1):
        shown += stream.feed(character)
        if stream.stopped:
            return
        held = max((n for s in stops for n in range(len(s)) if text[:end].endswith(s[:n])), default=0)
        assert shown == text[: end - held]


class CountedTable(StopStringTable):
    """Counts how often the table is asked."""

    looks = 0

    def __init__(self, stops: Iterable[str]) -> None:
        super().__init__(stops)
        counted = self

        class Children(dict[int, int]):
            def get(self, key: int, default: int | None = None) -> int | None:  # type: ignore[override]
                counted.looks += 1
                return super().get(key, default)

        self._children = Children(self._children)


@pytest.mark.parametrize(
    "stops",
    [
        ["a" * (MAX_STOP_CHARACTERS - 1) + "b"],
        ["a" * n + "b" for n in range(1, 170)],
        ["aab" * 2000 + "c", "ab" * 3000 + "c"],
        [chr(0x4E00 + n) + "a" for n in range(1024)],
    ],
)
def test_the_work_and_the_memory_are_linear_in_the_text_and_the_stop_strings(stops: list[str]) -> None:
    table = CountedTable(stops)
    assert len(table) <= sum(map(len, stops)) <= MAX_STOP_CHARACTERS
    text = ("a" * 5000 + "aab" * 500 + "\u4e00") * 3
    stream = StopStringFilter(table)
    for place in range(0, len(text), 7):
        stream.feed(text[place : place + 7])
    assert table.looks <= 2 * len(text)


def test_stop_strings_with_a_tag_end_the_thoughts_too() -> None:
    thoughts = Thoughts("<think>", "</think>")
    params = SamplingParams(stop=["end", "</think>", "a<think>"], stop_token_ids=[5])
    stops = StopConditions.from_params(params, {1, 2}, thoughts)
    assert (len(stops.everywhere), len(stops.in_answer)) == (len("</think>") + len("a<think>"), len("end"))
    assert stops.token_ids == {1, 2, 5}
    assert StopConditions.from_params(SamplingParams(stop_token_ids=[5], ignore_eos=True), {1, 2}).token_ids == {5}
