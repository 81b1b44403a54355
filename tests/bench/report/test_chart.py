"""Bars for a terminal."""

from __future__ import annotations

from cortexmlx.bench.report.chart import WIDTH, chart
from cortexmlx.bench.report.section import Bar


def bar(label: str, value: float, group: str = "generation") -> Bar:
    return Bar(group, label, "tokens per second", value, value, value)


def test_bars_are_as_long_as_their_figures_and_fit_the_terminal() -> None:
    drawn = chart([bar("block 16", 10.0), bar("block 32", 40.0), bar("pp512", 9.0, "prompt")])
    title, short, long = drawn.splitlines()  # a single bar has nothing beside it
    assert title == "generation, tokens per second"
    assert long.count("█") == 4 * short.count("█") or abs(long.count("█") - 4 * short.count("█")) <= 4
    assert len(long) <= WIDTH and long.split()[2] == "40.0"


def test_groups_stand_in_the_order_of_the_report() -> None:
    drawn = chart([bar("b", 1_234.0, "z"), bar("a", 1.0, "a"), bar("c", 2.0, "z"), bar("d", 4.0, "a")])
    assert [line.split(",")[0] for line in drawn.splitlines()[::4]] == ["z", "a"] and "b 1,234.0 █" in drawn


def test_a_narrow_terminal_has_shorter_bars() -> None:
    assert max(map(len, chart([bar("block 16", 10.0), bar("block 32", 40.0)], 40).splitlines()[1:])) <= 40


def test_nothing_is_drawn_of_nothing() -> None:
    assert chart([]) == chart([bar("alone", 1.0)]) == ""
    assert "█" not in chart([bar("a", 0.0), bar("b", 0.0)])
