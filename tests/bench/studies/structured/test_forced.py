"""The study's pairs: documents that are whole, and one line of figures."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cortexmlx.bench.studies.structured import forced


def test_documents_are_whole_and_the_line_has_the_ratios(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """How many steps are saved depends on what steps take on this machine, and what the other documents say."""
    forced.main(str(tiny("llama")), documents=4, rows=2)
    said = re.fullmatch(
        r"2 rows: ([0-9.]+) of the time per document, ([0-9.]+) of the steps; tokens \{False: (\d+), True: (\d+)\}\n",
        capsys.readouterr().out,
    )
    assert said is not None and all(float(figure) > 0 for figure in said.groups())
