"""Chats that are kept: a file for each in the user's state folder, named by its day and its first words."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal import console
from cortexmlx.errors import ConversationFileError, InvalidRequest
from cortexmlx.host.folders import home_folder
from cortexmlx.store.folder import default_folder

if TYPE_CHECKING:
    from cortexmlx.sessions.conversation import Conversation

LAST = "last"
"""Names the chat that was kept most recently."""

_WORDS = 40
"""Characters of the first words that a name has at most."""

_SHOWN = 5
_PATIENCE_SECONDS = 1.0


def state_folder() -> Path:
    """What programs keep between runs, by the XDG convention."""
    state = os.environ.get("XDG_STATE_HOME") or home_folder() / ".local" / "state"
    return Path(state) / "cortexmlx"


def find(name: str) -> Path:
    """The kept chat of that name, of one that begins so, the last one, or a file. Raises InvalidRequest."""
    kept = _kept()
    if name == LAST and kept:
        return kept[0]
    for fits in ([p for p in kept if p.stem == name], [p for p in kept if p.stem.startswith(name)]):
        if len(fits) == 1:
            return fits[0]
    if (path := Path(os.path.expanduser(name))).is_file():
        return path
    if name and path.exists():
        raise InvalidRequest(f"{path} is {'a folder' if path.is_dir() else 'no file'}, and a chat is kept in a file")
    names = ", ".join(path.stem for path in kept[:_SHOWN])
    raise InvalidRequest(f"no chat {name!r} is kept: " + (f"the newest are {names}" if kept else "there are none yet"))


def _kept() -> list[Path]:
    """The newest first."""
    written = {path: _written(path) for path in (state_folder() / "chats").glob("*.json")}
    return sorted((path for path in written if written[path]), key=lambda path: written[path], reverse=True)


def kept_names() -> list[str]:
    """Names of the chats that are kept, the newest first."""
    return [path.stem for path in _kept()]


def name_for(question: str, day: date) -> str:
    """`2026-11-22-what-is-a-monad`."""
    words = "".join(c.lower() if c.isalnum() else " " for c in question[: 4 * _WORDS]).split()
    name = ""
    for word in words:
        if name and len(name) + len(word) >= _WORDS:
            break
        name += f"-{word[:_WORDS]}"
    return f"{day.isoformat()}{name or '-chat'}"


@dataclass
class Keeper:
    """Writes a chat to its file after every turn. `path` is None until there is something to keep. Where another chat
    has written there meanwhile, which was resumed in another terminal, this one goes on in a file of its own.
    """

    path: Path | None = None
    _warned: bool = field(default=False, init=False)
    _known: tuple[int, ...] = field(default=(), init=False)
    _at_it: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._known = () if self.path is None else _written(self.path)

    def keep(self, conversation: Conversation, typed: Mapping[str, str] | None = None) -> None:
        """Save the chat as it is now, in another file if its own has turns of somebody else's by now. A failure is
        said once: the chat goes on. A new chat is named by its first question, as it was `typed` if it has files in it.
        """
        if self.path is None and not conversation.messages:
            return
        if self._at_it:  # a signal that ends the program came in between: the lock, and what is in the file, are ours
            return self._write(conversation, typed)
        with _alone():
            if self.path is not None and (why := self._not_ours(self.path)):
                self.path = _free(self.path)
                console.note(f"{why}: this one is kept as {self.path.stem}")
            self._at_it = True
            try:
                self._write(conversation, typed)
            finally:
                self._at_it = False

    def _write(self, conversation: Conversation, typed: Mapping[str, str] | None) -> None:
        if self.path is None:
            first = next((m.get("content") for m in conversation.messages if m["role"] == "user"), "")
            words = first if isinstance(first, str) else ""
            name = name_for((typed or {}).get(words, words), date.today())
            self.path = _free(state_folder() / "chats" / f"{name}.json")
        try:
            conversation.save(self.path)
            _make_newest(self.path)
            self._known = _written(self.path)
            self._warned = False
        except ConversationFileError as error:
            if not self._warned:
                console.error(f"{error}; the chat is not kept (--no-save says so)")
            self._warned = True

    def _not_ours(self, path: Path) -> str:
        """Why the chat cannot go on in its file; empty if it can."""
        written = _written(path)
        if written not in ((), self._known):
            return f"another chat has gone on in {path.stem}"
        return f"{path.stem} may not be written to" if written and not path.stat().st_mode & stat.S_IWUSR else ""

    def begin_anew(self) -> None:
        """What comes is another chat, in a file of its own."""
        self.path = None


def _make_newest(path: Path) -> None:
    """The chat that was kept last is the last, also if the clock was put back since others were."""
    latest = max((written[0] for other in _kept() if other != path and (written := _written(other))), default=0)
    if path.stat().st_mtime_ns <= latest:
        with suppress(OSError):
            os.utime(path, ns=(latest + 1_000_000, latest + 1_000_000))


@contextmanager
def _alone() -> Iterator[None]:
    """No two chats choose and write their files at the same time, which could be the same. Where nothing can be locked,
    or somebody does not let go, that is as it is: a chat does not wait for another.
    """
    until = time.monotonic() + _PATIENCE_SECONDS
    with ExitStack() as opened:
        with suppress(OSError):
            state_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(state_folder() / "chats.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, lock)
            while time.monotonic() < until:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.005)
        yield


def whereabouts(keeper: Keeper | None, store: Path | str | None) -> str:
    """What of a chat stays on disk, and where: the chat with the lines that are typed, and its keys and values."""
    parts = [] if keeper is None else [f"the chat in {_short(keeper.path or state_folder())}"]
    if store is not None:
        parts.append(f"keys and values in {_short(Path(store))}")
    if not parts:
        return "nothing of this chat stays on disk"
    without = "nothing" if store is None or Path(store) == default_folder() else "no chat"
    return f"on disk: {', '.join(parts)}" + ("" if keeper is None else f"; --no-save: {without}")


def _short(path: Path) -> str:
    home = home_folder()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _free(path: Path) -> Path:
    """This file, or the first with a number behind its name, that is not there."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(each for each in chain([path], numbered) if not each.exists())


def _written(path: Path) -> tuple[int, ...]:
    """When a file was written, and which it is; empty if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size
