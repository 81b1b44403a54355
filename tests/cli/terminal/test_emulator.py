"""The terminal that tests of the chat sit at does what people's terminals do, when its window changes above all."""

from __future__ import annotations

import pyte

from support.cli.emulator import Emulator


def shown(text: str, columns: int = 10, lines: int = 4, *, reflow: bool = True) -> Emulator:
    screen = Emulator(columns, lines, reflow=reflow)
    pyte.Stream(screen).feed(text)
    return screen


def test_what_scrolls_off_is_kept_and_a_line_that_the_terminal_broke_is_one() -> None:
    screen = shown("one\r\nabcdefghijklmno\r\ntwo\r\nthree\r\n")
    assert screen.rows() == ["klmno", "two", "three", ""]
    assert screen.text_lines() == ["one", "abcdefghijklmno", "two", "three", ""]


def test_a_line_that_fills_its_row_goes_on_only_if_it_does() -> None:
    assert shown("abcdefghij\r\nk").text_lines() == ["abcdefghij", "k"]
    assert shown("abcdefghijk\r\x1b[A\x1b[2Kx").text_lines() == ["x", "k"]


def test_a_wide_character_does_not_straddle_the_edge() -> None:
    screen = shown("123456789\u6f22\u5b57")
    assert screen.rows()[:2] == ["123456789", "\u6f22\u5b57"]


def test_another_width_breaks_lines_anew_and_the_cursor_stays_at_its_character() -> None:
    screen = shown("first\r\n0123456789abc\r\nlast")
    pyte.Stream(screen).feed("\x1b[2A\x1b[3G")
    screen.resize(lines=4, columns=5)
    assert screen.text_lines() == ["first", "0123456789abc", "last"]
    assert screen.rows() == ["01234", "56789", "abc", "last"]
    screen.draw("X")
    assert screen.text_lines()[1] == "01X3456789abc"
    screen.resize(lines=4, columns=20)
    assert screen.rows() == ["first", "01X3456789abc", "last", ""]
    assert (screen.cursor.y, screen.cursor.x) == (1, 3)


def test_xterm_cuts_what_is_right_of_the_edge() -> None:
    screen = shown("0123456789\r\nab\r\n", reflow=False)
    screen.resize(lines=4, columns=4)
    screen.resize(lines=4, columns=10)
    assert screen.text_lines() == ["0123", "ab", ""]


def test_a_lower_window_loses_what_is_below_the_cursor_and_keeps_what_is_above() -> None:
    screen = shown("a\r\nb\r\nc\r\nd\x1b[2A")
    screen.resize(lines=2, columns=10)
    assert (screen.rows(), screen.text_lines(), screen.cursor.y) == (["b", "c"], ["a", "b", "c"], 0)
