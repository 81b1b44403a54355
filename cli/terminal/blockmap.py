"""Draw the KV arena in characters: a cell for each block, or for several blocks if there are many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from rich.text import Text

from cortexmlx.kv.sizing import format_bytes
from cortexmlx.stats import BlockMap, BlockState, GroupBlocks


@dataclass(frozen=True)
class CellStyle:
    """How a block state is drawn, and its name: `ascii_cell` on an ASCII terminal, `cell` on others."""

    cell: str
    ascii_cell: str
    style: str
    name: str


STATE_STYLES = {
    BlockState.PRIVATE: CellStyle("█", "#", "color(28)", "private"),
    BlockState.SHARED: CellStyle("▓", "@", "color(133)", "shared"),
    BlockState.CACHED: CellStyle("▒", "+", "color(31)", "cached"),
    BlockState.STORED: CellStyle("░", "-", "color(98)", "on disk"),
    BlockState.FREE: CellStyle("·", ".", "color(244)", "free"),
}
"""The styles in the order of the legend. If a cell stands for several blocks and two states are equally frequent, the
first one wins.
"""

INDENT = "  "


def draw_blocks(picture: BlockMap, width: int, lines: int, *, ascii_only: bool = False) -> list[Text]:
    """Draw the KV blocks in at most `lines` lines of `width` columns. `ascii_only` is for an ASCII terminal.

    A legend shows the number of blocks in each state. Each group has a line of figures and its blocks, in the order in
    which they are in memory. If there is no room, the figures are left out first, then the legend, then the last
    groups.

    A cell for several blocks shows the state of most of those that are not free. It is dim if most of them are free.
    """
    width = max(1, width - len(INDENT))
    legend = _fill_lines(_legend(picture, ascii_only), width)
    remaining_groups = len(picture.groups)
    has_titles = len(legend) + 2 * remaining_groups <= lines
    drawn_lines = legend if len(legend) + remaining_groups <= lines else []
    for group in picture.groups:
        rows = (lines - len(drawn_lines)) // remaining_groups - has_titles
        if rows > 0:
            blocks_per_cell = max(1, -(-len(group.states) // (rows * width)))
            drawn_lines += [_group_line(group, picture, blocks_per_cell, width)] * has_titles + _cell_rows(
                group.states, blocks_per_cell, width, ascii_only
            )
        remaining_groups -= 1
    for line in drawn_lines:
        line.pad_left(len(INDENT))
        line.no_wrap = True
    return drawn_lines


def _legend(picture: BlockMap, ascii_only: bool) -> list[Text]:
    """Return the parts of the legend: each state with its number of blocks."""
    return [
        Text.assemble(
            (look.ascii_cell if ascii_only else look.cell, look.style), f" {look.name} {picture.count(state):,}"
        )
        for state, look in STATE_STYLES.items()
    ]


def _fill_lines(parts: Iterable[Text], width: int) -> list[Text]:
    """Put the words side by side in as few lines as possible. A word that is too long for a line is cut."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 2 + part.cell_len <= width:
            lines[-1].append("  ").append_text(part)
        else:
            part.truncate(width)
            lines.append(part)
    return lines


def _group_line(group: GroupBlocks, picture: BlockMap, blocks_per_cell: int, width: int) -> Text:
    """Return a group's line of figures, the most important first. Layers are named only if there are several groups."""
    count = len(group.states)
    parts = [f"{count:,} block{'s' * (count != 1)} of {picture.block_size} tokens"]
    if len(picture.groups) > 1:
        visible_tokens = "all tokens" if group.window is None else f"{group.window:,} tokens"
        parts.insert(0, f"{group.layers} layer{'s' * (group.layers != 1)} that see {visible_tokens}")
    if blocks_per_cell > 1:
        parts.append(f"{blocks_per_cell:,} to a cell")
    if group.block_bytes:
        parts.append(format_bytes(count * group.block_bytes))
    if group.limit > count:
        parts.append(f"up to {group.limit:,}")
    while len(parts) > 1 and len(", ".join(parts)) > width:
        parts.pop()
    return Text(parts[0][:width] if len(parts) == 1 else ", ".join(parts), style="dim")


def _cell_rows(states: bytes, blocks_per_cell: int, width: int, ascii_only: bool) -> list[Text]:
    """Return rows of cells that stand for `blocks_per_cell` blocks."""
    cells = [states[start : start + blocks_per_cell] for start in range(0, len(states), blocks_per_cell)]
    return [_draw_row(cells[at : at + width], ascii_only) for at in range(0, len(cells), width)]


def _draw_row(cells: Iterable[bytes], ascii_only: bool) -> Text:
    row = Text()
    for (look, dim), alike in groupby(map(_cell_style, cells)):
        row.append(
            (look.ascii_cell if ascii_only else look.cell) * len(list(alike)),
            f"dim {look.style}" if dim else look.style,
        )
    return row


@lru_cache(4096)
def _cell_style(cell: bytes) -> tuple[CellStyle, bool]:
    """Return how a cell is drawn, and whether it is dim."""
    free = cell.count(BlockState.FREE)
    if free == len(cell):
        return STATE_STYLES[BlockState.FREE], False
    commonest = max((state for state in STATE_STYLES if state is not BlockState.FREE), key=cell.count)
    return STATE_STYLES[commonest], 2 * free > len(cell)
