"""The study runs on a small model: a line for each kind of text, and the answers are their scripts."""

from __future__ import annotations

import re

import pytest

from cortexmlx.bench.studies.speculation import replay


def test_each_kind_has_a_line_with_ratios_and_counts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    replay.main([model, "--rows", "1,2", "--tokens", "24", "--pairs", "1"])
    said = capsys.readouterr()
    lines = [line.split() for line in said.out.splitlines() if re.match(r" +[12]  ", line)]
    assert [line[:2] for line in lines] == [
        [rows, kind] for rows in "12" for kind in ("edit", "quotes", "JSON", "schema", "prose")
    ]
    assert all(re.fullmatch(r"[0-9.]+x", line[6]) and float(line[4]) > 0 for line in lines)
    assert "edit, 2 rows, pair 1 of 1: with drafts" in said.err


def test_a_live_run_says_nothing_of_other_tokens(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    replay.main([model, "--rows", "2", "--tokens", "24", "--pairs", "1", "--kinds", "json", "--live"])
    assert "other tokens" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--kinds", "json,poems"], "argument --kinds: 'poems' is none of edit, quotes, JSON, schema, prose"),
        (["--kinds", ""], "argument --kinds: '' is none of edit"),
        (["--rows", "1,0"], "argument --rows: '1,0' is no list of numbers from 1 on, such as 1,8"),
        (["--rows", "one"], "argument --rows: 'one' is no list"),
        (["--pairs", "0"], "argument --pairs: '0' is no number from 1 on"),
        (["--tokens", "-4"], "argument --tokens: "),
    ],
)
def test_what_is_not_understood_is_said_in_one_message(
    given: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        replay.main(given)
    assert why in capsys.readouterr().err
