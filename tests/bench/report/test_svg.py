"""The picture of a report."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from cortexmlx.bench.report import speed
from cortexmlx.bench.report.svg import as_svg
from support.cli.bench_reports import MODEL, ROW, report

SVG = "{http://www.w3.org/2000/svg}"


def test_it_is_svg_with_a_bar_for_each_row_in_proportion() -> None:
    other = replace(ROW, test=replace(ROW.test, batch=2), rates=(20.0, 22.0))
    made = replace(report(speed.speed_section([ROW, other], MODEL, "CPU")), model=replace(MODEL, name="a<b & c"))
    root = ElementTree.fromstring(as_svg(made))
    bars = [float(r.attrib["width"]) for r in root.iter(f"{SVG}rect") if "class" not in r.attrib]
    assert bars[0] == pytest.approx(2 * bars[1], abs=0.2) and len(bars) == 2
    texts = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert any("a<b & c" in text for text in texts) and "42.0" in texts and "tg128 @ d512 x4" in texts
    whiskers = list(root.iter(f"{SVG}path"))
    assert len(whiskers) == 2
