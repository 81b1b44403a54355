"""What Tab offers in the input line: commands, their arguments, and files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer

Names = Callable[[], Iterable[str]]

_PATH = re.compile(r'(?:^|\s)@"?([^\s"]*)$')


@dataclass(frozen=True)
class Vocabulary:
    """`commands` with their meanings; what may follow a command: the `arguments` of it, or for some of them a path."""

    commands: tuple[tuple[str, str], ...]
    arguments: Mapping[str, Names]
    paths: frozenset[str]
    meanings: Mapping[str, str] = field(default_factory=dict)
    """What the arguments of a command are, where Tab offers files with them."""


def candidates(before: str, known: Vocabulary) -> Iterator[tuple[str, int, str]]:
    """What may stand at the end of the text `before` the cursor: a word, how much of it is there, and its meaning."""
    command, blank, argument = before.partition(" ")
    if not blank:
        yield from ((name, len(before), said) for name, said in known.commands if before and name.startswith(before))
    elif command in known.arguments:
        argument = argument.lstrip()
        for name in _readable(known.arguments[command]):
            if name.lower().startswith(argument.lower()):
                yield name, len(argument), known.meanings.get(command, "")


def _readable(names: Names) -> Iterable[str]:
    """The names; none if the folder that has them cannot be read."""
    try:
        return names()
    except OSError:
        return ()


def path_in(before: str, known: Vocabulary) -> str | None:
    """The beginning of a path at the end of the text before the cursor, if one may stand there."""
    mention = _PATH.search(before)
    if mention is not None:
        return mention[1]
    command, blank, argument = before.partition(" ")
    return argument.lstrip() if blank and command in known.paths else None


def completer(known: Vocabulary) -> Completer:
    """As prompt_toolkit wants it."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    files = PathCompleter(expanduser=True)

    class ChatCompleter(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            before = document.text_before_cursor
            if "\n" in before and not _PATH.search(before):
                return
            for text, there, meaning in candidates(before, known):
                yield Completion(text, start_position=-there, display_meta=meaning)
            if (path := path_in(before, known)) is not None:
                for each in files.get_completions(Document(path), event):
                    kind = "folder" if each.display_text.endswith("/") else "file"
                    yield Completion(each.text, each.start_position, each.display, display_meta=kind)

    return ChatCompleter()
