"""A text ends before the first stop string that is complete, however it was cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.serving.text.stops import StopStrings

LETTERS = st.text(st.sampled_from("abc"), max_size=12)


@given(
    LETTERS, st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=4), max_size=3), st.sets(st.integers(1, 11))
)
def test_a_text_ends_where_the_first_stop_string_is_complete(text: str, stops: list[str], cuts: set[int]) -> None:
    stream = StopStrings(stops)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    shown = "".join(stream.feed(text[a:b]) for a, b in pairwise(places)) + stream.rest()
    ends = [(end, -len(s)) for s in stops for end in range(1, len(text) + 1) if text[:end].endswith(s)]
    assert stream.stopped is bool(ends)
    end, length = min(ends, default=(len(text), 0))
    assert shown == text[: end + length]
    assert not ends or stream.feed("more") == ""
