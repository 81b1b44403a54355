"""Completion with Tab in the input line: commands, their arguments, and files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from cortexmlx.cli.chat.slash.command import Command

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer

_PATH = re.compile(r'(?:^|\s)@"?([^\s"]*)$')


def candidates(before: str, commands: Mapping[str, Command]) -> Iterator[tuple[str, int, str]]:
    """Yield completions of the text `before` the cursor: a word, how many of its characters are typed, and its
    meaning.
    """
    name, blank, argument = before.partition(" ")
    if not blank:
        for command in dict.fromkeys(commands.values()):
            if before and command.name.startswith(before):
                yield command.name, len(before), command.help
    elif name in commands:
        argument = argument.lstrip()
        for value in _values(commands[name]):
            if value.lower().startswith(argument.lower()):
                yield value, len(argument), commands[name].values_are


def _values(command: Command) -> Iterable[str]:
    """Return the known arguments, or none if their folder cannot be read."""
    try:
        return command.values()
    except OSError:
        return ()


def path_in(before: str, commands: Mapping[str, Command]) -> str | None:
    """Return the beginning of a path at the end of the text before the cursor; None where no path can stand."""
    mention = _PATH.search(before)
    if mention is not None:
        return mention[1]
    name, blank, argument = before.partition(" ")
    return argument.lstrip() if blank and name in commands and commands[name].takes_path else None


def completer(commands: Mapping[str, Command]) -> Completer:
    """Return the completer of these commands for prompt_toolkit."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    files = PathCompleter(expanduser=True)

    class ChatCompleter(Completer):
        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            before = document.text_before_cursor
            if "\n" in before and not _PATH.search(before):
                return
            for text, there, meaning in candidates(before, commands):
                yield Completion(text, start_position=-there, display_meta=meaning)
            if (path := path_in(before, commands)) is not None:
                for each in files.get_completions(Document(path), event):
                    kind = "folder" if each.display_text.endswith("/") else "file"
                    yield Completion(each.text, each.start_position, each.display, display_meta=kind)

    return ChatCompleter()
