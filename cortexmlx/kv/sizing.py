"""How many bytes the KV cache takes, and how many it should get. Arithmetic without mlx.

The size of a cache is `(Dk + Dv) * kv_heads * layers * bytes` per token: each layer keeps one key of `Dk` and one value
of `Dv` numbers per KV head. With `Dk = Dv = d` this is the textbook `2 * L * H * d * T * b` (L=32, H=32, d=128, T=8192,
b=2: 4 GiB).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from operator import mul

from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.spec import (
    DEFAULT_BLOCK_SIZE,
    LONG_TAIL_COLUMNS,
    LONG_TAIL_ROWS,
    TAIL_COLUMNS,
    AttentionWindow,
    GroupCounts,
    LayerGroup,
)

DEFAULT_TOKENS_PER_ROW = 32 * 1024
"""Tokens that one row gets in the default arena, if the model's context is that long."""

DEFAULT_FULL_ROWS = 4
"""How many rows of that length the default arena holds. Other apps need memory, too."""

SNAPSHOTS_PER_ROW = 4
"""How many snapshots of its state a row gets on average: at the end of a prompt, of turns, and where texts part."""

MIN_RESUME_POINTS = 12
"""How many places where texts can be continued are kept, for few rows, too: the end of a conversation, of its last
user's message and of its system prompt, the same of another one, and some in between. That is snapshots of recurrent
states, and windows of cached texts.
"""

_POINTS_MEMORY_DIVISOR = 4
"""These may take this part of the memory: one of so many parts."""

_INITIAL_TOKENS = 2048
"""Tokens that the arena holds before it grows. So few are allocated at once."""

_NO_LIMIT = 1 << 40
"""Blocks of a group in which each further block is of use."""


def bytes_per_token(groups: Iterable[LayerGroup], itemsize: int | None = None) -> int:
    """Return the bytes of one token in all layers while it is inside every window. For example, 36 layers with 8 KV
    heads of d=128 at 2 bytes take 147,456 bytes (144 KiB).

    `itemsize` is the number of bytes of a number, here and below. None takes that of each group's dtype.
    """
    return sum(_group_token_bytes(group, itemsize) for group in groups)


def sequence_bytes(groups: Iterable[LayerGroup], tokens: int, itemsize: int | None = None) -> int:
    """Return a sequence's bytes. A windowed layer keeps at most its window's tokens, a recurrent one a fixed state."""
    return row_state_bytes(groups := tuple(groups)) + sum(
        _group_token_bytes(group, itemsize) * (tokens if group.spec.window is None else min(tokens, group.spec.window))
        for group in groups
    )


def row_state_bytes(groups: Iterable[LayerGroup]) -> int:
    """Return the bytes of one sequence's recurrent states in all layers. The sequence's length does not matter."""
    return sum(group.spec.row_bytes * len(group.layers) for group in groups)


def step_state_bytes(groups: Iterable[LayerGroup], rows: int) -> int:
    """Return the bytes of the recurrent states of `rows` rows during a step: those before it and those it computes."""
    return 2 * rows * row_state_bytes(groups)


