"""Saved chats: a file for each in the user's state folder, named by its day and its first words."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from cortexmlx.cli.chats.lock import ChatLock, remove_dead_locks
from cortexmlx.cli.program import NAME, fit_commands
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import in_a_line
from cortexmlx.disk.folder import default_folder
from cortexmlx.errors import ConversationFileError, InvalidRequest
from cortexmlx.system.files import home_folder, remove_unfinished, state_folder

if TYPE_CHECKING:
    from cortexmlx.sessions.conversation import Conversation

LAST = "last"
"""The name of the chat that was saved most recently."""

_WORDS = 40
"""Characters of the first words in a name, at most."""

_SHOWN = 5

_DEAD_SECONDS = 86_400.0
"""Age at which an unfinished file belongs to a dead process. Writing a chat takes only a moment."""


def chats_folder() -> Path:
    """Return the folder of saved chats, with a file for each."""
    return state_folder() / "chats"


def tidy() -> None:
    """Remove what killed chats left: their locks, and unfinished files."""
    remove_dead_locks(state_folder())
    with suppress(OSError):  # the folder may be another user's
        remove_unfinished(chats_folder(), _DEAD_SECONDS)


def resume_command(path: Path) -> str:
    """Return the command that continues the chat in a file, quoted for a shell."""
    name = path.stem if path.parent == chats_folder() else str(path.absolute())
    return fit_commands(shlex.join([NAME, "chat", "--resume", name]))


def find(name: str) -> Path:
    """Return the saved chat with this name, or with a name that begins so, or the last chat, or a file. Raises
    InvalidRequest.
    """
    if (kept := _named(name)) is not None:
        return kept
    if (path := Path(os.path.expanduser(name))).is_file():
        return path
    if name and path.exists():
        raise InvalidRequest(f"{path} is {'a folder' if path.is_dir() else 'no file'}, and a chat is kept in a file")
    return find_kept(name)


def find_kept(name: str) -> Path:
    """Return a saved chat as `find` does, but never a file elsewhere. Raises InvalidRequest."""
    if (path := _named(name)) is not None:
        return path
    fits = [path.stem for path in kept_paths() if name and path.stem.startswith(name)]
    if fits:
        newest = ", ".join(map(in_a_line, fits[:_SHOWN]))
        more = f" and {len(fits) - _SHOWN} more" if len(fits) > _SHOWN else ""
        raise InvalidRequest(f"no chat {name!r} is kept: the newest are {newest}{more}; all of them begin so, name one")
    raise InvalidRequest(f"no chat {name!r} is kept: {newest_names()}")


def newest_names() -> str:
    """Return the names of the newest chats, as a part of a sentence."""
    names = kept_names()
    return f"the newest are {', '.join(map(in_a_line, names[:_SHOWN]))}" if names else "there are none yet"


def _named(name: str) -> Path | None:
    """Return the one saved chat for a name, the beginning of a name, or `last`."""
    kept = kept_paths()
    if name == LAST and kept:
        return kept[0]
    for fits in ([p for p in kept if p.stem == name], [p for p in kept if name and p.stem.startswith(name)]):
        if len(fits) == 1:
            return fits[0]
    return None


def kept_paths() -> list[Path]:
    """Return the files of saved chats, the newest first."""
    written = {path: _written(path) for path in chats_folder().glob("*.json") if not path.is_dir()}
    return sorted((path for path in written if written[path]), key=lambda path: written[path], reverse=True)


def kept_names() -> list[str]:
    """Return the names of saved chats, the newest first."""
    return [path.stem for path in kept_paths()]


def name_for(question: str, day: date) -> str:
    """Return a name such as `2026-11-22-what-is-a-monad`."""
    words = "".join(c.lower() if c.isalnum() else " " for c in question[: 4 * _WORDS]).split()
    name = ""
    for word in words:
        if name and len(name) + len(word) >= _WORDS:
            break
        name += f"-{word[:_WORDS]}"
    return f"{day.isoformat()}{name or '-chat'}"


@dataclass
class ChatSaver:
    """Writes a chat to its file after every turn. `path` is None until there is something to save.

    It holds the lock of its file until `close`. If another chat holds it, or has written there meanwhile, this chat
    continues in a file of its own.
    """

    path: Path | None = None
    _warned: bool = field(default=False, init=False)
    _known: tuple[int, ...] = field(default=(), init=False)
    _writing: bool = field(default=False, init=False)
    _lock: ChatLock | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.path is not None:
            self._lock = ChatLock.take(self.path, state_folder())
            self._known = _written(self.path)

    @property
    def kept(self) -> Path | None:
        """The file with the chat; None if there is none, or if its last turns could not be written."""
        return None if self._warned else self.path

    def keep(self, conversation: Conversation, typed: Mapping[str, str] | None = None) -> None:
        """Save the chat as it is now, in another file if another chat has written to its own. A failure is reported
        once, and the chat continues. A new chat is named by its first question, or by what was `typed` if the question
        has files in it.
        """
        if self.path is None and not conversation.messages:
            return
        if self._writing:  # a signal ends the program during a write: the file is this chat's
            return self._write(conversation)
        try:
            self._take_place(conversation, typed or {})
        except OSError as error:  # the folder may be another user's
            return self._warn(f"{chats_folder()} cannot be used: {error.strerror or error}")
        self._writing = True
        try:
            self._write(conversation)
        finally:
            self._writing = False

    def close(self) -> None:
        """Release the lock, because the chat has ended."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def begin_anew(self) -> None:
        """Save what follows as another chat, in a file of its own."""
        self.close()
        self.path, self._warned = None, False

    def _take_place(self, conversation: Conversation, typed: Mapping[str, str]) -> None:
        """Choose a file if there is none yet, or if another chat has its own by now. Raises OSError."""
        if self.path is None:
            self.path, self._lock = _take_free(_first_path(conversation, typed))
        elif why := self._not_ours(self.path):
            path, lock = _take_free(self.path)
            self.close()
            self.path, self._lock = path, lock
            console.note(f"{why}: this one is kept as {path.stem}")

    def _warn(self, why: str) -> None:
        """Say once that the chat is not saved."""
        if not self._warned:
            console.error(f"{why}; the chat is not kept (--no-save says so)")
        self._warned = True

    def _write(self, conversation: Conversation) -> None:
        assert self.path is not None
        try:
            conversation.save(self.path)
            _make_newest(self.path)
            self._known = _written(self.path)
            self._warned = False
        except ConversationFileError as error:
            self._warn(str(error))

    def _not_ours(self, path: Path) -> str:
        """Return why the chat cannot continue in its file; empty if it can."""
        if self._lock is None:
            self._lock = ChatLock.take(path, state_folder())
        if self._lock is None:
            return f"{path.stem} is open in another chat"
        written = _written(path)
        if written not in ((), self._known):
            return f"another chat has gone on in {path.stem}"
        return f"{path.stem} may not be written to" if written and not path.stat().st_mode & stat.S_IWUSR else ""


