"""All that was said can be read as Markdown."""

from __future__ import annotations

from typing import Any

from cortexmlx.core.config import EngineConfig
from support.cli.cli_fakes import FakeEngine


def test_all_that_was_said_can_be_read_as_markdown() -> None:
    engine: Any = FakeEngine(EngineConfig("fake"))
    talk = engine.conversation(system="Be brief.")
    talk.ask("a\n\n```\nb\n```")
    assert talk.markdown() == (
        "# A conversation with fake\n\n## System\n\nBe brief.\n\n## User\n\na\n\n```\nb\n```\n\n"
        "## Assistant\n\nYou said: a\n\n```\nb\n```\n"
    )
