"""The turns of a chat: answered, stopped, rolled back and written again."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, Question, TurnStopped, conversation_notes
from cortexmlx.cli.chat.view import PlainTextView
from cortexmlx.cli.start import run
from cortexmlx.core.config import EngineConfig
from cortexmlx.core.handle import RequestHandle
from cortexmlx.errors import InvalidRequest, PromptTooLong
from cortexmlx.sessions.reply import Reply, StartedTurn
from cortexmlx.sessions.turn import Transcript, Turn
from cortexmlx.types.request import Completion, FinishReason, RequestId, Timings, TokenEvent, Usage
from support.cli.chat_commands import run_command
from support.cli.cli_fakes import FakeEngine, FakeInfo, Fakes


def rendered(session: ChatSession) -> str:
    return "".join(map(chr, session.engine.seen[-1][0]))  # type: ignore[attr-defined]


def test_every_turn_sends_the_whole_conversation(session: ChatSession) -> None:
    session.conversation.system = "Be brief."
    session.ask(Question("one"))
    session.ask(Question("two"))
    assert rendered(session) == "<system>Be brief.\n<user>one\n<assistant>You said: one\n<user>two\n<assistant>"


def test_a_failed_turn_is_rolled_back(session: ChatSession) -> None:
    session.ask(Question("one"))
    with pytest.raises(PromptTooLong):
        session.ask(Question("!fail"))
    assert [turn["content"] for turn in session.conversation.messages] == ["one", "You said: one"]


def test_a_stopped_answer_is_kept_as_far_as_it_came(
    session: ChatSession, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stops = []

    class Stopping(PlainTextView):
        def feed(self, text: str, is_thought: bool = False) -> None:
            super().feed(text)
            if "word3" in text:
                stops[0]()

    session.show = lambda prompt: Stopping()
    session.stoppable = lambda stop: nullcontext(stops.append(stop))  # type: ignore[func-returns-value]
    script = tmp_path / "script"  # the engine waits after the fourth word
    script.write_text(json.dumps(["word0", " word1", " word2", " word3", None, " never"]))
    monkeypatch.setenv("FAKE_SCRIPT", str(script))
    completion = session.ask(Question("!script"))
    assert completion.finish_reason is FinishReason.CANCELLED
    assert session.conversation.messages[-1]["content"] == completion.text
    assert completion.text == "word0 word1 word2 word3"
    assert capsys.readouterr().out == completion.text + "\n"


def test_what_the_model_does_not_see_any_more_is_told_to_the_view() -> None:
    told: list[object] = []

    class Told(PlainTextView):
        def feed(self, text: str, is_thought: bool = False) -> None:
            told.append(text)

        def update_status(self, event: TokenEvent) -> None:
            told.append(event.dropped)

    handle = RequestHandle(RequestId(1), lambda request: None)
    for event in (TokenEvent("a", 1), TokenEvent("b", 2, dropped=30), TokenEvent("c", 3)):
        handle.push(event)
    usage, timings = Usage(40, 3, 0, 30), Timings(0.0, 0.0, 0.0, 0.0, 0.0)
    handle.push(TokenEvent("", completion=Completion("abc", (1, 2, 3), FinishReason.STOP, usage, timings)))
    reply = Reply(StartedTurn(handle, Turn((), Transcript(), [], ""), lambda completion: None))
    assert ChatSession._feed_view(reply, Told()).text == "abc"
    assert told[:6] == [0, "a", 30, "b", 0, "c"]


def test_stopping_before_the_first_word_forgets_the_turn(session: ChatSession) -> None:
    session.engine.cancelled.add(1)  # type: ignore[attr-defined]
    with pytest.raises(TurnStopped):
        session.ask(Question("!slow"))
    assert session.conversation.messages == ()


def test_a_template_that_opens_a_thought_is_noticed_and_remembered(session: ChatSession) -> None:
    session.engine.template_end = "<think>\n"  # type: ignore[attr-defined]
    prompts = []
    session.show = lambda prompt: prompts.append(prompt) or PlainTextView()  # type: ignore[func-returns-value]
    session.ask(Question("!say hm</think>yes"))
    assert prompts[0].opened == "<think>\n"
    assert session.conversation.messages[-1]["content"] == "<think>\nhm</think>yes"


def test_a_model_without_a_template_is_refused_with_the_way_out() -> None:
    engine = FakeEngine(EngineConfig("fake"), info=FakeInfo(chat_template=False))
    session = ChatSession(engine, lambda reply: PlainTextView(), engine.conversation())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no chat template: try `cortexmlx generate fake --raw"):
        session.ask(Question("hi"))


def test_writing_again_replaces_the_last_answer_unless_it_fails(session: ChatSession) -> None:
    session.ask(Question("one"))
    session.ask(Question("two"))
    session.conversation.edit(-1, "the old answer")
    with pytest.raises(PromptTooLong):
        session.ask(Question("!fail", replaces_last=True))
    assert session.conversation.messages[-1]["content"] == "the old answer"
    session.ask(Question("two", replaces_last=True))
    assert rendered(session) == "<user>one\n<assistant>You said: one\n<user>two\n<assistant>"
    assert [turn["content"] for turn in session.conversation.messages][2:] == ["two", "You said: two"]


# -- What is told of a chat that was loaded, or goes on with another model --------------------------------------------


LEFT_OUT = "the chat template of fake leaves out `tool_calls`, so the model does not see them"
SAID = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "42"},
]


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    (tmp_path / "calls.json").write_text(json.dumps(SAID))
    return tmp_path / "calls.json"


def test_calls_of_tools_that_the_template_leaves_out_are_told_when_a_chat_is_loaded(
    calls: Path, session: ChatSession, screen: Console
) -> None:
    told: list[str] = []
    session.note = told.append
    run_command(f"/load {calls}", session, screen)
    assert told == [LEFT_OUT] and len(session.conversation.messages) == 3


def test_so_they_are_when_it_is_resumed(calls: Path, fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "fake", "--resume", str(calls), "-p", "and?", "--no-save"]) == 0
    assert capsys.readouterr().err.count(LEFT_OUT) == 1


def test_a_template_that_refuses_all_of_it_is_heard_of_when_something_is_asked(
    calls: Path, session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> list[int]:
        raise InvalidRequest("roles must alternate")

    session.conversation.load(calls)
    monkeypatch.setattr(session.engine, "encode", refuse)
    assert conversation_notes(session.engine, session.conversation) == ()


def test_an_adapter_that_is_not_loaded_is_told(session: ChatSession, screen: Console, tmp_path: Path) -> None:
    session.conversation.adapter = "sql"
    session.conversation.save(tmp_path / "talk.json")
    session.conversation.adapter = None
    told: list[str] = []
    session.note = told.append
    run_command(f"/load {tmp_path / 'talk.json'}", session, screen)
    assert told == ["'sql' answered, an adapter that is not loaded: /adapter sql=FOLDER, or /adapter none"]
    run_command("/adapter none", session, screen)
    assert session.conversation.adapter is None and conversation_notes(session.engine, session.conversation) == ()
