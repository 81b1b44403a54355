"""The lock of a kept chat: one holder at a time, in this process or another, until it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from threading import Event, Thread

from cortexmlx.cli.chats.lock import ChatLock, remove_dead_locks


def test_one_chat_holds_it_until_it_releases_it(tmp_path: Path) -> None:
    chat = tmp_path / "a.json"
    lock = ChatLock.take(chat, tmp_path)
    assert lock is not None and ChatLock.take(chat, tmp_path) is None
    (tmp_path / "link.json").symlink_to(chat)
    assert ChatLock.take(tmp_path / "link.json", tmp_path) is None, "a link is another name of the same chat"
    other = ChatLock.take(tmp_path / "b.json", tmp_path)
    assert other is not None
    for each in (other, lock, lock):
        each.release()
    assert not [*(tmp_path / "locks").iterdir()]
    again = ChatLock.take(chat, tmp_path)
    assert again is not None
    again.release()


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    holder = (
        "import sys; from pathlib import Path; from cortexmlx.cli.chats.lock import ChatLock\n"
        "lock = ChatLock.take(Path(sys.argv[1]), Path(sys.argv[2])); print(lock is not None, flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(tmp_path / "a.json"), str(tmp_path)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        assert ChatLock.take(tmp_path / "a.json", tmp_path) is None
        process.kill()
        process.wait()
    other = ChatLock.take(tmp_path / "b.json", tmp_path)
    assert len([*(tmp_path / "locks").iterdir()]) == 2
    remove_dead_locks(tmp_path)
    assert len([*(tmp_path / "locks").iterdir()]) == 1, "that of the chat which goes on"
    lock = ChatLock.take(tmp_path / "a.json", tmp_path)
    assert lock is not None and other is not None and ChatLock.take(tmp_path / "b.json", tmp_path) is None
    lock.release()
    other.release()


def test_nobody_takes_a_lock_for_held_while_dead_ones_are_removed(tmp_path: Path) -> None:
    locks, ended, refused = tmp_path / "locks", Event(), list[int]()
    locks.mkdir()

    def remove() -> None:
        while not ended.is_set():
            remove_dead_locks(tmp_path)

    threads = [Thread(target=remove) for _ in range(2)]
    for each in threads:
        each.start()
    for number in range(300):
        lock = ChatLock.take(tmp_path / "a.json", tmp_path)
        if lock is None:
            refused.append(number)
        elif number % 2:
            lock.release()
        else:  # as a process that is killed
            lock._drop()
    ended.set()
    for each in threads:
        each.join()
    assert not refused


def test_where_there_are_no_locks_none_are_removed(tmp_path: Path) -> None:
    remove_dead_locks(tmp_path)
    (tmp_path / "locks").write_text("a file in the way")
    remove_dead_locks(tmp_path)


def test_never_two_hold_it_while_many_take_and_release_it(tmp_path: Path) -> None:
    """A holder removes the lock's file: one that opened it just before must not believe that it has the lock."""
    holders, most, rounds = list[int](), list[int](), 200

    def work(number: int) -> None:
        for _ in range(rounds):
            if (lock := ChatLock.take(tmp_path / "a.json", tmp_path)) is not None:
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
    assert ChatLock.take(tmp_path / "a.json", tmp_path) is not None
    assert ChatLock.take(tmp_path / "a.json", tmp_path) is not None
