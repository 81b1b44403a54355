"""Which tokens a text keeps: the first and the newest, by its length alone."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cortexmlx.errors import InvalidRequest
from cortexmlx.scheduling.keep_policy import KeepPolicy

POLICIES = st.builds(KeepPolicy, st.integers(0, 12), st.integers(1, 12))


@given(POLICIES, st.integers(0, 200))
def test_the_first_and_the_newest_are_kept_and_nothing_more_goes_than_must(keep: KeepPolicy, length: int) -> None:
    text = list(range(length))
    gone = keep.remove_surplus(text)
    first = min(keep.first, length)
    assert text[:first] == list(range(first)) and text[first:] == list(range(first + len(gone), length))
    assert len(text) <= keep.first + 2 * keep.last and sorted(text + gone) == list(range(length))
    assert gone == list(range(keep.first, keep.first + len(gone)))
    assert not gone or len(text) > keep.first + keep.last, "the newest are all there"
    assert keep.count_surplus(length) == len(gone)


@given(POLICIES, st.integers(0, 100), st.lists(st.integers(1, 40)))
def test_it_does_not_matter_where_the_prompt_ended_or_how_the_text_came(
    keep: KeepPolicy, prompt: int, pieces: list[int]
) -> None:
    grown, whole = list(range(prompt)), list(range(prompt + sum(pieces)))
    keep.remove_surplus(grown)
    at = prompt
    for piece in pieces:
        grown += range(at, at := at + piece)
        keep.remove_surplus(grown)
    keep.remove_surplus(whole)
    assert grown == whole


@pytest.mark.parametrize(
    ("keep", "context", "capacity", "says"),
    [
        (
            KeepPolicy(4, 50),
            103,
            1000,
            "a row has 104 tokens .* the model's context has 103: make keep_last at most 49",
        ),
        (KeepPolicy(4, 50), 104, 96, "the KV cache holds 96: make keep_last at most 46, or raise the KV memory"),
        (KeepPolicy(200, 1), 104, 96, "the model's context has 104: make keep_first smaller"),
    ],
)
def test_a_row_must_have_room_for_what_it_keeps_and_as_much_again(
    keep: KeepPolicy, context: int, capacity: int, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        keep.check(context, capacity)
    keep.check(keep.max_row_tokens, keep.max_row_tokens)
    fits = re.search(r"keep_last at most (\d+)", str(refused.value))
    if fits is not None:
        KeepPolicy(keep.first, int(fits[1])).check(context, capacity)
