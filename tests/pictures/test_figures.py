"""The rates in a picture are compared with those of docs/figures.md."""

from __future__ import annotations

from support.pages import ROOT
from tests.pictures.figures import disagreement

FIGURES = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
TABLE = "| decode, 1 row | 25.6 | 24.3 | 1.07x |"
BENCH = (
    "<text>|&#160;pp128&#160;|&#160;300.1&#160;±&#160;9.0&#160;|</text>"
    "<text>|&#160;tg32&#160;|&#160;{}&#160;±&#160;0.1&#160;|</text>"
)


def chat(*rates: str) -> str:
    return "".join(
        f"<text>9&#160;tokens&#160;·&#160;{rate}&#160;tok/s&#160;·&#160;TTFT&#160;1.0&#160;s</text>" for rate in rates
    )


def test_rates_like_the_tables_agree() -> None:
    assert disagreement(chat("24", "19.5"), TABLE) is None
    assert disagreement(BENCH.format("26.1"), TABLE) is None
    assert disagreement("<text>no rates</text>", TABLE) is None


def test_any_other_rate_is_told_with_the_table_and_the_next_step() -> None:
    for drawn in (chat("24", "3.9"), chat("60"), BENCH.format("3.9")):
        told = disagreement(drawn, TABLE)
        assert told is not None and "has 25.6" in told and "bench --against mlx-lm -n 32" in told


def test_the_page_of_figures_has_the_row_and_its_command() -> None:
    told = disagreement(chat("0.1"), FIGURES)
    assert told is not None and "no table" not in told
    assert "bench --against mlx-lm -n 32" in FIGURES
    assert "no table" in (disagreement(chat("1"), "") or "")
