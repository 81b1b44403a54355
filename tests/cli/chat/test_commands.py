"""The slash commands of a chat: what they change, and what they say."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from cortexmlx.cli.chat.commands import COMMANDS, Leave, completions, run_command
from cortexmlx.cli.chat.kept import Keeper
from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.errors import InvalidRequest
from cortexmlx.serving.config import EngineConfig
from cortexmlx.sessions.saved import Saved
from support.cli_fakes import FakeEngine


@pytest.fixture
def screen() -> Console:
    return Console(file=io.StringIO(), width=100)


def printed(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_help_names_every_command_and_alias(session: ChatSession, screen: Console) -> None:
    run_command("/help", session, screen)
    for command in COMMANDS:
        assert all(name in printed(screen) for name in (command.name, *command.aliases, command.meaning))
    assert [name for name, _ in completions()] == [command.name for command in COMMANDS]


def test_clear_undo_and_regen_change_what_the_model_sees(session: ChatSession, screen: Console) -> None:
    session.ask(Question("one"))
    session.ask(Question("two"))
    assert run_command("/regen", session, screen) == Question("two", again=True)
    run_command("/undo", session, screen)
    assert [turn["content"] for turn in session.conversation.messages] == ["one", "You said: one"]
    run_command("/reset", session, screen)
    assert session.conversation.messages == ()
    assert run_command("/undo", session, screen) is None
    with pytest.raises(InvalidRequest, match="no answer to write again"):
        run_command("/regen", session, screen)


def test_system_is_shown_changed_and_removed(session: ChatSession, screen: Console) -> None:
    run_command("/system Be brief.", session, screen)
    assert session.conversation.system == "Be brief."
    run_command("/system", session, screen)
    run_command("/system none", session, screen)
    assert session.conversation.system is None
    assert printed(screen).splitlines() == [
        "  system prompt: Be brief.",
        "  system prompt: Be brief.",
        "  system prompt: none",
    ]


def test_set_changes_one_parameter_and_checks_it(session: ChatSession, screen: Console) -> None:
    run_command("/set temp 0.7", session, screen)
    run_command("/set seed=5", session, screen)
    assert (session.params.temperature, session.params.seed) == (0.7, 5)
    run_command("/set seed none", session, screen)
    assert session.params.seed is None
    for line, says in {
        "/set temp hot": "temperature is 'hot', but must be a number",
        "/set top_k 1.5": "top_k is '1.5', but must be a whole number",
        "/set top_p 2": "top_p is 2.0",
        "/set colour red": "no setting 'colour': max_tokens, temperature",
    }.items():
        with pytest.raises(InvalidRequest, match=re.escape(says)):
            run_command(line, session, screen)
    assert session.params.temperature == 0.7


def test_save_writes_over_nothing_but_conversations(session: ChatSession, screen: Console, tmp_path: Path) -> None:
    session.ask(Question("one"))
    (tmp_path / "thesis.txt").write_text("years of work")
    for name in (tmp_path / "thesis.txt", tmp_path):
        with pytest.raises(InvalidRequest, match="name another file"):
            run_command(f"/save {name}", session, screen)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    for _ in range(2):
        run_command(f"/save {tmp_path / 'talk.json'}", session, screen)


def test_a_saved_conversation_goes_on_where_it_was(session: ChatSession, screen: Console, tmp_path: Path) -> None:
    session.conversation.system = "Be brief."
    session.ask(Question("né"))
    run_command(f"/save {tmp_path / 'talk.json'}", session, screen)
    assert (tmp_path / "talk.json").stat().st_mode & 0o777 == 0o600
    said = session.conversation.messages
    run_command("/clear", session, screen)
    run_command("/system none", session, screen)
    run_command(f"/load {tmp_path / 'talk.json'}", session, screen)
    assert (session.conversation.messages, session.conversation.system) == (said, "Be brief.")


def test_the_last_question_is_asked_in_other_words(session: ChatSession, screen: Console) -> None:
    with pytest.raises(InvalidRequest, match="there is no question to change"):
        run_command("/edit x", session, screen)
    session.ask(Question("one"))
    with pytest.raises(InvalidRequest, match="the last question, which was: one"):
        run_command("/edit", session, screen)
    question = run_command("/edit uno", session, screen)
    assert question == Question("uno", again=True)
    session.ask(question)
    assert [message["content"] for message in session.conversation.messages] == ["uno", "You said: uno"]


def test_a_loaded_or_cleared_chat_is_kept_in_a_file_of_its_own(session: ChatSession, screen: Console) -> None:
    session.keeper = Keeper()
    session.ask(Question("one"))
    first = session.keeper.path
    assert first is not None
    with pytest.raises(InvalidRequest, match=f"/save needs a file name; the chat is kept in {re.escape(str(first))}"):
        run_command("/save", session, screen)
    run_command("/clear", session, screen)
    session.ask(Question("two"))
    run_command(f"/load {first.stem}", session, screen)
    session.ask(Question("three"))
    run_command("/undo", session, screen)
    files = {path.stem[11:]: len(Saved.read(path).messages) for path in first.parent.iterdir()}
    assert files == {"one": 2, "two": 2, "one-2": 2}
    with pytest.raises(InvalidRequest, match="/load needs a file, or the name"):
        run_command("/load", session, screen)


def test_stats_blocks_and_tokens_speak_of_the_engine(session: ChatSession, screen: Console) -> None:
    session.ask(Question("one"))
    for line in ("/stats", "/blocks", "/tokens"):
        run_command(line, session, screen)
    assert "1 MiB in use and 2 MiB cached, of 1 GiB; it may grow to 2 GiB" in printed(screen)
    assert "64 blocks of 32 tokens" in printed(screen) and "of 8,192 tokens of context" in printed(screen)


def test_a_chat_that_keeps_a_part_says_how_much(session: ChatSession, screen: Console) -> None:
    session.engine = FakeEngine(EngineConfig("fake", keep_last=1000))  # type: ignore[assignment]
    session.ask(Question("one"))
    run_command("/tokens", session, screen)
    assert "tokens, of which the model sees the first 4 and at least the newest 1,000\n" in printed(screen)


def test_an_unknown_command_suggests_the_nearest(session: ChatSession, screen: Console) -> None:
    with pytest.raises(InvalidRequest, match=r"no command /clera: did you mean /clear\?"):
        run_command("/clera", session, screen)
    for name in ("/exit", "/quit", "/bye"):
        with pytest.raises(Leave):
            run_command(name, session, screen)
