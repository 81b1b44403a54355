"""/save, /load and /file."""

from __future__ import annotations

import base64
import errno
import io
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import AttachedFile, ChatSession, Question
from cortexmlx.cli.chats.saved_chats import ChatSaver, chats_folder, find_chat, matching_chats
from cortexmlx.errors import ConversationFileError, InvalidRequest
from cortexmlx.sessions.saved import SavedConversation
from support.cli.chat_commands import printed, run_command


@pytest.mark.parametrize("name", ["talk.json", "talk.md", "a talk.md"])
def test_nothing_is_written_over_in_silence(session: ChatSession, screen: Console, tmp_path: Path, name: str) -> None:
    session.ask(Question("one"))
    path = tmp_path / name
    run_command(f"/save {path}", session, screen)
    before = path.read_bytes()
    session.ask(Question("two"))
    with pytest.raises(InvalidRequest, match="exists already: name another file, or write over it with /save"):
        run_command(f"/save {path}", session, screen)
    assert path.read_bytes() == before and path.stat().st_mode & 0o777 == 0o600
    run_command(f"/save {path} --force", session, screen)
    assert b"two" in path.read_bytes() and printed(screen).endswith(f"saved 4 messages to {path}\n")
    (tmp_path / "nowhere").symlink_to(tmp_path / "not there")
    with pytest.raises(InvalidRequest, match="exists already"):
        run_command(f"/save {tmp_path / 'nowhere'}", session, screen)


def test_a_file_called_markdown_is_to_read(session: ChatSession, screen: Console, tmp_path: Path) -> None:
    session.ask(Question("# one"))
    run_command(f"/save {tmp_path / 'talk.md'}", session, screen)
    assert (tmp_path / "talk.md").read_text().endswith("## User\n\n# one\n\n## Assistant\n\nYou said: # one\n")


def test_the_last_answer_is_copied_by_the_terminal_and_pbcopy(
    session: ChatSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Console(file=Screen(), width=100)
    with pytest.raises(InvalidRequest, match="no answer to copy"):
        run_command("/copy", session, screen)
    session.ask(Question("ä"))
    (tmp_path / "pbcopy").write_text(f'#!/bin/sh\ncat > "{tmp_path}/copied"\n')
    (tmp_path / "pbcopy").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run_command("/copy", session, screen)
    assert (tmp_path / "copied").read_text() == "You said: ä"
    sent = base64.b64encode("You said: ä".encode()).decode()
    assert f"\x1b]52;c;{sent}\x07" in screen.file.getvalue() and "  copied 11 characters\x1b" in screen.file.getvalue()
    with pytest.raises(InvalidRequest, match="needs a terminal"):
        run_command("/copy", session, Console(file=io.StringIO()))


def test_what_cannot_be_saved_is_said(session: ChatSession, screen: Console, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is a folder: give /save a file"):
        run_command(f"/save {tmp_path}", session, screen)
    (tmp_path / "file").touch()
    for name in ("file/talk.md", "missing/talk.json", "x" * 300):
        with pytest.raises(InvalidRequest, match=r"written: .*: give /save another|no folder \S+ to write talk"):
            run_command(f"/save {tmp_path / name}", session, screen)


@pytest.mark.parametrize("name", ["talk.json", "talk.md"])
def test_a_full_disk_leaves_what_was_there(
    name: str, session: ChatSession, screen: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / name).write_text("what was there")
    monkeypatch.setattr("cortexmlx.sessions.saved.os.fsync", full)
    with pytest.raises(ConversationFileError, match="No space left"):
        run_command(f"/save {tmp_path / name} --force", session, screen)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "what was there")]


def test_a_saved_conversation_goes_on_where_it_was(session: ChatSession, screen: Console, tmp_path: Path) -> None:
    session.conversation.system = "Be brief."
    session.ask(Question("né"))
    run_command(f"/save {tmp_path / 'talk.json'}", session, screen)
    said = session.conversation.messages
    run_command("/clear", session, screen)
    run_command("/system none", session, screen)
    run_command(f"/load {tmp_path / 'talk.json'}", session, screen)
    assert (session.conversation.messages, session.conversation.system) == (said, "Be brief.")


