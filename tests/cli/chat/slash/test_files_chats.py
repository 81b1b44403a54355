"""/chats."""

from __future__ import annotations

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chats.saved_chats import ChatSaver, chats_folder
from cortexmlx.errors import InvalidRequest
from support.cli.chat_commands import printed, run_command


def test_kept_chats_are_listed_with_the_one_that_goes_on(session: ChatSession, screen: Console) -> None:
    run_command("/chats", session, screen)
    assert printed(screen).splitlines() == ["  no chats are kept yet"]
    session.keeper = ChatSaver()
    session.ask(Question("monads"))
    for number in range(25):
        (chats_folder() / f"2026-01-01-{number:02}.json").touch()
    run_command("/chats monads", session, screen)
    run_command("/chats", session, screen)
    run_command("/chats nothing", session, screen)
    said = printed(screen).splitlines()
    assert said[1].startswith(" * ") and said[1].endswith("-monads")
    assert "  and 6 older: /chats WORD finds them" in said
    assert said[-1] == "  no kept chat has 'nothing' in its name"
    with pytest.raises(
        InvalidRequest, match="/load needs a file, or the name of a kept chat: the newest are 2026-01-01-"
    ):
        run_command("/load", session, screen)
