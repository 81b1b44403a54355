"""A prompt as commands submit it, and what the command line sets of a chat template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cortexmlx.cli.prompts import check_variables, lost_calls_note, prepare_prompt
from cortexmlx.cli.start import run
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.request import Request
from cortexmlx.types.messages import ChatPrompt
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import FakeEngine, Fakes

USER = {"role": "user", "content": "hi"}


def engine(**info: Any) -> Any:
    made = FakeEngine(EngineConfig("fake"))
    made.info = replace(made.info, **info)
    return made


def test_variables_are_looked_at_before_anything_depends_on_them() -> None:
    assert check_variables(engine(), {"enable_thinking": False}) == {"enable_thinking": False}
    with pytest.raises(InvalidRequest, match="does not read colour"):
        check_variables(engine(), {"colour": "red"})
    with pytest.raises(InvalidRequest, match="has no chat template, so there is nothing to set: colour"):
        check_variables(engine(chat_template=False), {"colour": "red"})
    assert check_variables(engine(chat_template=False), {}) == {}


def test_calls_of_tools_are_left_out_if_the_tokens_are_the_same_without_them() -> None:
    """The template of the fake writes roles and contents only."""
    said = [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]
    assert lost_calls_note(engine(), said) == (
        "the chat template of fake leaves out `tool_calls`, so the model does not see them"
    )
    seeing = engine()
    seeing.encode = lambda messages: [len(message) for message in messages]
    assert lost_calls_note(seeing, said) == lost_calls_note(engine(), [USER]) == ""


@pytest.mark.parametrize(("option", "code"), [("enable_thinking=false", 0), ("colour=red", 1)])
def test_a_chat_refuses_it_before_the_first_turn(
    fakes: Fakes, capsys: pytest.CaptureFixture[str], option: str, code: int
) -> None:
    assert run(["chat", "fake", "-p", "hi", "--template-var", option, "--no-save"]) == code
    assert ("does not read colour" in capsys.readouterr().err) is bool(code)
    assert len(fakes.engine.seen) == 1 - code


SYSTEM = {"role": "system", "content": "Be brief."}


def prepare(asked: Any, *, system: str | None = None, raw: bool = False, **variables: object) -> Any:
    engine: Any = FakeEngine(EngineConfig("fake"))
    request = Request((asked,), SamplingParams(), variables, raw)
    return prepare_prompt(engine, system, request, asked)


def test_the_system_prompt_goes_to_all_that_have_none() -> None:
    assert prepare("hi", system="Be brief.") == prepare([USER], system="Be brief.") == [SYSTEM, USER]
    own = [{"role": "system", "content": "Sing."}, USER]
    assert prepare(own, system="Be brief.") == own
    assert prepare("hi") == prepare([USER]) == [USER]


def test_raw_texts_and_tokens_are_as_they_are() -> None:
    assert prepare("hi", raw=True) == "hi" and prepare([1, 2], system="Be brief.") == [1, 2]


def test_tool_calls_that_the_template_leaves_out_are_refused() -> None:
    """The template of the fake writes roles and contents only."""
    with pytest.raises(InvalidRequest, match="the chat template of fake leaves out `tool_calls`"):
        prepare([USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}])


def test_a_requests_variables_reach_its_template() -> None:
    prompt = ChatPrompt([USER], {"enable_thinking": False})
    assert prepare("hi", enable_thinking=False) == prepare([USER], enable_thinking=False) == prompt
