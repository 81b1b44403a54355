"""The measurement of what drawing costs draws what it says."""

from __future__ import annotations

from cortexmlx.bench.studies.commands.redraw import KINDS, cost, pieces, table, text_of


def test_the_texts_come_whole_and_are_drawn() -> None:
    for kind in KINDS:
        text = text_of(kind, 900)
        assert len(text) == 900 and "".join(pieces(text, 1e9)) == text
    spent, written = cost(text_of("paragraphs", 900), 3000)
    assert spent > 0 and written > 900


def test_the_table_has_a_line_for_each_kind() -> None:
    lines = table(200, 1e6).splitlines()
    assert [line[:24].strip() for line in lines[2:]] == [*KINDS] and all("%" in line for line in lines[2:])
