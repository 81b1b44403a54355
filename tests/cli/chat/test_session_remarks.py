"""What is told of a chat that was loaded, or goes on with another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, conversation_notes
from cortexmlx.cli.start import run
from cortexmlx.errors import InvalidRequest
from support.cli.chat_commands import run_command
from support.cli.cli_fakes import Fakes

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
