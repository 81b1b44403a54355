"""Log-probabilities with their tokens' texts, for people and for programs."""

from __future__ import annotations

import math

from cortexmlx.cli.generate import logprob_json, logprob_table
from cortexmlx.types.logprobs import TokenLogprob

TEXTS = {1: "the", 2: " a\n", 3: "好", 4: "\ufffd", 5: "x" * 40}
TOKENS = [
    TokenLogprob(1, math.log(0.5), ((1, math.log(0.5)), (2, math.log(0.25)))),
    TokenLogprob(3, -math.inf),
    TokenLogprob(4, 1e-9, ((5, -20.0),)),
]


def test_the_table_has_a_line_for_each_token() -> None:
    assert list(logprob_table(TOKENS, TEXTS.__getitem__)) == [
        "token   logprob    prob  likeliest",
        '"the"    -0.693   50.0%  "the" 50.0%  " a\\n" 25.0%',
        '"好"       -inf    0.0%',
        '"\ufffd"       0.000  100.0%  "' + "x" * 40 + '" 0.0%',
    ]


def test_an_answer_without_tokens_has_a_head_alone() -> None:
    assert list(logprob_table([], TEXTS.__getitem__)) == ["token   logprob    prob  likeliest"]


def test_json_names_each_token_by_text_and_id() -> None:
    assert logprob_json(TOKENS[:1], TEXTS.__getitem__) == [
        {
            "token": "the",
            "token_id": 1,
            "logprob": math.log(0.5),
            "top": [
                {"token": "the", "token_id": 1, "logprob": math.log(0.5)},
                {"token": " a\n", "token_id": 2, "logprob": math.log(0.25)},
            ],
        }
    ]
