"""Prompts as they really arrive: from arguments and pipes, with bytes that are no text; and what is printed."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

from cortexmlx.cli.start import run
from cortexmlx.cli.terminal.text import format_duration, to_json
from support.cli.cli_fakes import Fakes


class Pipe(io.TextIOWrapper):
    """Standard input as a pipe that holds `data`."""

    def __init__(self, data: bytes) -> None:
        read, write = os.pipe()
        os.write(write, data)
        os.close(write)
        super().__init__(os.fdopen(read, "rb"))


def test_what_is_piped_in_comes_before_the_argument(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(b"the notes\n"))
    run(["generate", "fake", "--raw", "-p", "Summarise."])
    assert fakes.engine.seen[0][0] == "the notes\n\nSummarise."


def test_dash_reads_stdin_where_it_stands(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(b"\xef\xbb\xbfthe notes"))
    run(["generate", "fake", "--raw", "-p", "Summarise:", "-p", "-"])
    assert fakes.engine.seen[0][0] == "Summarise:\n\nthe notes"


def test_nul_and_broken_utf8_become_replacement_characters_with_a_note(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(b"a\0b \xff \xe2\x82 \xef\xbf\xbd"))
    run(["generate", "fake", "--raw", "-p", "-", "-p", "caf\udcc3\udca9 \udcff"])
    assert fakes.engine.seen[0][0] == "a�b � � �\n\ncafé �"
    assert capsys.readouterr().err == (
        "cortexmlx: 3 x NUL or broken UTF-8 in stdin, replaced by �\n"
        "cortexmlx: 1 x NUL or broken UTF-8 in the prompt, replaced by �\n"
    )


def test_what_json_has_no_word_for_is_null() -> None:
    record = {"perplexity": float("inf"), "top": [(3, -float("inf")), (4, -1.5)], "text": "é", "one": float("nan")}
    assert to_json(record) == '{"perplexity": null, "top": [[3, null], [4, -1.5]], "text": "é", "one": null}'


def test_half_of_a_surrogate_pair_is_written_as_it_came() -> None:
    record = {"id": "a\\\ud800é", "metadata": {"\udfff": "😀"}}
    text = to_json(record)
    assert text == '{"id": "a\\\\\\ud800é", "metadata": {"\\udfff": "😀"}}'
    assert json.loads(text.encode()) == record


def test_duration_is_short() -> None:
    assert [format_duration(s) for s in (0.4, 59, 185, 3750)] == ["0 s", "59 s", "3:05", "1:02:30"]
