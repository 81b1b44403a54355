"""/thoughts: those of the last answer, and how those to come are shown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.errors import InvalidRequest
from support.cli.chat_commands import printed, run_command


def test_the_thoughts_of_the_last_answer_are_shown_and_those_to_come_folded(session: ChatSession) -> None:
    screen = Console(file=io.StringIO(), width=40)
    with pytest.raises(InvalidRequest, match="has no thoughts"):
        run_command("/thoughts", session, screen)
    session.ask(Question("!say <think>\n**So** it is.\n</think>yes <think>or not</think>"))
    run_command("/thoughts", session, screen)
    assert printed(screen) == "So it is.\n"
    run_command("/thoughts fold", session, screen)
    assert session.folding.folded
    run_command("/thoughts show", session, screen)
    assert not session.folding.folded
    with pytest.raises(InvalidRequest, match="takes nothing, fold or show: not 'off'"):
        run_command("/thoughts off", session, screen)
    session.ask(Question("without"))
    with pytest.raises(InvalidRequest, match="has no thoughts"):
        run_command("/thoughts", session, screen)
