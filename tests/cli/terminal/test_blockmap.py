"""The picture of the arena: it fits, it hides nothing, and it says what it means."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.terminal.blockmap import INDENT, STATE_STYLES, draw_blocks
from cortexmlx.stats import BlockMap, BlockState, GroupBlocks

CELLS = {look.cell: state for state, look in STATE_STYLES.items()}
states = st.integers(0, 6000).flatmap(
    lambda size: st.builds(
        lambda runs: b"".join(bytes([state]) * count for state, count in runs)[:size].ljust(size, b"\0"),
        st.lists(st.tuples(st.integers(0, 4), st.integers(1, 900)), max_size=30),
    )
)


def group(content: bytes, window: int | None = None, limit: int = 0) -> GroupBlocks:
    return GroupBlocks(2, window, 1024, max(limit, len(content)), content)


def arena(*contents: bytes) -> BlockMap:
    return BlockMap(32, tuple(group(content, 512 * i or None) for i, content in enumerate(contents)))


def cells(lines: list[str]) -> list[str]:
    """The lines that are cells."""
    return [line for line in lines if set(line) <= set(CELLS)]


def shown(picture: BlockMap, width: int, lines: int, plain: bool = False) -> list[str]:
    drawn = [line.plain for line in draw_blocks(picture, width, lines, ascii_only=plain)]
    assert all(line.startswith(INDENT) for line in drawn)
    return [line.removeprefix(INDENT) for line in drawn]


@given(st.lists(states, min_size=1, max_size=3), st.integers(8, 220), st.integers(1, 60), st.booleans())
def test_it_fits_every_window_and_every_arena(contents: list[bytes], width: int, lines: int, plain: bool) -> None:
    drawn = draw_blocks(arena(*contents), width, lines, ascii_only=plain)
    assert len(drawn) <= lines and all(line.cell_len <= width for line in drawn)
    assert not plain or all(line.plain.isascii() for line in drawn)


@given(states, st.integers(12, 120), st.integers(4, 40))
def test_no_block_that_holds_something_is_hidden_and_none_is_made_up(content: bytes, width: int, lines: int) -> None:
    drawn = "".join(cells(shown(arena(content), width, lines)))
    each = -(-len(content) // max(1, len(drawn)))
    assert not content or (len(drawn) - 1) * each < len(content) <= len(drawn) * each, "all blocks have a cell"
    for place, cell in enumerate(drawn):
        blocks = content[place * each : (place + 1) * each]
        used = bytes(filter(None, blocks))
        assert CELLS[cell] == (max(sorted(set(used)), key=used.count) if used else BlockState.FREE) or used.count(
            CELLS[cell]
        ) == max(map(used.count, used)), "one of the commonest that are not free"


def test_a_small_arena_is_drawn_block_by_block_with_its_legend() -> None:
    content = bytes([1] * 5 + [2] * 3 + [3] * 4 + [4] * 2 + [0] * 10)
    assert shown(arena(content), 100, 24) == [
        "█ private 5  ▓ shared 3  ▒ cached 4  ░ on disk 2  · free 10",
        "24 blocks of 32 tokens, 24 KiB",
        "█████▓▓▓▒▒▒▒░░··········",
    ]
    assert shown(arena(content), 100, 24, plain=True)[-1] == "#####@@@++++--.........."


def test_thousands_of_blocks_share_cells_and_the_figures_say_how_many() -> None:
    content = bytes([1] * 1000 + [0] * 3000)
    legend, figures, *rows = shown(BlockMap(32, (group(content, limit=9000),)), 82, 7)
    assert "█ private 1,000" in legend
    assert figures == "4,000 blocks of 32 tokens, 10 to a cell, 3.91 MiB, up to 9,000"
    assert rows == ["█" * 80, "█" * 20 + "·" * 60, *["·" * 80] * 3]


def test_a_cell_of_which_most_is_free_is_dim() -> None:
    (row,) = draw_blocks(arena(bytes([1, 0, 0, 0, 1, 1, 1, 0])), 4, 1)
    assert row.plain == INDENT + "██"
    assert [(span.start - 2, span.style) for span in row.spans] == [(0, "dim color(28)"), (1, "color(28)")]


def test_every_group_has_its_picture_and_says_how_far_its_layers_see() -> None:
    drawn = shown(arena(bytes([1] * 30), bytes([1] * 6)), 60, 20)
    assert drawn[-4:] == [
        "2 layers that see all tokens, 30 blocks of 32 tokens",
        "█" * 30,
        "2 layers that see 512 tokens, 6 blocks of 32 tokens, 6 KiB",
        "█" * 6,
    ]


@pytest.mark.parametrize("lines", [1, 2, 3, 4, 6])
def test_where_there_is_little_room_the_cells_stay_longest(lines: int) -> None:
    drawn = shown(arena(bytes([1] * 500), bytes([3] * 500)), 40, lines)
    assert len(cells(drawn)) >= min(lines, 2)
    legend = [line for line in drawn if re.search("private [0-9]", line)]
    assert bool(legend) == (lines >= 4), "five states in 38 columns take two lines"
