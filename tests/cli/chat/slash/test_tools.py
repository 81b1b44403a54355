"""/tools: functions are offered, listed and taken away."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.errors import InvalidRequest
from support.cli.chat_commands import printed, run_command


def test_functions_are_offered_listed_and_taken_away(session: ChatSession, screen: Console, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def add(a: int) -> int:\n    """Add one."""\n    return a + 1\n')
    run_command("/tools", session, screen)
    assert "the model may call no functions; /tools FILE.py" in printed(screen)
    run_command(f"/tools {tmp_path}/mine.py", session, screen)
    assert [tool.name for tool in session.params.offered] == ["add"] and "Add one." in printed(screen)
    with pytest.raises(InvalidRequest, match="is not a file"):
        run_command("/tools missing.py", session, screen)
    assert [tool.name for tool in session.params.offered] == ["add"], "what was offered stays"
    run_command("/tools none", session, screen)
    assert session.params.offered == ()


def test_a_model_that_cannot_call_is_offered_nothing(session: ChatSession, screen: Console, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def add(a: int) -> int: return a + 1\n")
    object.__setattr__(session.conversation._reader, "call_format", None)
    with pytest.raises(InvalidRequest, match="this model cannot call tools"):
        run_command(f"/tools {tmp_path}/mine.py", session, screen)
    assert session.params.offered == ()
