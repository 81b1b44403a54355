"""Which settings of a saved conversation apply to the model that continues it."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import ChatPrompt, Engine
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import ConversationFileError, InvalidRequest
from cortexmlx.sessions.conversation import _OF_TOKENS
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import FakeEngine, FakeInfo

OF_TOKENS = SamplingParams(top_k=3, logit_bias={5: 1.0}, stop_token_ids=[7])
NOT_SET = "logit_bias and stop_token_ids named tokens of another model than {}: not set any more"


def engine(**info: Any) -> Any:
    return FakeEngine(EngineConfig("fake"), info=replace(FakeInfo(), **info))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    talk = engine().conversation(params=OF_TOKENS, template_vars={"enable_thinking": False})
    talk.ask("hi")
    talk.save(tmp_path / "talk.json")
    return tmp_path / "talk.json"


def test_all_of_them_hold_with_the_same_model(saved: Path) -> None:
    talk = engine().conversation()
    talk.load(saved)
    assert talk.params == OF_TOKENS == talk.fork().params and talk.notes == talk.fork().notes == ()
    assert talk.template_vars == {"enable_thinking": False}


def test_ids_of_tokens_and_unread_variables_do_not_hold_with_another(saved: Path) -> None:
    """An id may be beyond its vocabulary, which every turn would be refused for, or be another token."""
    other = engine(name="other", identity="07e4", template_vars=(), vocab_size=6)
    talk = other.conversation()
    talk.load(saved)
    notes = (NOT_SET.format("other"), "the chat template of other does not read enable_thinking: not set any more")
    assert talk.notes == (f"{saved} was saved with fake and continues with other: its texts are computed again", *notes)
    assert talk.params == SamplingParams(top_k=3) and talk.template_vars == {}
    assert talk.ask("and?").text == "You said: and?"
    before = engine().conversation(params=OF_TOKENS, template_vars={"enable_thinking": False})
    moved = before.fork(other)
    assert (moved.params, moved.template_vars, moved.notes) == (SamplingParams(top_k=3), {}, notes)
    assert before.params == OF_TOKENS


def test_every_parameter_of_token_ids_is_among_those_that_another_model_does_not_take() -> None:
    of_tokens = {each.name for each in fields(SamplingParams) if re.match(r"(Sequence|Mapping)\[int\b", str(each.type))}
    assert of_tokens == set(_OF_TOKENS)


def test_other_weights_of_the_same_name_are_another_model(saved: Path) -> None:
    talk = engine(identity="07e4").conversation()
    talk.load(saved)
    assert talk.notes == (
        f"{saved} was saved with another fake (/models/fake): its texts are computed anew",
        NOT_SET.format("fake"),
    )


def test_a_file_that_names_tokens_that_its_model_does_not_have_is_refused(saved: Path) -> None:
    talk = engine(vocab_size=6).conversation(system="Old.")
    with pytest.raises(
        ConversationFileError, match=r"its stop_token_ids names the token id 7, but must be .* in 0\.\.5"
    ):
        talk.load(saved)
    assert (talk.system, talk.messages, talk.params) == ("Old.", (), SamplingParams())


def test_what_a_turn_or_a_request_names_beyond_the_vocabulary_is_refused_by_name(tiny: Any) -> None:
    with Engine(tiny("llama"), kv_memory="1MB", block_size=8) as made:
        top = made.info.vocab_size - 1
        for name, value in (("stop_token_ids", [top + 1]), ("logit_bias", {top + 1: -100.0})):
            params, says = SamplingParams(max_tokens=2, **{name: value}), f"{name} names the token id {top + 1}, but"
            with pytest.raises(InvalidRequest, match=says):
                made.conversation(params=params).ask("hi")
            for prompt in ("hi", [1, 2], ChatPrompt([{"role": "user", "content": "hi"}])):
                with pytest.raises(InvalidRequest, match=says):
                    made.submit(prompt, params)
            [(_, error), (_, answer)] = sorted(
                made.as_completed(["a", "b"], [params, SamplingParams(max_tokens=1)]), key=lambda each: each[0]
            )
            assert isinstance(error, InvalidRequest) and answer.token_ids  # type: ignore[union-attr]
        last = SamplingParams(max_tokens=2, logit_bias={top: 1e9}, stop_token_ids=[top])
        assert made.generate("hi", last).token_ids == (top,)
