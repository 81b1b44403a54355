"""What the tests of a chat share."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.cli.chat.view import PlainTextView
from cortexmlx.cli.start import run
from cortexmlx.core.config import EngineConfig
from support.cli.cli_fakes import FakeEngine
from support.models.calling import write_calling


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What commands keep between runs is not the user's here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling(tmp_path_factory.mktemp("calling") / "tiny", "hermes")


@pytest.fixture
def piped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that runs a command whose input is a text, and returns the exit code."""

    def run_on(text: str, *line: str) -> int:
        (tmp_path / "in").write_text(text)
        with (tmp_path / "in").open() as lines:
            monkeypatch.setattr(sys, "stdin", lines)
            return run(list(line))

    return run_on


@pytest.fixture
def session() -> ChatSession:
    """A chat with a fake engine, its answers printed as plain text."""
    engine: Any = FakeEngine(EngineConfig("fake"))
    return ChatSession(engine, lambda reply: PlainTextView(), engine.conversation())


@pytest.fixture
def screen() -> Console:
    """Where commands print: see `support.cli.chat_commands.printed`."""
    return Console(file=io.StringIO(), width=300)
