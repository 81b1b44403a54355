"""Pastes into a real terminal: each is one message, as it was pasted, whatever quotes are in it."""

from __future__ import annotations

from pathlib import Path

from cortexmlx.sessions.saved import SavedConversation
from support.cli.terminal import Terminal

FIGURES = "TTFT 12 ms · prompt"
DOCSTRING = '"""What it does."""\n\nimport sys\n\n\ndef main() -> None:\n\t"""Do it."""\n\tsys.exit(0)'
UP = "\x1b[A"


def kept(tmp_path: Path) -> list[str]:
    """What the user said."""
    (path,) = (tmp_path / "state" / "cortexmlx" / "chats").iterdir()
    return [str(m["content"]) for m in SavedConversation.read(path).messages if m["role"] == "user"]


def sent(tmp_path: Path, *keys: str) -> list[str]:
    """The messages that are sent by these keys, each as many as it takes for one."""
    with Terminal("--no-history") as terminal:
        for each in keys:
            terminal.wait_for_prompt()
            terminal.type(each)
            terminal.wait_for(FIGURES)
        terminal.wait_for_prompt()
    return kept(tmp_path)


def paste(text: str) -> str:
    """What a terminal sends for a paste."""
    return f"\x1b[200~{text}\x1b[201~"


def test_pasted_quotes_line_ends_tabs_and_escapes_are_sent_as_they_are(tmp_path: Path) -> None:
    pasted = [
        DOCSTRING,
        '"""\nWhat it does.\n"""\nimport sys',
        '"""',
        '"""\nOnly a docstring.\n"""',
        '"""hello"""',
        '  """indented\n  text',
        "'''\nother quotes\n'''",
        '"""no end\n' + "\n".join(f"line {number}" for number in range(200)),
        '\x1b[31m"""\x1b[0m red\x07',
        "\ttabs\t\n\tthere",
        'x"""y\n' * 3,
    ]
    ends = ('"""a\r\nb\r\n', '"""a\nb\n')
    assert sent(tmp_path, *(paste(each) + "\r" for each in (*pasted, ends[0]))) == [*pasted, ends[1]]


def test_a_paste_in_a_typed_block_is_a_part_of_it(tmp_path: Path) -> None:
    typed = [
        '"""\r' + paste(DOCSTRING + '"""') + '\r"""\r',
        '"""\r' + paste(DOCSTRING) + ' and?\r"""\r',
        "so:\x0a" + paste(DOCSTRING) + "\r",
    ]
    assert sent(tmp_path, *typed) == [DOCSTRING + '"""', DOCSTRING + " and?", f"so:\n{DOCSTRING}"]


def test_what_was_pasted_comes_back_with_its_quotes(tmp_path: Path) -> None:
    """From the history, where it lies as a block, and as the draft of /edit."""
    assert sent(tmp_path, paste(DOCSTRING) + "\r", UP + "\r", "/edit\r\r") == [DOCSTRING] * 2


def test_a_long_paste_is_one_line_on_the_screen_and_sent_whole(tmp_path: Path) -> None:
    forty, more = ("\n".join(f"line {number}" for number in range(count)) for count in (40, 57))
    other, quoted, wide = more.upper(), f'"""{more}"""', "x" * 5_000
    with Terminal("--no-history", lines=100) as terminal:
        for keys, shown in (
            (paste(forty), "... line 39"),
            (f"see {paste(more)} and {paste(other)}", ">>> see [paste 1: 57 lines] and [paste 2: 57 lines]"),
            (paste(quoted), ">>> [paste 3: 57 lines]"),
            (paste(wide), ">>> [paste 4: 5,000 characters]"),
        ):
            terminal.wait_for_prompt()
            terminal.type(f"{keys}\r")
            terminal.wait_for(FIGURES)
            assert shown in terminal.lines()
        terminal.wait_for_prompt()
    assert kept(tmp_path) == [forty, f"see {more} and {other}", quoted, wide]


def test_a_question_stays_as_it_was_typed_whatever_the_window(tmp_path: Path) -> None:
    """The terminal wraps it: it is copied in one line, and what it has of several lines is marked."""
    question = " ".join(f"word{number}" for number in range(20))
    with Terminal("--no-history", columns=40, lines=8) as terminal:
        for keys, line in ((question, f">>> {question}"), ("one\x0atwo three", "... two three")):
            terminal.wait_for_prompt()
            terminal.enter(keys, "40.0 tok/s")
            assert [each for each in terminal.lines() if each.startswith(line[:8])] == [line]
        terminal.type("half\x03")
        terminal.wait_for("Ctrl-C again")
        assert ">>> half" in terminal.lines()
