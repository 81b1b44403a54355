"""What the tests of a chat share."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.cli.chat_session import ChatSession
from cortexmlx.cli.chat_view import RawView
from cortexmlx.request import SamplingParams
from cortexmlx.serving.config import EngineConfig
from support.cli_fakes import FakeEngine


@pytest.fixture
def session() -> ChatSession:
    """A chat with a fake engine, its answers printed as plain text."""
    engine: Any = FakeEngine(EngineConfig("fake"))
    return ChatSession(engine, lambda prompt: RawView(), SamplingParams())
