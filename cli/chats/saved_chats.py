"""Saved chats: one file each in the user's state folder, named by its day and first words."""

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

from cortexmlx.cli.chats.lock import ChatLock, remove_stale_locks
from cortexmlx.cli.program import NAME, adapt_commands
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.disk.folder import default_folder
from cortexmlx.errors import ConversationFileError, InvalidRequest
from cortexmlx.sessions.saved import SavedConversation
from cortexmlx.system.files import home_folder, remove_unfinished, state_folder
from cortexmlx.types.messages import plain_message

if TYPE_CHECKING:
    from cortexmlx.sessions.conversation import Conversation

LAST = "last"
"""The name of the chat that was saved most recently."""

_WORDS = 40
"""Characters of the first words in a name, at most."""

_SHOWN = 5
_SEARCHED = 300
"""Chats whose texts are searched for words, at most: the newest."""

_LISTED = 20
"""Names of chats that a word could mean, at most."""

_STALE_SECONDS = 86_400.0
"""Age at which an unfinished file belongs to a dead process. Writing a chat takes only a moment."""


def chats_folder() -> Path:
    """Return the folder of saved chats, with a file for each."""
    return state_folder() / "chats"


def remove_leftovers() -> None:
    """Remove what killed chats left: their locks, and unfinished files."""
    remove_stale_locks(state_folder())
    with suppress(OSError):  # the folder may be another user's
        remove_unfinished(chats_folder(), _STALE_SECONDS)


def resume_command(path: Path) -> str:
    """Return the command that continues the chat in a file, quoted for a shell."""
    name = path.stem if path.parent == chats_folder() else str(path.absolute())
    return adapt_commands(shlex.join([NAME, "chat", "--resume", name]))


def find_chat(name: str) -> Path:
    """Find a saved chat by name, beginning of a name or `last`, any file by path, or a saved chat by words. Raises
    InvalidRequest.
    """
    if (saved_path := _match_name(name)) is not None:
        return saved_path
    if (path := Path(os.path.expanduser(name))).is_file():
        return path
    if name and path.exists():
        raise InvalidRequest(f"{path} is {'a folder' if path.is_dir() else 'no file'}, and a chat is saved in a file")
    return find_in_history(name)


def find_in_history(name: str, *, by_words: bool = True) -> Path:
    """Find a saved chat as `find_chat` does, but no file by path. Raises InvalidRequest, which names all candidates."""
    if len(paths := matching_chats(name, by_words=by_words)) == 1:
        return paths[0]
    names = ", ".join(to_single_line(path.stem) for path in paths[:_LISTED])
    more_note = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    raise InvalidRequest(f"{name!r} is in {len(paths)} chats, name one: {names}{more_note}")


def matching_chats(name: str, *, by_words: bool = True) -> list[Path]:
    """Return the saved chats that `name` could mean, the newest first: the only one with this name or beginning, else
    all with this beginning, else, if `by_words`, all with all of its words: in their names, else in their texts. Raises
    InvalidRequest if there are none.
    """
    if (path := _match_name(name)) is not None:
        return [path]
    paths, words = saved_paths(), name.lower().split()
    matches = [path for path in paths if name and path.stem.startswith(name)]
    if words and by_words:
        matches = matches or [path for path in paths if all(word in path.stem.lower() for word in words)]
        matches = matches or [path for path in paths[:_SEARCHED] if all(map(_whole_text(path).__contains__, words))]
    if not matches:
        advice = "" if by_words else ". To delete a chat, give its name or its beginning"
        raise InvalidRequest(f"no chat {name!r} is saved: {newest_names_phrase()}{advice}")
    return matches


def _whole_text(path: Path) -> str:
    """Return the name of a saved chat and all that was said, in small letters; of a damaged file, the name."""
    texts = [path.stem]
    with suppress(ConversationFileError):
        messages = [plain_message(message, lambda part: "") for message in SavedConversation.read(path).messages]
        texts += [str(message.get("content", "")) for message in messages]
    return "\n".join(texts).lower()


def newest_names_phrase() -> str:
    """Return the names of the newest chats, as a part of a sentence."""
    names = saved_names()
    return f"the newest are {', '.join(map(to_single_line, names[:_SHOWN]))}" if names else "there are none yet"


def _match_name(name: str) -> Path | None:
    """Return the saved chat with this name or beginning, or the newest for `last`; None if none or several match."""
    paths = saved_paths()
    if name == LAST and paths:
        return paths[0]
    for matches in ([p for p in paths if p.stem == name], [p for p in paths if name and p.stem.startswith(name)]):
        if len(matches) == 1:
            return matches[0]
    return None


def saved_paths() -> list[Path]:
    """Return the files of saved chats, the newest first."""
    versions = {path: _file_version(path) for path in chats_folder().glob("*.json") if not path.is_dir()}
    return sorted((path for path in versions if versions[path]), key=lambda path: versions[path], reverse=True)


def saved_names() -> list[str]:
    """Return the names of saved chats, the newest first."""
    return [path.stem for path in saved_paths()]


def make_name(question: str, day: date) -> str:
    """Return a chat's name from its day and first question, such as `2026-11-22-what-is-a-monad`."""
    words = "".join(c.lower() if c.isalnum() else " " for c in question[: 4 * _WORDS]).split()
    name = ""
    for word in words:
        if name and len(name) + len(word) >= _WORDS:
            break
        name += f"-{word[:_WORDS]}"
    return f"{day.isoformat()}{name or '-chat'}"


