"""The work list of a step, and padded block tables. A work item says which tokens of which row a threadgroup attends
to. Without mlx.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cortexmlx.errors import KVBlockError
from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.kv.step import PrefillPiece
from cortexmlx.types.arrays import IntArray

SMALL = 8
"""The fewest elements of an input. MLX puts a smaller input into another address space, and so compiles another kernel.
Metadata is padded to this length.
"""

ROW_ITEMS = np.dtype([(name, np.int32) for name in ("first_item", "items", "start", "end")])
"""A row has `items` consecutive work items from `first_item` on. Its newest token sees the tokens `start .. end`. The
token before it sees `start - 1 .. end - 1`, as far as those tokens exist."""

WORK_ITEM = np.dtype([(name, np.int32) for name in ("row", "first", "last", "arena_tokens")])
"""A threadgroup's part of a row: the tokens `first .. last`. The whole row has `arena_tokens` tokens in the arena."""

PREFILL_ITEM = np.dtype([(name, np.int32) for name in ("blocks", "begin", "end", "origin", "reach")])
"""A tile of a prefill piece: the queries of the row's tokens `begin .. end`. Token t is query `origin + t` of the
step's pieces. Each query sees at most the newest `reach` tokens up to itself. The row's blocks begin at index `blocks`
of all tables."""


def _metal_struct(name: str, fields: np.dtype[np.void]) -> str:
    """Return a Metal struct that has the fields of a NumPy dtype as ints."""
    return f"\n  struct {name} {{ int {', '.join(fields.names or ())}; }};"


STRUCTS = _metal_struct("RowItems", ROW_ITEMS) + _metal_struct("WorkItem", WORK_ITEM)
"""ROW_ITEMS and WORK_ITEM as structs of the kernels' text."""

PREFILL_STRUCT = _metal_struct("PrefillItem", PREFILL_ITEM)
"""PREFILL_ITEM as a struct of the kernels' text."""


@dataclass(frozen=True)
class WorkList:
    """The decode work of a step: work items, each a range of one row's tokens for a threadgroup to attend to."""

    rows: int
    items: int
    plan: IntArray
    """Flat int32: a ROW_ITEMS for each row, then a WORK_ITEM for each item, padded to at least 8 numbers. The kernels
    read it as structs with these fields.
    """


def make_work_list(
    arena_tokens: IntArray, tail_tokens: int, attention_window: AttentionWindow, partition: int, query_tokens: int = 1
) -> WorkList:
    """Return a step's decode work: every row's visible tokens, cut at the multiples of `partition`.

    `arena_tokens` `[rows]` is the number of a row's tokens in the arena. Each row has `tail_tokens` more in the tail. A
    row's items cover the tokens that its newest `query_tokens` tokens see, each within `attention_window`. A row that
    sees nothing has one empty item.

    Raises:
        KVBlockError: The window is chunked and there are several query tokens. The kernels shift a row's start by one
            token per query token, and query tokens of two chunks have unrelated starts.
    """
    if attention_window.chunked and query_tokens > 1:
        raise KVBlockError(
            f"the {query_tokens} newest tokens of a row may lie in two chunks, which the decode kernels cannot tell "
            "apart: give layers with chunks one query token"
        )
    rows = len(arena_tokens)
    end = arena_tokens.astype(np.int64) + tail_tokens
    sees_from = attention_window.oldest_visible(np.maximum(end - 1, 0))
    start = np.maximum(sees_from - (query_tokens - 1), 0)
    first_part = start // partition
    counts = np.maximum(-(-end // partition) - first_part, 1)
    first_item = np.cumsum(counts) - counts
    row = np.repeat(np.arange(rows), counts)
    item_start = (np.arange(len(row)) - first_item[row] + first_part[row]) * partition
    row_items, items = np.empty(rows, ROW_ITEMS), np.empty(len(row), WORK_ITEM)
    row_items["first_item"], row_items["items"] = first_item, counts
    row_items["start"], row_items["end"] = sees_from, end
    items["row"], items["arena_tokens"] = row, arena_tokens[row]
    items["first"], items["last"] = np.maximum(item_start, start[row]), np.minimum(item_start + partition, end[row])
    plan = np.concatenate([row_items.view(np.int32), items.view(np.int32)])
    return WorkList(rows, len(items), _pad(plan))


def pad_tables(tables: IntArray) -> IntArray:
    """Return block tables `[rows, blocks]` as int32, with columns of zeros added until they have at least 8 numbers."""
    rows, blocks = tables.shape
    return np.pad(tables.astype(np.int32), ((0, 0), (0, max(0, -(-SMALL // rows) - blocks))))


EVERYTHING = 1 << 30
"""The `reach` of a query without a window: more tokens than any row has."""


@dataclass(frozen=True)
class PrefillWorkList:
    """The prefill work of a step: work items, each a tile of one piece's queries."""

    items: int
    plan: IntArray
    """Flat int32: a PREFILL_ITEM for each of `items` items, padded to at least 8 numbers."""
    tables: IntArray
    """The block tables of the pieces in order, flat int32, padded to at least 8 numbers."""


def make_prefill_work_list(
    pieces: Sequence[PrefillPiece], block_size: int, attention_window: AttentionWindow, tile: int
) -> PrefillWorkList:
    """Return a step's prefill work: every piece, cut where its row's tokens are multiples of `tile`. The items that
    see the most tokens come first, so that the last ones to start are short.

    The kernel treats a chunk as a row of its own, whose tokens are counted from the chunk's start. Chunks must consist
    of whole blocks.
    """
    items, tables, blocks = [], [], 0
    for piece in pieces:
        for start, end in _attended_ranges(piece, attention_window):
            first, last = max(piece.first - start, 0), end - start
            tile_start = np.arange(first // tile * tile, last, tile)
            tile_items = np.empty(len(tile_start), PREFILL_ITEM)
            tile_items["begin"], tile_items["end"] = np.maximum(tile_start, first), np.minimum(tile_start + tile, last)
            tile_items["blocks"] = blocks + start // block_size
            tile_items["origin"] = piece.begin - pieces[0].begin - piece.first + start
            items.append(tile_items)
        tables.append(piece.blocks(block_size))
        blocks += len(tables[-1])
    all_items = np.concatenate(items)
    all_items["reach"] = (
        EVERYTHING if attention_window.tokens is None or attention_window.chunked else attention_window.tokens
    )
    visible_counts = np.minimum(all_items["end"], all_items["reach"] + all_items["end"] - all_items["begin"])
    plan = all_items[np.argsort(-visible_counts, kind="stable")].view(np.int32)
    return PrefillWorkList(len(all_items), _pad(plan), _pad(np.concatenate(tables)))


def _attended_ranges(piece: PrefillPiece, attention_window: AttentionWindow) -> Iterator[tuple[int, int]]:
    """Yield `start, end` of each range that the kernel treats as a row: each chunk the piece sees, or the whole row."""
    if attention_window.tokens is None or not attention_window.chunked:
        yield 0, piece.tokens
        return
    for start in range(attention_window.oldest_visible(piece.first), piece.tokens, attention_window.tokens):
        yield start, min(start + attention_window.tokens, piece.tokens)


def _pad(numbers: IntArray) -> IntArray:
    """Pad an array with zeros to at least 8 numbers, because MLX passes smaller arrays in another address space."""
    return np.pad(numbers, (0, max(0, SMALL - len(numbers))))