def _first_path(conversation: Conversation, typed: Mapping[str, str]) -> Path:
    """Return the file of a new chat, if no other chat has that name."""
    first = next((m.get("content") for m in conversation.messages if m["role"] == "user"), "")
    words = first if isinstance(first, str) else ""
    return chats_folder() / f"{name_for(typed.get(words, words), date.today())}.json"


def _take_free(path: Path) -> tuple[Path, ChatLock]:
    """Lock and return this file, or the first one with a number after its name that does not exist and that no chat is
    about to write.
    """
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    for each in chain([path], numbered):
        lock = ChatLock.take(each, state_folder())
        if lock is not None and not each.exists():
            return each, lock
        if lock is not None:
            lock.release()
    raise AssertionError("there is always a next number")


def _make_newest(path: Path) -> None:
    """Make the chat that was saved last the newest, even if the clock was put back after others were saved."""
    latest = max((written[0] for other in kept_paths() if other != path and (written := _written(other))), default=0)
    if path.stat().st_mtime_ns <= latest:
        with suppress(OSError):
            os.utime(path, ns=(latest + 1_000_000, latest + 1_000_000))


def whereabouts(keeper: ChatSaver | None, store: Path | str | None) -> str:
    """Return which parts of a chat stay on disk, and where: the chat with the typed lines, and its keys and values."""
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


def _written(path: Path) -> tuple[int, ...]:
    """Return when a file was written, and which file it is; empty if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size
