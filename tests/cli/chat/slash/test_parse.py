"""Commands are told from messages: pasted code and paths are never taken for commands."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.chat.slash.commands import BY_NAME
from cortexmlx.cli.chat.slash.parse import ParsedInput, parse_input
from cortexmlx.errors import InvalidRequest


@pytest.mark.parametrize(
    ("typed", "command", "argument"),
    [
        ("/help", "/help", ""),
        ("/HELP", "/help", ""),
        ("/? ", "/?", ""),
        ("/bye", "/bye", ""),
        ("exit", "/exit", ""),
        (" Quit ", "/exit", ""),
        ("help", "/help", ""),
        ("/system Be\nbrief.", "/system", "Be\nbrief."),
        ("/edit\nin other\nwords", "/edit", "in other\nwords"),
        ('/set system """\nBe brief.\n"""', "/set", 'system """\nBe brief.\n"""'),
        ("/save my file.json", "/save", "my file.json"),
        ("/n 3 what\nnow?", "/n", "3 what\nnow?"),
    ],
)
def test_known_names_are_commands(typed: str, command: str, argument: str) -> None:
    assert parse_input(typed, BY_NAME) == ParsedInput(command, argument)


@pytest.mark.parametrize(
    "typed",
    [
        "// a comment\nint main() {}",
        "/usr/bin/env python",
        "/tmp/notes.txt",
        "/paste of what?",
        "/etc is what?",
        "/tmp is full",
        "/* C */",
        "/",
        "//",
        "/foo bar",
        "/foo\nbar",
        " /foo",
        "/[a-z]+/",
        "/set -e\nmake all",
        "/exit\nis what I typed",
        "/clear\n",
        " /help",
        "help me",
        "exit code 3?",
        "/helpful\nwords",
    ],
)
def test_everything_else_is_a_message_as_it_is(typed: str) -> None:
    if typed == "/clear\n":  # a line break at its end is no second line
        assert parse_input(typed, BY_NAME).command == "/clear"
    else:
        assert parse_input(typed, BY_NAME) == ParsedInput(None, typed)


@given(st.text(max_size=30))
def test_no_text_is_changed_or_breaks_anything(text: str) -> None:
    try:
        typed = parse_input(f"x{text}", BY_NAME)
    except InvalidRequest as error:
        raise AssertionError("only a name with a slash is a mistyped command") from error
    assert typed.command is None or typed.command == "/exit"
    if typed.command is None:
        assert typed.text == f"x{text}"
    try:
        parse_input(f"/{text}", BY_NAME)
    except InvalidRequest:
        assert re.fullmatch(r"[\w-]+", text.split()[0])


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("/clera", "/clear"),
        ("/quti now", "/quit"),
        ("/hlp", "/help"),
        ("/temperature 0.7", "/set temperature 0.7"),
        ("/temp 0.9", "/set temp 0.9"),
        ("/read notes.txt", "/file notes.txt"),
        ("/regenerate please", "/regen"),
    ],
)
def test_a_mistyped_command_is_not_sent(typed: str, near: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"did you mean {near}\? "):
        parse_input(typed, BY_NAME)


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("/list", "/model"),
        ("/regenerate", "/regen"),
        ("/new", "/clear"),
        ("/foo", None),
        ("/TMP ", None),
        ("/x-y", None),
    ],
)
def test_an_unknown_word_after_a_slash_is_answered_and_not_sent(typed: str, near: str | None) -> None:
    with pytest.raises(InvalidRequest, match=f"no command {typed.strip().lower()}: .*put a blank in front") as refused:
        parse_input(typed, BY_NAME)
    assert near is None or f"did you mean {near}?" in str(refused.value)


def test_nothing_is_no_message_and_quotes_are_always_one() -> None:
    assert parse_input("  \n", BY_NAME) == ParsedInput(None, "")
    assert parse_input('"""/exit"""', BY_NAME) == ParsedInput(None, "/exit")
    assert parse_input('  """\n/set x\ny\n"""', BY_NAME) == ParsedInput(None, "/set x\ny")