def split_memory(groups: Iterable[LayerGroup], memory: int, rows: int) -> tuple[int, int]:
    """Split the cache's `memory` into bytes for keys and values, and a number of snapshots of a row's state.

    Snapshots get at most a quarter of it, or all of it if tokens take no memory.
    """
    each = row_state_bytes(groups := tuple(groups))
    if not each:
        return memory, 0
    share = memory // _POINTS_MEMORY_DIVISOR if bytes_per_token(groups) else memory
    snapshots = min(_wanted_snapshots(rows), share // each)
    return memory - snapshots * each, snapshots


def _wanted_snapshots(rows: int) -> int:
    """Return how many snapshots of recurrent states `rows` rows should have."""
    return max(SNAPSHOTS_PER_ROW * rows, MIN_RESUME_POINTS)


def tokens_that_fit(groups: Iterable[LayerGroup], available: int, itemsize: int | None = None) -> int | None:
    """Return the longest sequence's length in `available` bytes; None if length costs nothing beyond the windows."""
    groups = tuple(groups)
    growing_bytes = bytes_per_token((g for g in groups if g.spec.window is None), itemsize)
    widest = max((g.spec.window for g in groups if g.spec.window is not None), default=0)
    remaining_bytes = available - sequence_bytes(groups, widest, itemsize)
    if remaining_bytes >= 0:
        return widest + remaining_bytes // growing_bytes if growing_bytes else None
    low, high = 0, widest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sequence_bytes(groups, middle, itemsize) <= available else (low, middle)
    return low


def tail_bytes(groups: Iterable[LayerGroup], rows: int, itemsize: int | None = None, long_tail_rows: int = 0) -> int:
    """Return the most bytes that the tail takes with up to `rows` active rows. Up to `long_tail_rows` rows have
    `LONG_TAIL_COLUMNS` columns, more rows have `TAIL_COLUMNS`.

    That is twice its columns: while a step writes its column, the old and the new tail may both exist.
    """
    tokens = max(rows * TAIL_COLUMNS, min(rows, long_tail_rows) * LONG_TAIL_COLUMNS)
    return 2 * tokens * bytes_per_token(groups, itemsize)


def max_long_tail_rows(groups: Iterable[LayerGroup], weights: int) -> int:
    """Return the most rows for which a tail on a GPU should be long (`LONG_TAIL_COLUMNS` columns); 0 if none. The
    model has `weights` bytes of weights.

    A flush drains the pipeline, which costs about a step: at least the time in which the weights are read. A longer
    tail has fewer flushes, but each step reads and writes all its columns. A layer with a window would need more blocks
    for a row than `max_row_blocks`, so such models keep the short tail.
    """
    groups = tuple(groups)
    if any(group.spec.window is not None for group in groups):
        return 0
    copied_bytes = 2 * (LONG_TAIL_COLUMNS - TAIL_COLUMNS) * bytes_per_token(groups)
    saved_bytes = weights // TAIL_COLUMNS - weights // LONG_TAIL_COLUMNS
    return min(LONG_TAIL_ROWS, saved_bytes // copied_bytes) if copied_bytes else 0


def _group_token_bytes(group: LayerGroup, itemsize: int | None) -> int:
    """Return the bytes of one token in all layers of a group."""
    size = group.spec.itemsize if itemsize is None else itemsize
    return group.spec.bytes_per_token_with(size) * len(group.layers)


def logits_bytes(rows: int, vocab_size: int) -> int:
    """Return the bytes of one step's logits, `[rows, vocab_size]`, in float32 as they are sampled."""
    return rows * vocab_size * 4


def reserved_bytes(
    groups: Iterable[LayerGroup], rows: int, vocab_size: int, weights: int, long_tail_rows: int = 0
) -> int:
    """Return the bytes that the cache must leave free: for the weights, and for `rows` rows their tails (newest
    tokens, not in a block yet), recurrent states and logits.
    """
    groups = tuple(groups)
    tail_size = tail_bytes(groups, rows, long_tail_rows=long_tail_rows)
    return weights + tail_size + step_state_bytes(groups, rows) + logits_bytes(rows, vocab_size)


def initial_blocks(max_blocks: int, block_size: int) -> int:
    """Return how many blocks of a group the arena begins with, if it may have `max_blocks`."""
    return min(max_blocks, -(-_INITIAL_TOKENS // block_size))


def max_row_blocks(attention_window: AttentionWindow, block_size: int) -> int | None:
    """Return the most blocks of a windowed group that a decoding row has: those that the next token sees, and those of
    the tail's columns. None without a window.

    With blocks of 16 tokens or more, a window of w tokens takes at most `ceil(w / block_size) + 2`.
    """
    if attention_window.tokens is None:
        return None
    tokens = attention_window.tokens - 1 + TAIL_COLUMNS
    return (tokens - 2) // block_size + 2


def row_kv_bytes(groups: Iterable[LayerGroup], tokens: int, block_size: int, itemsize: int | None = None) -> int:
    """Return a running row's bytes: its blocks, at most a window's in a windowed group, and its recurrent states."""
    row_blocks = -(-tokens // block_size)
    return row_state_bytes(groups := tuple(groups)) + sum(
        _group_token_bytes(group, itemsize)
        * block_size
        * min(row_blocks, max_row_blocks(group.spec.attention_window, block_size) or row_blocks)
        for group in groups
    )


PREFILL_BUDGET = 512
"""Prompt tokens of a step, by default."""

LONE_PREFILL_BUDGET = 2048
"""Prompt tokens of a step in which no row decodes, by default on an Apple GPU."""


@dataclass(frozen=True)
class ArenaDemand:
    """What an arena must serve: `rows` rows in blocks of `block_size` tokens. Their prompts are computed in pieces, at
    most `prefill_budget` tokens a step for all rows together; up to `lone_prefill_budget` while no row decodes.
    """

    rows: int
    prefill_budget: int
    block_size: int = DEFAULT_BLOCK_SIZE
    lone_prefill_budget: int = 0

    @classmethod
    def from_options(cls, rows: int, prefill_budget: int | None, block_size: int, on_gpu: bool = False) -> ArenaDemand:
        """Return the demand of an engine with these options, on an Apple GPU or not."""
        lone_budget = LONE_PREFILL_BUDGET if on_gpu and prefill_budget is None else 0
        return cls(rows, prefill_budget or PREFILL_BUDGET, block_size, lone_budget)

    def max_useful_blocks(self, group: LayerGroup) -> int:
        """Return the number of a group's blocks beyond which more have no use: no limit if the group sees all tokens.

        A windowed group can use the blocks of all rows, those of the pieces of a step, and as many again as the rows
        have for resume points, or those of `MIN_RESUME_POINTS` points: a text that begins with a cached prefix needs
        only the prefix's last window.
        """
        window_blocks = max_row_blocks(group.spec.attention_window, self.block_size)
        if window_blocks is None:
            return _NO_LIMIT
        return (
            self.rows * (2 * window_blocks + 1)
            - (-max(self.prefill_budget, self.lone_prefill_budget) // self.block_size)
            + self.extra_point_blocks(group)
        )

    def extra_point_blocks(self, group: LayerGroup) -> int:
        """Return how many of the `max_useful_blocks` are for resume points beyond one for each row."""
        window_blocks = max_row_blocks(group.spec.attention_window, self.block_size)
        return 0 if window_blocks is None else max(0, MIN_RESUME_POINTS - self.rows) * window_blocks


def default_kv_tokens(context: int, max_rows: int) -> int:
    """Return how many tokens the default arena holds: `min(context, 32k) * min(max_rows, 4)`."""
    return min(context, DEFAULT_TOKENS_PER_ROW) * min(max_rows, DEFAULT_FULL_ROWS)


def default_kv_bytes(
    groups: Sequence[LayerGroup],
    load: ArenaDemand,
    context: int,
    working_set: int,
    occupied_bytes: int,
    itemsize: int | None = None,
) -> int:
    """Return the bytes of the default cache: `default_kv_tokens` in whole blocks, less where more blocks are of no
    use, and snapshots of the rows' states. At most half of what the machine has left.

    `working_set` is how many bytes the device recommends to use in all. `occupied_bytes` is how many of these weights,
    tails and logits take. 0 means that nothing is left.
    """
    available_bytes = max(working_set - occupied_bytes, 0) // 2
    blocks = -(-context // load.block_size)  # a row's last block is a whole one
    tokens = default_kv_tokens(blocks * load.block_size, load.rows)
    block_bytes = sum(
        _group_token_bytes(g, itemsize) * min(tokens, load.max_useful_blocks(g) * load.block_size) for g in groups
    )
    return min(block_bytes + _wanted_snapshots(load.rows) * row_state_bytes(groups), available_bytes)


def draft_kv_bytes(
    memory: int, groups: Iterable[LayerGroup], draft: Iterable[LayerGroup], tokens: int, itemsize: int | None = None
) -> int:
    """Return a draft model's part of the cache's `memory`: its share of what both models keep for a row of `tokens`
    tokens, so that both arenas hold the same rows. `draft` are the draft model's layer groups.
    """
    draft_size, target_size = sequence_bytes(draft, tokens, itemsize), sequence_bytes(groups, tokens, itemsize)
    return memory * draft_size // max(1, draft_size + target_size)


def blocks_that_fit(
    memory: int, groups: Sequence[LayerGroup], load: ArenaDemand, itemsize: int | None = None
) -> GroupCounts:
    """Return how many blocks of each group fit into `memory` bytes: the same number for all, but in no group more than
    are of use. The resume points beyond one for each row get at most a quarter of the memory.
    """
    size = [_group_token_bytes(group, itemsize) * load.block_size for group in groups]
    extra_blocks = [load.extra_point_blocks(group) for group in groups]
    extra_bytes, share = sum(map(mul, size, extra_blocks)), memory // _POINTS_MEMORY_DIVISOR
    cut_blocks = [0 if extra_bytes <= share else blocks - blocks * share // extra_bytes for blocks in extra_blocks]
    limits = [load.max_useful_blocks(group) - cut_count for group, cut_count in zip(groups, cut_blocks, strict=True)]
    blocks = list(limits)
    open_groups = sorted(range(len(groups)), key=lambda g: limits[g])
    while open_groups:
        each = memory // sum(size[g] for g in open_groups)
        if limits[open_groups[0]] > each:
            for g in open_groups:
                blocks[g] = each
            break
        memory -= size[g := open_groups.pop(0)] * limits[g]
    return tuple(blocks)


def sequences_that_fit(groups: Sequence[LayerGroup], blocks: GroupCounts, block_size: int, tokens: int) -> int:
    """Return how many sequences of `tokens` tokens fit at once into an arena of `blocks` blocks of each group."""
    row_blocks = -(-tokens // block_size)
    group_blocks = [max_row_blocks(group.spec.attention_window, block_size) or row_blocks for group in groups]
    return min(count // min(row_blocks, each) for count, each in zip(blocks, group_blocks, strict=True))


def check_kv_memory(kv_memory: int, memory: int, working_set: int, machine: str = "this machine") -> None:
    """Raise InvalidRequest if a KV memory of `kv_memory` bytes is more than the machine's `memory`."""
    if kv_memory > memory:
        raise InvalidRequest(
            f"a KV memory of {format_bytes(kv_memory)} is more than {machine} has: {format_bytes(memory)}, "
            f"{format_bytes(working_set)} of it for models. `cortexmlx plan` says what a model leaves of it."
        )


def kv_memory_warning(kv_memory: int, available_bytes: int, machine: str = "this machine") -> tuple[str, ...]:
    """Return a note if a KV memory of `kv_memory` bytes is more than the machine has left; otherwise none."""
    if kv_memory <= available_bytes:
        return ()
    return (
        f"KV memory may grow to {format_bytes(kv_memory)}, but beside the weights {machine} has "
        f"{format_bytes(available_bytes)} for it: a full cache may be refused memory, or make the machine swap",
    )


def arena_blocks(memory: int, groups: Sequence[LayerGroup], load: ArenaDemand) -> GroupCounts:
    """Return how many blocks of each group fit in `memory` bytes. Raises InvalidRequest if some group has none."""
    blocks = blocks_that_fit(memory, groups, load)
    if not min(blocks):
        raise InvalidRequest(
            f"a KV memory of {format_bytes(memory)} holds no block of {load.block_size} tokens: "
            f"give it at least {format_bytes(bytes_per_token(groups) * load.block_size)}"
        )
    return blocks


_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}{s}": 1024**i for i, p in enumerate("kmgt", 1) for s in ("", "ib")},
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Parse a size and return its bytes: "4GB" (10**9), "4GiB" or "4G" (2**30), "512MB", "1.5GiB" or a plain number of
    bytes.

    Raises InvalidRequest for any other text, and for sizes below one byte.
    """
    match = _SIZE.fullmatch(str(text)) if isinstance(text, (str, Real)) and not isinstance(text, bool) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise InvalidRequest(f"{text!r:.80} is not a size: write 4GB, 512MB, 1.5GiB or a number of bytes")
    size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size < 1:
        raise InvalidRequest(f"{text!r} is less than one byte: write 4GB, 512MB, 1.5GiB or a number of bytes")
    if size >= 2**63:
        raise InvalidRequest(f"{str(text)[:80]!r} is more than any machine has: write 4GB, 512MB or 1.5GiB")
    return size


def format_bytes(size: float) -> str:
    """Return a size for people, in binary units and about three digits: `144 KiB`, `4 GiB`, `1.25 GiB`, `0 B`."""
    size = float(size)
    exponent = 0 if abs(size) < 1024 else min(int(math.log2(abs(size)) / 10), 4)
    scaled_size = size / 1024**exponent
    digits = 0 if exponent == 0 or abs(scaled_size) >= 100 else 1 if abs(scaled_size) >= 10 else 2
    number = f"{scaled_size:.{digits}f}"
    return f"{number.rstrip('0').rstrip('.') if digits else number} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"
