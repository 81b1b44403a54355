"""The line below an answer says the right reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chat.view import PlainTextView
from cortexmlx.cli.limits import cut_reason, drop_oldest_turns, incomplete_form_note, room_advice
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import KVCacheFull, PromptTooLong
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.types.request import Completion, FinishReason, Timings, Usage
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import FakeEngine, FakeInfo
from support.cli.fake_answers import text_of

DONE = Completion("x", (1,), FinishReason.LENGTH, Usage(990, 10), Timings(0.0, 0.0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("completion", "most", "holds", "says"),
    [
        (DONE, 10, 8192, "stopped at the token limit of 10"),
        (DONE, 11, 8192, "stopped: the context of 8,192 tokens is full"),
        (DONE, None, 8192, "stopped: the context of 8,192 tokens is full"),
        (DONE, 11, 1000, "stopped: the KV memory of 2 GiB (1,000 tokens) is full"),
        (replace(DONE, finish_reason=FinishReason.STOP), 10, 8192, ""),
        (replace(DONE, finish_reason=FinishReason.CANCELLED), 10, 8192, "stopped"),
    ],
)
def test_why_an_answer_ended(
    completion: Completion, most: int | None, holds: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = FakeEngine(EngineConfig("fake"))
    monkeypatch.setattr(FakeEngine, "longest_request", holds)
    assert cut_reason(completion, SamplingParams(max_tokens=most), engine) == says


def test_a_form_is_whole_if_its_grammar_ended_it_or_its_text_says_so() -> None:
    """A stop text may end an answer anywhere, and a limit may come with its last token."""
    json, choice, regex = StructuredOutput.json(), StructuredOutput.choice(["a b", "a"]), StructuredOutput.regex("a+")
    length, stop = FinishReason.LENGTH, FinishReason.STOP
    for form, text, reason, stopped_by, whole in (
        (json, "{", stop, None, True),
        (json, '{"a": 1', stop, "}", False),
        (json, '{"a": 1}', stop, "\n", True),
        (json, '{"a": 1}', length, None, True),
        (json, "[" * 100_000, length, None, False),
        (choice, "a", length, None, True),
        (choice, "a ", length, None, False),
        (regex, "a", length, None, False),
        (json, "{", FinishReason.TOOL_CALLS, None, True),
    ):
        answer = replace(DONE, text=text, finish_reason=reason, stop_string=stopped_by)
        assert bool(incomplete_form_note(answer, SamplingParams(structured=form))) is not whole
        assert not incomplete_form_note(answer, SamplingParams())


@pytest.fixture
def full() -> ChatSession:
    """A token is a character, 400 fit, and there are about 350."""
    engine: Any = FakeEngine(EngineConfig("fake"), info=FakeInfo(context_length=400))
    told: list[str] = []
    params = SamplingParams(max_tokens=100)
    session = ChatSession(engine, lambda reply: PlainTextView(), engine.conversation(params=params), note=told.append)
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
    assert room and 0 < full.conversation.unsent < len(full.conversation.messages)
    assert full.conversation.count("x" * 150) + 50 <= 400


def test_what_never_fits_is_refused_and_nothing_has_changed(full: ChatSession) -> None:
    before = full.conversation.messages
    full.engine.info = replace(full.engine.info, context_length=100)  # type: ignore[misc,type-var]
    assert drop_oldest_turns(full.conversation, "x" * 100, full.engine) == "" and full.conversation.unsent == 0
    with pytest.raises(PromptTooLong):
        full.ask(Question("!fail"))
    assert full.conversation.messages == before and full.conversation.unsent == 0


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
    assert completion.text == "You said: and?" and full.conversation.unsent > 0
    assert text_of(full.engine.seen[-1][0]) == "and?"  # type: ignore[attr-defined]


def test_it_is_said_what_would_give_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = FakeEngine(EngineConfig("fake"))
    assert room_advice(engine) == "/set keep_last 2048 lets a text outgrow the context."
    monkeypatch.setattr(FakeEngine, "longest_request", 1000)
    assert room_advice(engine) == "/set kv_memory SIZE gives it more (2 GiB now)."


ASIDE = "I have been to the sea this summer, and saw a great many of them, large ones and small ones, every day."


@pytest.fixture
def engine() -> Iterator[Engine]:
    """About 260 tokens."""
    with Engine("smollm2", kv_memory="12MB") as opened:
        yield opened


@pytest.mark.model
def test_a_full_cache_never_ends_the_chat(engine: Engine) -> None:
    told: list[str] = []
    params = SamplingParams(max_tokens=8)
    session = ChatSession(engine, lambda reply: PlainTextView(), engine.conversation(params=params), note=told.append)
    for number in range(6):
        completion = session.ask(Question(f"{ASIDE} Name {number + 2} animals of the sea, please."))
        assert completion.usage.total_tokens <= engine.longest_request
    talk = session.conversation
    assert told and all("the KV memory of 11.2 MiB (257 tokens) is full" in note for note in told)
    assert "/set kv_memory SIZE gives it more (11.2 MiB now)" in told[0]
    assert len(talk.messages) == 12 and 0 < talk.unsent < 12
    rest = engine.conversation(messages=talk.messages[talk.unsent : -2], params=params)
    assert rest.ask(str(talk.messages[-2]["content"])).text == completion.text
