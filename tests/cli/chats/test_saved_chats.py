"""Chats that are kept: their names, how they are found again, and what happens when they cannot be written."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from threading import Event, Thread

import pytest
from rich.console import Console

from cortexmlx.cli.chat.input import completions
from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chat.slash.commands import BY_NAME
from cortexmlx.cli.chats import saved_chats
from cortexmlx.cli.chats.lock import ChatLock
from cortexmlx.cli.chats.saved_chats import (
    LAST,
    ChatSaver,
    chats_folder,
    describe_storage,
    find_chat,
    make_name,
    remove_leftovers,
    resume_command,
)
from cortexmlx.errors import ConversationFileError, InvalidRequest
from cortexmlx.sessions.conversation import Conversation
from cortexmlx.system.files import state_folder
from support.cli.chat_commands import printed, run_command

DAY = date(2026, 11, 22)


def begun(session: ChatSession) -> Path:
    """The file of a chat in which one thing was said, and which is kept."""
    session.saver = ChatSaver()
    session.ask(Question("one"))
    assert session.saver.path is not None
    return session.saver.path


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("What is a monad?", "2026-11-22-what-is-a-monad"),
        ("../../etc/passwd\0 & rm -rf ~", "2026-11-22-etc-passwd-rm-rf"),
        ("Größe 東京", "2026-11-22-größe-東京"),
        ("!?", "2026-11-22-chat"),
        ("x" * 500, "2026-11-22-" + "x" * 40),
        ("word " * 50, "2026-11-22-word-word-word-word-word-word-word-word"),
    ],
)
def test_a_name_is_the_day_and_the_first_words(question: str, name: str) -> None:
    assert make_name(question, DAY) == name and len(name.encode()) < 200


def test_a_chat_is_kept_after_every_turn_and_two_alike_have_two_files(session: ChatSession) -> None:
    session.saver = ChatSaver()
    session.save()
    assert not state_folder().exists(), "nothing was said yet"
    session.ask(Question("one"))
    path = session.saver.path
    assert path is not None and path.name == f"{date.today().isoformat()}-one.json"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    session.ask(Question("two"))
    again = session.engine.conversation()
    again.load(find_chat(LAST))
    assert again.messages == session.conversation.messages and len(again.messages) == 4
    session.conversation.clear()
    session.save_in_new_file()
    session.ask(Question("one"))
    assert session.saver.path is not None and session.saver.path.stem == f"{path.stem}-2"


def test_a_chat_that_begins_with_a_file_is_named_by_what_was_typed(session: ChatSession) -> None:
    session.saver = ChatSaver()
    session.ask(Question("a.txt:\n```\nx\n```\n\n@a.txt what?", typed_text="@a.txt what?"))
    assert session.saver.path is not None and session.saver.path.stem[11:] == "a-txt-what"


def test_a_kept_chat_is_found_by_its_name_its_beginning_its_file_or_as_the_last(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat 'last' is saved: there are none yet"):
        find_chat(LAST)
    folder = state_folder() / "chats"
    folder.mkdir(parents=True)
    for age, name in enumerate(("2026-11-03-c", "2026-11-02-b", "2026-11-02-bc")):
        (folder / f"{name}.json").touch()
        os.utime(folder / f"{name}.json", (1e9 - age, 1e9 - age))
    (tmp_path / "mine.json").touch()
    found = {
        given: find_chat(given).stem for given in (LAST, "2026-11-03", "2026-11-02-b", str(tmp_path / "mine.json"))
    }
    assert list(found.values()) == ["2026-11-03-c", "2026-11-03-c", "2026-11-02-b", "mine"]
    assert find_chat("03").stem == "2026-11-03-c" and find_chat("BC 11").stem == "2026-11-02-bc"
    with pytest.raises(InvalidRequest, match="no chat 'x' is saved: the newest are 2026-11-03-c, 2026-11-02-b, "):
        find_chat("x")
    for unclear, found in (
        ("2026", "3 chats, name one: 2026-11-03-c, 2026"),
        ("b", "2 chats, name one: 2026-11-02-b, "),
    ):
        with pytest.raises(InvalidRequest, match=f"'{unclear}' is in {found}"):
            find_chat(unclear)


def test_what_cannot_be_written_is_said_once(session: ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    state_folder().parent.mkdir(exist_ok=True)
    state_folder().write_text("a file in the way")
    session.saver = ChatSaver()
    session.ask(Question("one"))
    session.ask(Question("two"))
    assert capsys.readouterr().err.count("the chat is not saved, but goes on") == 1
    assert len(session.conversation.messages) == 4


def test_two_chats_that_were_resumed_from_one_file_lose_no_turn(
    session: ChatSession, capsys: pytest.CaptureFixture[str]
) -> None:
    """In two terminals: the second to say something goes on in a file of its own, and stays there."""
    path = begun(session)
    others = session.engine.conversation()
    others.load(path)
    other = replace(session, conversation=others, saver=ChatSaver(path))
    session.ask(Question("two"))
    for text in ("three", "four"):
        other.ask(Question(text))
    session.ask(Question("five"))
    said = {}
    for file in path.parent.iterdir():
        others.load(file)
        said[file.stem] = [m["content"] for m in others.messages if m["role"] == "user"]
    assert said == {path.stem: ["one", "two", "five"], f"{path.stem}-2": ["one", "three", "four"]}
    assert capsys.readouterr().err.count(f"{path.stem} is open in another chat: this one is saved as") == 1
    path.unlink()
    session.ask(Question("six"))
    assert path.exists(), "who removes a chat while it goes on gets it again"


def test_chats_that_are_kept_at_the_same_moment_have_a_file_each(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """New ones with the same first question, and then all of them resumed from one file."""
    talks = [session.engine.conversation(messages=[{"role": "user", "content": "one"}]) for _ in range(6)]
    save = type(talks[0]).save

    def slowly(self: Conversation, path: Path) -> None:
        time.sleep(0.01)
        save(self, path)

    monkeypatch.setattr(type(talks[0]), "save", slowly)

    def at_once(keepers: list[ChatSaver]) -> None:
        threads = [Thread(target=k.save, args=(t,)) for k, t in zip(keepers, talks, strict=True)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    at_once(new := [ChatSaver() for _ in talks])
    assert len({keeper.path for keeper in new}) == 6 == len(list((state_folder() / "chats").iterdir()))
    at_once(resumed := [ChatSaver(new[0].path) for _ in talks])
    assert len({keeper.path for keeper in resumed}) == 6 and resumed[0].path is not None
    for path in {keeper.path for keeper in (*new, *resumed)}:
        assert path is not None and path.exists(), "every one of them is written"
    assert capsys.readouterr().err.count("is open in another chat: this one is saved as") == 6


def test_a_disk_that_takes_for_ever_lets_no_two_chats_write_one_file(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chat is in the middle of its file until the second has been kept: nobody's patience ends."""
    first, second = (session.engine.conversation(messages=[{"role": "user", "content": "one"}]) for _ in range(2))
    begun, finished, usual = Event(), Event(), Conversation.save

    def save(self: Conversation, path: Path) -> None:
        if self is first:
            begun.set()
            finished.wait()
        usual(self, path)

    monkeypatch.setattr(Conversation, "save", save)
    slow, other = ChatSaver(), ChatSaver()
    thread = Thread(target=slow.save, args=(first,))
    thread.start()
    begun.wait()
    other.save(second)
    finished.set()
    thread.join()
    assert other.path is not None and slow.path is not None and other.path.stem == f"{slow.path.stem}-2"
    assert slow.path.exists() and other.path.exists()


