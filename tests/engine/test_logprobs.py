"""A prompt's log-probabilities as a sequence whose items are made when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cortexmlx import PromptLogprobs, TokenLogprob

OWN = np.array([np.nan, -1.5, -0.25, -4.0], np.float32)
IDS = np.array([[-1, -1], [3, 8], [5, 2], [9, 1]], np.int32)
TOP = np.array([[np.nan, np.nan], [-0.5, -1.5], [-0.25, -3.0], [-0.125, -2.0]], np.float32)
ITEMS = [
    None,
    TokenLogprob(8, -1.5, ((3, -0.5), (8, -1.5))),
    TokenLogprob(5, -0.25, ((5, -0.25), (2, -3.0))),
    TokenLogprob(7, -4.0, ((9, -0.125), (1, -2.0))),
]


def told(count: int = 4) -> PromptLogprobs:
    return PromptLogprobs((6, 8, 5, 7)[:count], OWN[:count], IDS[:count], TOP[:count])


def test_it_reads_like_a_list_beside_the_prompt() -> None:
    assert isinstance(told(), Sequence) and len(told()) == 4 and len(told(2)) == 2
    assert list(told()) == ITEMS and list(reversed(told())) == ITEMS[::-1]
    assert told()[-1] == ITEMS[-1] and told()[1:3] == tuple(ITEMS[1:3]) and told()[::-2] == tuple(ITEMS[::-2])
    assert type(told()[1].token_id) is type(told()[1].top[0][0]) is int and type(told()[1].logprob) is float  # type: ignore[union-attr]
    for place in (4, -5):
        with pytest.raises(IndexError):
            told()[place]


def test_it_is_a_value() -> None:
    assert told() == told() and hash(told()) == hash(told()) and told() != told(3) and told() != ITEMS
    assert repr(told(2)) == f"PromptLogprobs([None, {ITEMS[1]!r}])"


def test_the_tokens_own_are_one_array() -> None:
    np.testing.assert_array_equal(told().logprobs, OWN)
