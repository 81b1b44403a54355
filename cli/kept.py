"""Chats that are kept: a file for each in the user's state folder, named by its day and its first words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from cortexmlx.cli import console
from cortexmlx.errors import ConversationFileError, InvalidRequest

if TYPE_CHECKING:
    from cortexmlx.sessions.conversation import Conversation

LAST = "last"
"""Names the chat that was kept most recently."""

_WORDS = 40
"""Characters of the first words that a name has at most."""

_SHOWN = 5


def state_folder() -> Path:
    """What programs keep between runs, by the XDG convention."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "cortexmlx"


def find(name: str) -> Path:
    """The kept chat of that name, of one that begins so, the last one, or a file. Raises InvalidRequest."""
    kept = sorted((state_folder() / "chats").glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    if name == LAST and kept:
        return kept[0]
    for fits in ([p for p in kept if p.stem == name], [p for p in kept if p.stem.startswith(name)]):
        if len(fits) == 1:
            return fits[0]
    if (path := Path(name).expanduser()).is_file():
        return path
    names = ", ".join(path.stem for path in kept[:_SHOWN])
    raise InvalidRequest(f"no chat {name!r} is kept: " + (f"the newest are {names}" if kept else "there are none yet"))


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
    """Writes a chat to its file after every turn. `path` is None until there is something to keep."""

    path: Path | None = None
    _warned: bool = field(default=False, init=False)

    def keep(self, conversation: Conversation) -> None:
        """Save the chat as it is now. A failure is said once: the chat goes on."""
        messages = conversation.messages
        if self.path is None and not messages:
            return
        if self.path is None:
            first = next((m["content"] for m in messages if m["role"] == "user"), "")
            name = name_for(first if isinstance(first, str) else "", date.today())
            self.path = next(path for path in _paths(name) if not path.exists())
        try:
            conversation.save(self.path)
        except ConversationFileError as error:
            if not self._warned:
                console.error(f"{error}; the chat is not kept (--no-save says so)")
            self._warned = True

    def begin_anew(self) -> None:
        """What comes is another chat, in a file of its own."""
        self.path = None


def _paths(name: str) -> Iterator[Path]:
    folder = state_folder() / "chats"
    yield folder / f"{name}.json"
    for number in count(2):
        yield folder / f"{name}-{number}.json"
