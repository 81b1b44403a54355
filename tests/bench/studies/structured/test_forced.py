"""The study's pairs: documents that are whole, fewer steps with forced tokens, and one line of figures."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cortexmlx.bench.studies.structured import forced


def test_documents_are_whole_and_forced_tokens_save_steps(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    forced.main(str(tiny("llama")), documents=4, rows=2)
    said = re.match(
        r"2 rows: ([0-9.]+) of the time per document, ([0-9.]+) of the steps; tokens", capsys.readouterr().out
    )
    assert said is not None and float(said[1]) > 0 and float(said[2]) < 0.8
