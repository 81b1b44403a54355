"""What is set of a chat template holds from the next turn on, and is refused before a turn depends on it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession
from cortexmlx.errors import InvalidRequest
from support.cli.chat_commands import run_command


def test_set_think_and_any_variable_of_the_template(session: ChatSession) -> None:
    screen = Console(file=io.StringIO(), width=100)
    run_command("/set nothink", session, screen)
    assert session.conversation.template_vars == {"enable_thinking": False}
    run_command("/set think", session, screen)
    assert session.conversation.template_vars == {"enable_thinking": True}
    for line in ("/set think off", "/set reasoning_effort high"):
        run_command(line, session, screen)
    assert session.conversation.template_vars == {"enable_thinking": False, "reasoning_effort": "high"}
    run_command("/set enable_thinking true", session, screen)
    assert session.conversation.template_vars["enable_thinking"] is True
    run_command("/set think none", session, screen)
    assert session.conversation.template_vars == {"reasoning_effort": "high"}
    assert '  reasoning_effort    "high" ' in screen.file.getvalue()  # type: ignore[attr-defined]


def test_what_the_template_does_not_read_is_no_setting(session: ChatSession) -> None:
    with pytest.raises(InvalidRequest, match="no setting 'colour'"):
        run_command("/set colour red", session, Console(file=io.StringIO()))
    assert session.conversation.template_vars == {}