def test_variables_of_another_model_do_not_fail_every_turn(
    session: ChatSession, screen: Console, tmp_path: Path
) -> None:
    told: list[str] = []
    session.note = told.append
    session.conversation.template_vars = {"enable_thinking": False, "reasoning_effort": "low"}
    run_command(f"/save {tmp_path / 'talk.json'}", session, screen)
    session.engine.info = replace(session.engine.info, template_vars=("reasoning_effort",))
    run_command(f"/load {tmp_path / 'talk.json'}", session, screen)
    assert session.conversation.template_vars == {"reasoning_effort": "low"}
    assert told == ["the chat template of fake does not read enable_thinking: not set any more"]


def test_a_loaded_chat_is_kept_in_a_file_of_its_own(session: ChatSession, screen: Console) -> None:
    session.saver = ChatSaver()
    session.ask(Question("one"))
    first = session.saver.path
    assert first is not None
    with pytest.raises(InvalidRequest, match=f"/save needs a file name; the chat is saved in {re.escape(str(first))}"):
        run_command("/save", session, screen)
    run_command("/clear", session, screen)
    session.ask(Question("two"))
    run_command(f"/load {first.stem}", session, screen)
    session.ask(Question("three"))
    run_command("/undo", session, screen)
    files = {path.stem[11:]: len(SavedConversation.read(path).messages) for path in first.parent.iterdir()}
    assert files == {"one": 2, "two": 2, "one-2": 2}
    with pytest.raises(InvalidRequest, match="/load needs a file, or the name"):
        run_command("/load", session, screen)
    with pytest.raises(InvalidRequest, match=r"no chat 'llama3' is saved.*\(a model: /model llama3\)"):
        run_command("/load llama3", session, screen)


def test_a_file_goes_with_the_next_message_or_with_its_question(
    session: ChatSession, screen: Console, tmp_path: Path
) -> None:
    path, blank = tmp_path / "notes.txt", tmp_path / "my notes.py"
    path.write_text("alpha\nbeta\n")
    blank.write_text("pass\n")
    assert run_command(f"/file {blank}", session, screen) is None
    assert [each.path for each in session.attached_files] == [blank]
    with pytest.raises(InvalidRequest, match=r"files that wait for the next message: .*my notes.py"):
        run_command("/file", session, screen)
    asked = run_command(f"/file {path} What is it?", session, screen)
    text = f"{blank}:\n```py\npass\n```\n\n{path}:\n```txt\nalpha\nbeta\n```\n\nWhat is it?"
    assert asked == Question(text, typed_text=f"@{path} What is it?", attached_files=(AttachedFile(blank, "pass\n"),))
    assert session.attached_files == [] and f"+ {path}: 2 lines, 11 B, 11 tokens" in printed(screen)
    quoted = run_command(f'/file "{blank}" And this?', session, screen)
    assert isinstance(quoted, Question) and quoted.typed_text == f'@"{blank}" And this?'


def test_a_file_that_never_fits_is_refused_with_its_numbers(
    session: ChatSession, screen: Console, tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text("x" * 9000)
    with pytest.raises(InvalidRequest, match=r"long.txt has 9,000 tokens, more than the context of 8,192 tokens"):
        run_command(f"/file {tmp_path / 'long.txt'}", session, screen)
    assert session.attached_files == []


def test_kept_chats_are_listed_with_the_one_that_goes_on(session: ChatSession, screen: Console) -> None:
    run_command("/chats", session, screen)
    assert printed(screen).splitlines() == ["  no chats are saved yet"]
    session.saver = ChatSaver()
    session.ask(Question("monads"))
    for number in range(25):
        (chats_folder() / f"2026-01-01-{number:02}.json").touch()
    run_command("/chats monads", session, screen)
    run_command("/chats", session, screen)
    run_command("/chats YOU said", session, screen)
    said = printed(screen).splitlines()
    assert said[1].startswith(" * ") and said[1].endswith("-monads")
    assert "  and 6 older: /chats WORD finds them" in said
    assert said[-2].endswith("-monads"), "by words of its answer"
    assert find_chat("said") == session.saver.path
    with pytest.raises(InvalidRequest, match=r"saved: .*give its name or its beginning"):
        matching_chats("said", by_words=False)
    with pytest.raises(
        InvalidRequest, match="/load needs a file, or the name of a saved chat: the newest are 2026-01-01-"
    ):
        run_command("/load", session, screen)
