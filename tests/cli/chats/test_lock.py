"""The lock of a kept chat: one holder at a time, in this process or another, until it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from threading import Thread

from cortexmlx.cli.chats.lock import ChatLock


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
    lock = ChatLock.take(tmp_path / "a.json", tmp_path)
    assert lock is not None
    lock.release()


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
