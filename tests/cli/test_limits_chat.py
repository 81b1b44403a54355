"""A chat that is full goes on: what it says, and what the model then reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chat.view import RawView
from cortexmlx.cli.limits import advice, drop_oldest_turns
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import KVCacheFull, PromptTooLong
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import FakeEngine, FakeInfo
from support.cli.fake_answers import text_of


@pytest.fixture
def full() -> ChatSession:
    """A token is a character, 400 fit, and there are about 350."""
    engine: Any = FakeEngine(EngineConfig("fake"), info=FakeInfo(context_length=400))
    told: list[str] = []
    params = SamplingParams(max_tokens=100)
    session = ChatSession(engine, lambda reply: RawView(), engine.conversation(params=params), note=told.append)
    for number in range(7):
        session.ask(Question(f"question {number}"))
    assert told == [] and 320 < session.conversation.tokens < 400
    return session


def test_the_oldest_turns_are_left_out_and_it_is_said(full: ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    before, told = full.conversation.messages, full.note.__self__  # type: ignore[attr-defined]
    full.ask(Question("one more"))
    assert len(told) == 1
    assert (
        told[0].startswith("the context of 400 tokens is full: with this question ")
        and "are not sent any more" in told[0]
    )
    assert "/set keep_last 100 lets a text outgrow the context" in told[0]
    assert full.conversation.messages[: len(before)] == before, "they are still there"
    read = "".join(map(chr, full.engine.seen[-1][0]))  # type: ignore[attr-defined]
    assert "question 0" not in read and "question 6" in read and len(read) < 400 - 400 // 3 + 1
    full.ask(Question("and one"))
    assert len(told) == 1, "there is room for some turns"


def test_a_long_question_has_what_it_needs_and_no_more_goes(full: ChatSession) -> None:
    room = drop_oldest_turns(full.conversation, "x" * 150, full.engine)
    assert room and 0 < full.conversation.unread < len(full.conversation.messages)
    assert full.conversation.count("x" * 150) + 50 <= 400


def test_what_never_fits_is_refused_and_nothing_has_changed(full: ChatSession) -> None:
    before = full.conversation.messages
    full.engine.info = replace(full.engine.info, context_length=100)  # type: ignore[misc,type-var]
    assert drop_oldest_turns(full.conversation, "x" * 100, full.engine) == "" and full.conversation.unread == 0
    with pytest.raises(PromptTooLong):
        full.ask(Question("!fail"))
    assert full.conversation.messages == before and full.conversation.unread == 0


def test_memory_that_the_system_refuses_makes_it_shorter_and_it_goes_on(
    full: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try fails, and from then on less fits."""
    submit = full.engine.submit

    def refused(prompt: Any, params: Any = None, **options: Any) -> Any:
        monkeypatch.setattr(full.engine, "submit", submit)
        full.engine.info = replace(full.engine.info, context_length=300)  # type: ignore[misc,type-var]
        raise KVCacheFull("the system refuses it more memory")

    monkeypatch.setattr(full.engine, "submit", refused)
    completion = full.ask(Question("and?"))
    assert completion.text == "You said: and?" and full.conversation.unread > 0
    assert text_of(full.engine.seen[-1][0]) == "and?"  # type: ignore[attr-defined]


def test_it_is_said_what_would_give_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = FakeEngine(EngineConfig("fake"))
    assert advice(engine) == "/set keep_last 2048 lets a text outgrow the context."
    monkeypatch.setattr(FakeEngine, "longest_request", 1000)
    assert advice(engine) == "/set kv_memory SIZE gives it more (2 GiB now)."
