"""The lock of a saved chat: one holder at a time, in this process or another, until it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from threading import Thread

import pytest

from cortexmlx.cli.chats.lock import ChatLock, remove_stale_locks


def test_one_chat_holds_it_until_it_releases_it(tmp_path: Path) -> None:
    chat = tmp_path / "a.json"
    lock = ChatLock.acquire(chat, tmp_path)
    assert lock is not None and ChatLock.acquire(chat, tmp_path) is None
    (tmp_path / "link.json").symlink_to(chat)
    assert ChatLock.acquire(tmp_path / "link.json", tmp_path) is None, "a link is another name of the same chat"
    other = ChatLock.acquire(tmp_path / "b.json", tmp_path)
    assert other is not None
    for each in (other, lock, lock):
        each.release()
    assert not [*(tmp_path / "locks").iterdir()]
    again = ChatLock.acquire(chat, tmp_path)
    assert again is not None
    again.release()


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    holder = (
        "import sys; from pathlib import Path; from cortexmlx.cli.chats.lock import ChatLock\n"
        "lock = ChatLock.acquire(Path(sys.argv[1]), Path(sys.argv[2])); print(lock is not None, flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(tmp_path / "a.json"), str(tmp_path)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        assert ChatLock.acquire(tmp_path / "a.json", tmp_path) is None
        process.kill()
        process.wait()
    other = ChatLock.acquire(tmp_path / "b.json", tmp_path)
    assert len([*(tmp_path / "locks").iterdir()]) == 2
    remove_stale_locks(tmp_path)
    assert len([*(tmp_path / "locks").iterdir()]) == 1, "that of the chat which goes on"
    lock = ChatLock.acquire(tmp_path / "a.json", tmp_path)
    assert lock is not None and other is not None and ChatLock.acquire(tmp_path / "b.json", tmp_path) is None
    lock.release()
    other.release()


def test_nobody_takes_a_lock_for_held_while_dead_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another chat wants the lock while the file of it is locked, to be removed."""
    chat, unlink, taken = tmp_path / "a.json", Path.unlink, list[ChatLock | None]()
    dead = ChatLock.acquire(chat, tmp_path)
    assert dead is not None
    dead._close_file()
    other = Thread(target=lambda: taken.append(ChatLock.acquire(chat, tmp_path)))

    def meanwhile(path: Path, missing_ok: bool = False) -> None:
        other.start()
        other.join(0.1)
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", meanwhile)
        remove_stale_locks(tmp_path)
    other.join()
    assert taken[0] is not None and ChatLock.acquire(chat, tmp_path) is None
    taken[0].release()


def test_where_there_are_no_locks_none_are_removed(tmp_path: Path) -> None:
    remove_stale_locks(tmp_path)
    (tmp_path / "locks").write_text("a file in the way")
    remove_stale_locks(tmp_path)


def test_never_two_hold_it_while_many_take_and_release_it(tmp_path: Path) -> None:
    """A holder removes the lock's file: one that opened it just before must not believe that it has the lock."""
    holders, most, rounds = list[int](), list[int](), 200

    def work(number: int) -> None:
        for _ in range(rounds):
            if (lock := ChatLock.acquire(tmp_path / "a.json", tmp_path)) is not None:
                holders.append(number)
                most.append(len(holders))
                holders.remove(number)
                lock.release()

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most and max(most) == 1


def test_where_nothing_can_be_made_everybody_has_it(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("a file in the way")
    assert ChatLock.acquire(tmp_path / "a.json", tmp_path) is not None
    assert ChatLock.acquire(tmp_path / "a.json", tmp_path) is not None
