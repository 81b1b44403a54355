"""Words in rows: none is lost, none is too wide, and what stands before them stands before every row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from cortexmlx.cli.markdown.flows import VerbatimLine, WrappedLine, fold_rows, wrap_words

TEXT = st.text("ab cdé 天空，。🎉", max_size=60)


@given(TEXT, st.integers(2, 30), st.integers(0, 60))
def test_rows_have_all_that_is_left_and_are_not_too_wide(plain: str, width: int, start: int) -> None:
    rows = wrap_words(plain, min(start, len(plain)), width)
    assert "".join(plain[a:b] for a, b, _ in rows).replace(" ", "") == plain[start:].replace(" ", "")
    assert all(cell_len(plain[a:b]) <= width and plain[a:b] == plain[a:b].strip(" ") for a, b, _ in rows)


@given(TEXT, st.integers(2, 30), st.integers(2, 30))
def test_after_any_row_the_rest_can_go_on_in_another_width(plain: str, first: int, second: int) -> None:
    flow = WrappedLine(1, Text(plain))
    for number, row in enumerate(flow.rows(0, first)):
        shown = [r.text.plain for r in [*flow.rows(0, first)[: number + 1], *flow.rows(row.end, second)]]
        assert "".join(shown).replace(" ", "") == plain.replace(" ", "")


def test_chinese_is_wrapped_between_its_characters_and_not_before_what_closes() -> None:
    plain = "天空是蓝色的，因为光"
    assert [plain[a:b] for a, b, _ in wrap_words(plain, 0, 12)] == ["天空是蓝色", "的，因为光"]


def test_what_stands_before_an_item_and_before_its_other_rows() -> None:
    item = WrappedLine(1, Text("one two three"), Text("• "), Text("  "))
    assert [row.text.plain for row in item.rows(0, 10)] == ["• one two", "  three"]
    assert [row.text.plain for row in item.rows(8, 10)] == ["  three"]
    assert [row.text.plain for row in WrappedLine(1, Text(), Text("▌ "), Text("▌ ")).rows(0, 10)] == ["▌"]


def test_a_line_of_code_is_one_row_however_long() -> None:
    line = VerbatimLine(1, Text("x" * 200))
    assert [row.text.plain for row in line.rows(0, 20)] == ["x" * 200] and line.rows(1, 20) == []


def test_a_line_is_folded_as_a_terminal_does_it() -> None:
    assert [row.plain for row in fold_rows(Text("ab cd\u5929\u7a7ae"), 4)] == ["ab c", "d\u5929", "\u7a7ae"]
    assert [row.plain for row in fold_rows(Text(), 4)] == [""]