@dataclass
class ChatSaver:
    """Saves a chat to its file after every turn. `path` is None until there is something to save.

    It holds the lock of its file until `close`. If another chat holds it, or has written there meanwhile, this chat
    continues in a file of its own.
    """

    path: Path | None = None
    _has_warned: bool = field(default=False, init=False)
    _known_version: tuple[int, ...] = field(default=(), init=False)
    _is_writing: bool = field(default=False, init=False)
    _lock: ChatLock | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.path is not None:
            self._lock = ChatLock.acquire(self.path, state_folder())
            self._known_version = _file_version(self.path)

    @property
    def saved_path(self) -> Path | None:
        """The chat's file; None if there is none, or if its last turns could not be written."""
        return None if self._has_warned else self.path

    def save(self, conversation: Conversation, typed_texts: Mapping[str, str] | None = None) -> None:
        """Save the chat, in a new file if its own is in use, changed or read-only. A failure is reported once, and the
        chat continues. A new chat is named by its first question, or by what was typed for it, in `typed_texts`, if the
        question has files in it.
        """
        if self.path is None and not conversation.messages:
            return
        if self._is_writing:  # a signal ends the program during a write: the file is this chat's
            return self._write(conversation)
        try:
            self._choose_file(conversation, typed_texts or {})
        except OSError as error:  # the folder may be another user's
            return self._warn_once(f"{chats_folder()} cannot be used: {error.strerror or error}")
        self._is_writing = True
        try:
            self._write(conversation)
        finally:
            self._is_writing = False

    def close(self) -> None:
        """Release the lock, because the chat has ended."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def start_new_file(self) -> None:
        """Save later turns as another chat, in a new file."""
        self.close()
        self.path, self._has_warned = None, False

    def _choose_file(self, conversation: Conversation, typed_texts: Mapping[str, str]) -> None:
        """Choose a file if there is none yet, or if the chat cannot continue in its own. Raises OSError."""
        if self.path is None:
            self.path, self._lock = _lock_free_path(_new_chat_path(conversation, typed_texts))
        elif reason := self._conflict_reason(self.path):
            path, lock = _lock_free_path(self.path)
            self.close()
            self.path, self._lock = path, lock
            console.print_note(f"{reason}: this one is saved as {path.stem}")

    def _warn_once(self, reason: str) -> None:
        """Print once that the chat is not saved."""
        if not self._has_warned:
            console.print_error(f"{reason}; the chat is not saved, but goes on (--no-save: without this message)")
        self._has_warned = True

    def _write(self, conversation: Conversation) -> None:
        """Write the conversation to its file, and make it the newest chat."""
        assert self.path is not None
        try:
            conversation.save(self.path)
            _make_newest(self.path)
            self._known_version = _file_version(self.path)
            self._has_warned = False
        except ConversationFileError as error:
            self._warn_once(str(error))

    def _conflict_reason(self, path: Path) -> str:
        """Return why the chat cannot continue in its file; empty if it can."""
        if self._lock is None:
            self._lock = ChatLock.acquire(path, state_folder())
        if self._lock is None:
            return f"{path.stem} is open in another chat"
        file_version = _file_version(path)
        if file_version not in ((), self._known_version):
            return f"another chat has gone on in {path.stem}"
        return f"{path.stem} may not be written to" if file_version and not path.stat().st_mode & stat.S_IWUSR else ""


def _new_chat_path(conversation: Conversation, typed_texts: Mapping[str, str]) -> Path:
    """Return the file for a new chat, as if no other chat had its name."""
    messages = (plain_message(message, lambda part: "") for message in conversation.messages)
    first = next((message.get("content") for message in messages if message["role"] == "user"), "")
    question = first if isinstance(first, str) else ""
    return chats_folder() / f"{make_name(typed_texts.get(question, question), date.today())}.json"


def _lock_free_path(path: Path) -> tuple[Path, ChatLock]:
    """Lock and return the first path that neither exists nor is locked: this one, or one with a number added."""
    numbered_paths = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    for each in chain([path], numbered_paths):
        lock = ChatLock.acquire(each, state_folder())
        if lock is not None and not each.exists():
            return each, lock
        if lock is not None:
            lock.release()
    raise AssertionError("there is always a next number")


def _make_newest(path: Path) -> None:
    """Make the chat that was saved last the newest, even if the clock was put back after others were saved."""
    latest_time = max(
        (version[0] for other_path in saved_paths() if other_path != path and (version := _file_version(other_path))),
        default=0,
    )
    if path.stat().st_mtime_ns <= latest_time:
        with suppress(OSError):
            os.utime(path, ns=(latest_time + 1_000_000, latest_time + 1_000_000))


def describe_storage(saver: ChatSaver | None, store: Path | str | None) -> str:
    """Return which parts of a chat stay on disk, and where: the saved chat, and keys and values."""
    parts = [] if saver is None else [f"the chat in {_shorten_home(saver.path or state_folder())}"]
    if store is not None:
        parts.append(f"keys and values in {_shorten_home(Path(store))}")
    if not parts:
        return "nothing of this chat stays on disk"
    no_save_effect = "nothing" if store is None or Path(store) == default_folder() else "no chat"
    return f"on disk: {', '.join(parts)}" + ("" if saver is None else f"; --no-save: {no_save_effect}")


def _shorten_home(path: Path) -> str:
    """Return a path with `~` in place of the home folder."""
    home = home_folder()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _file_version(path: Path) -> tuple[int, ...]:
    """Return a file's identity and time of writing, to notice changes; empty if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size
