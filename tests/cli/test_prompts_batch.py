"""Prepare a prompt of a batch for the engine."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.cli.prompts import prepared
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.request import Request
from cortexmlx.types.messages import ChatPrompt
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import FakeEngine

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be brief."}


def prepare(asked: Any, *, system: str | None = None, raw: bool = False, **variables: object) -> Any:
    engine: Any = FakeEngine(EngineConfig("fake"))
    request = Request((asked,), SamplingParams(), variables, raw)
    return prepared(engine, system, request, asked)


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
