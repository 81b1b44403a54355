"""The study's lines: the lower the limit, the shorter the forced text."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.bench.studies.structured import endless
from cortexmlx.grammar import matcher


def test_a_lower_limit_makes_a_shorter_text(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matcher, "MOST_ITEMS", matcher.MOST_ITEMS)  # which the study changes
    endless.main(str(tiny("llama")))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" items")[0] for line in lines] == ["50,000", "10,000", "5,000"]
    tokens = [int(line.split(": ")[1].split(" ")[0].replace(",", "")) for line in lines]
    assert tokens[0] > 4 * tokens[1] and tokens[1] > tokens[2] > 0