def test_a_chat_that_has_ended_leaves_its_file_to_the_next(session: ChatSession) -> None:
    path = begun(session)
    assert session.saver is not None
    session.saver.close()
    assert not [*(state_folder() / "locks").iterdir()]
    session.saver = ChatSaver(path)
    session.ask(Question("two"))
    assert session.saver.path == path


def test_where_nothing_can_be_locked_chats_are_kept(session: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert begun(session).exists()


def test_a_chat_that_is_ended_while_it_is_kept_has_one_file_and_is_not_waited_for(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The handler of a signal keeps what there is, between any two statements of the same."""

    def save(conversation: Conversation, path: Path) -> None:
        usual(conversation, path)
        if not ended:
            ended.append(True)
            session.save()

    session.saver = ChatSaver()
    session.ask(Question("one"))
    usual, ended = Conversation.save, list[bool]()
    monkeypatch.setattr(Conversation, "save", save)
    session.ask(Question("two"))
    assert [path.stem[11:] for path in saved_chats.saved_paths()] == ["one"] and not capsys.readouterr().err


def test_a_file_that_may_not_be_written_to_stays_as_it_is(
    session: ChatSession, capsys: pytest.CaptureFixture[str]
) -> None:
    path = begun(session)
    path.chmod(0o400)
    before = path.read_bytes()
    session.ask(Question("two"))
    session.ask(Question("three"))
    assert path.read_bytes() == before
    assert session.saver.path is not None and session.saver.path.stem == f"{path.stem}-2"
    assert capsys.readouterr().err.count(f"{path.stem} may not be written to: this one is saved as {path.stem}-2") == 1


def test_the_last_chat_is_the_last_after_the_clock_was_put_back(session: ChatSession) -> None:
    folder = state_folder() / "chats"
    folder.mkdir(parents=True)
    (folder / "tomorrow.json").touch()
    os.utime(folder / "tomorrow.json", (time.time() + 86400, time.time() + 86400))
    session.saver = ChatSaver()
    for text in ("one", "two"):
        session.ask(Question(text))
        assert find_chat(LAST) == session.saver.path
    assert len([*folder.iterdir()]) == 2


def test_a_folder_or_a_pipe_is_no_chat(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path, "a folder"), (tmp_path / "pipe", "no file")):
        with pytest.raises(InvalidRequest, match=f"{path} is {what}, and a chat is saved in a file"):
            find_chat(str(path))


def test_what_is_no_file_any_more_is_no_chat() -> None:
    folder = state_folder() / "chats"
    folder.mkdir(parents=True)
    (folder / "gone.json").symlink_to("/nowhere/at/all")
    (folder / "there.json").touch()
    assert find_chat(LAST).stem == "there"
    with pytest.raises(InvalidRequest, match="no chat '~nobody-of-that-name/x' is saved: the newest are there"):
        find_chat("~nobody-of-that-name/x")


def test_a_chat_whose_messages_have_no_text_is_kept(session: ChatSession) -> None:
    talk = session.engine.conversation(messages=[{"role": "user"}])
    keeper = ChatSaver()
    keeper.save(talk)
    assert keeper.path is not None and keeper.path.stem.endswith("-chat")


def test_it_is_said_what_stays_on_disk_and_how_nothing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path.home()
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("CORTEXMLX_KV_STORE", str(home / "kv"))
    chat, kv = "the chat in ~/state/cortexmlx", "keys and values in"
    assert describe_storage(ChatSaver(), home / "kv") == f"on disk: {chat}, {kv} ~/kv; --no-save: nothing"
    assert describe_storage(ChatSaver(), "/kv") == f"on disk: {chat}, {kv} /kv; --no-save: no chat"
    assert describe_storage(ChatSaver(), None) == f"on disk: {chat}; --no-save: nothing"
    assert describe_storage(ChatSaver(Path("/a.json")), None) == "on disk: the chat in /a.json; --no-save: nothing"
    assert describe_storage(None, "/kv") == f"on disk: {kv} /kv"
    assert describe_storage(None, None) == "nothing of this chat stays on disk"


def test_what_killed_chats_left_goes_when_the_next_begins() -> None:
    folder = state_folder() / "chats"
    folder.mkdir(parents=True)
    old, new, theirs = folder / f".{'0' * 16}.unfinished", folder / f".{'1' * 16}.unfinished", folder / ".a.unfinished"
    for each in (old, new, theirs):
        each.touch()
    os.utime(old, (1e9, 1e9))
    os.utime(theirs, (1e9, 1e9))
    lock = ChatLock.acquire(folder / "a.json", state_folder())
    assert lock is not None
    lock._close_file()
    remove_leftovers()
    assert not old.exists() and new.exists() and theirs.exists()
    assert not [*(state_folder() / "locks").iterdir()]


@pytest.mark.parametrize(
    ("name", "said"), [("2026-11-22-one", "2026-11-22-one"), ("my chat", "'my chat'"), ("a$(b)", "'a$(b)'")]
)
def test_how_to_resume_a_chat_can_be_typed_in_a_shell(name: str, said: str, tmp_path: Path) -> None:
    assert resume_command(chats_folder() / f"{name}.json") == f"cortexmlx chat --resume {said}"
    elsewhere = tmp_path / f"{name}.json"
    elsewhere.touch()
    *_, named = shlex.split(resume_command(elsewhere))
    assert find_chat(named) == elsewhere


def test_a_chat_that_could_not_be_written_is_not_said_to_be_kept(
    session: ChatSession, screen: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = begun(session)
    assert session.saver is not None and session.saver.saved_path == path

    def full(self: Conversation, path: Path) -> None:
        raise ConversationFileError(f"{path} cannot be written: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Conversation, "save", full)
        session.ask(Question("two"))
        assert session.saver.saved_path is None
        run_command("/clear", session, screen)
        assert "saved" not in printed(screen)
        session.ask(Question("three"))
        assert session.saver.saved_path is None
    session.ask(Question("four"))
    assert session.saver.saved_path == session.saver.path != path


def test_a_folder_that_cannot_be_looked_into_ends_no_chat(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that another user made. For root, a name that is too long has the same effect."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("x" * 300)))
    remove_leftovers()
    session.saver = ChatSaver()
    session.ask(Question("one"))
    session.ask(Question("two"))
    assert capsys.readouterr().err.count("the chat is not saved") == 1
    assert session.saver.saved_path is None and len(session.conversation.messages) == 4
    assert [*completions("/load ", BY_NAME)] == []
