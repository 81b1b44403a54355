"""The suffix drafter guesses what followed the same words before."""

from __future__ import annotations

from cortexmlx.speculation.suffix import SuffixDrafter
from support.scheduling.requests import job_of


def test_it_drafts_what_followed_the_same_tokens() -> None:
    job = job_of(0, [1, 2, 3, 4, 5, 6, 1, 2, 3])
    (draft,) = SuffixDrafter().propose([job], 2)
    assert draft is not None and list(draft.tokens) == [4, 5]


def test_it_has_no_guess_for_what_was_never_there() -> None:
    assert SuffixDrafter().propose([job_of(0, [1, 2, 3, 4, 5])], 4) == [None]
