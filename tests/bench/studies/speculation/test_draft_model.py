"""The study of draft models counts what is right, and its model of the gain is plain arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.bench.studies.speculation.draft_model import Acceptance, replay, total
from support.drafting.draft_models import draft_model
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of


def test_a_model_is_right_about_its_own_answers_and_wrong_about_others(tiny: Any) -> None:
    prompt = tokens_of(40)
    (answer,) = Driver(tiny("llama")).answers([prompt], 30)
    draft = draft_model(tiny("llama"))
    own, other = replay(draft, [(prompt, answer), (prompt, [answer[0], *(256 for _ in answer[1:])])], 3)
    assert own.accepted == own.drafted == 3 * own.rounds and own.rounds == 7
    assert own.tokens_per_round == 4 and other.accepted < 3
    assert total([own, other]).drafted == own.drafted + other.drafted
    draft.release()


def test_the_gain_is_tokens_over_time() -> None:
    always = Acceptance(guesses=3, rounds=10, drafted=30, accepted=30)
    assert always.gain(0.0) == (pytest.approx(4 / 1.57), pytest.approx(4 / 1.14))
    assert always.gain(0.1) == (pytest.approx(4 / 1.87), pytest.approx(4 / 1.44))
    assert Acceptance(1, 10, 10, 0).gain(0.5)[1] < 1
