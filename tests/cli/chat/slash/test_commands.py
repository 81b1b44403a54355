"""The slash commands of a chat: what they change, and what they say."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cortexmlx.cli.chat.input import completions
from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chat.slash.commands import BY_NAME, COMMANDS, LeaveChat
from cortexmlx.cli.chats.saved_chats import ChatSaver
from cortexmlx.core.config import EngineConfig
from support.cli.chat_commands import printed, run_command
from support.cli.cli_fakes import FakeEngine


def test_help_names_every_command_and_alias(session: ChatSession, screen: Console) -> None:
    run_command("/help", session, screen)
    for command in COMMANDS:
        assert all(name in printed(screen) for name in (command.name, *command.aliases, command.help))
    for keys in ("Alt-Enter", "Ctrl-R", "Ctrl-X Ctrl-E", "Ctrl-T", "Ctrl-C", "Ctrl-Z", "Ctrl-D"):
        assert keys in printed(screen)
    assert "temperature" in BY_NAME["/set"].complete_values() and list(BY_NAME["/load"].complete_values()) == []
    run_command("/help set", session, screen)
    assert printed(screen).count("/set [NAME VALUE]") == 2 and printed(screen).count("/undo") == 1


def test_no_two_commands_share_a_name() -> None:
    names = [name for command in COMMANDS for name in (command.name, *command.aliases)]
    assert len(names) == len(set(names)) == len(BY_NAME) and all(name.startswith("/") for name in names)


def test_tab_tells_kept_chats_from_files(session: ChatSession) -> None:
    session.saver = ChatSaver()
    session.ask(Question("one"))
    assert session.saver.path is not None
    assert [*completions("/load ", BY_NAME)] == [(session.saver.path.stem, 0, "saved chat")]


def test_stats_blocks_and_tokens_speak_of_the_engine(session: ChatSession, screen: Console) -> None:
    session.ask(Question("one"))
    for line in ("/stats", "/blocks", "/tokens"):
        run_command(line, session, screen)
    assert "1 MiB in use and 2 MiB cached, of 1 GiB; it may grow to 2 GiB" in printed(screen)
    assert "64 blocks of 32 tokens" in printed(screen) and "of the context of 8,192 tokens" in printed(screen)


def test_a_chat_that_keeps_a_part_says_how_much(session: ChatSession, screen: Console) -> None:
    session.engine = FakeEngine(EngineConfig("fake", keep_last=1000))  # type: ignore[assignment]
    session.ask(Question("one"))
    run_command("/tokens", session, screen)
    assert "tokens, of which the model sees the first 4 and at least the newest 1,000\n" in printed(screen)


def test_a_cleared_chat_is_empty_and_what_was_said_is_kept(session: ChatSession, screen: Console) -> None:
    session.saver = ChatSaver()
    session.ask(Question("one"))
    first = session.saver.path
    assert first is not None
    run_command("/reset", session, screen)
    assert session.conversation.messages == () and session.saver.path is None
    assert printed(screen) == f"  the conversation is empty again; what was said is saved as {first.stem}\n"


def test_tokens_tell_what_is_not_read_any_more(session: ChatSession, screen: Console) -> None:
    for text in ("one", "two", "three"):
        session.ask(Question(text))
    session.conversation.unsent = 2
    run_command("/tokens", session, screen)
    assert "the 2 oldest messages are not sent any more, and not counted" in printed(screen)


@pytest.mark.parametrize("line", ["/exit", "/quit", "/bye", "exit", " QUIT ", "exit()", "/BYE"])
def test_whoever_wants_to_go_goes(session: ChatSession, screen: Console, line: str) -> None:
    with pytest.raises(LeaveChat):
        run_command(line, session, screen)


@pytest.mark.parametrize(
    "line",
    ["/chats", "/undo", "/clear", "/tokens", "/set quiet", "/system " + "long " * 20],
)
def test_every_line_of_a_remark_is_indented(line: str, session: ChatSession) -> None:
    narrow = Console(file=io.StringIO(), width=20)
    run_command(line, session, narrow)
    rows = printed(narrow).splitlines()
    assert len(rows) > 1 and all(row.startswith("  ") for row in rows)
