"""What the tests of a chat share."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.chat.view import PlainTextView
from cortexmlx.core.config import EngineConfig
from support.cli.cli_fakes import FakeEngine


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What commands keep between runs is not the user's here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def session() -> ChatSession:
    """A chat with a fake engine, its answers printed as plain text."""
    engine: Any = FakeEngine(EngineConfig("fake"))
    return ChatSession(engine, lambda reply: PlainTextView(), engine.conversation())


@pytest.fixture
def screen() -> Console:
    """Where commands print: see `support.cli.chat_commands.printed`."""
    return Console(file=io.StringIO(), width=300)
