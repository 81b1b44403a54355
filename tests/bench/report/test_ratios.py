"""A comparison says its ratio, whether that is enough, and every figure behind it."""

from __future__ import annotations

from cortexmlx.bench.report import ratios
from cortexmlx.bench.report.text import section_markdown
from support.cli.bench_reports import COMPARED


def test_a_comparison_says_its_ratio_and_whether_that_is_enough() -> None:
    part = ratios.ratios_section([COMPARED])
    text = section_markdown(part)
    assert max(map(len, text.splitlines())) <= 80
    line = next(line for line in text.splitlines() if line.startswith("| pp512"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[0] == "pp512" and "1.00x" in cells and ">= 1x" in cells
    joined = " ".join(text.split())
    assert "cortexmlx 3,000, 1.5; mlx-lm 2,000, 3 tok/s; same tokens in 1 of 2 requests" in joined
    [record] = part.records
    assert (record["better"], record["ratios"], record["cpu_ratio"], record["met"]) == (">=", (1.5, 0.5), None, True)
