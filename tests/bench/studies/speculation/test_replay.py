"""The study runs on a small model: a line for each kind of text, and the answers are their scripts."""

from __future__ import annotations

import re

import pytest

from cortexmlx.bench.studies.speculation import replay


def test_each_kind_has_a_line_with_ratios_and_counts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    replay.main([model, "--rows", "2", "--tokens", "24", "--pairs", "1"])
    said = capsys.readouterr()
    lines = [line.split() for line in said.out.splitlines() if re.match(r" +2  ", line)]
    assert [line[:2] for line in lines] == [["2", kind] for kind in ("edit", "quotes", "JSON", "schema", "prose")]
    assert all(re.fullmatch(r"[0-9.]+x", line[6]) and float(line[4]) > 0 for line in lines)
    assert "edit, 2 rows, pair 1 of 1: with drafts" in said.err
