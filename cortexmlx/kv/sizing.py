"""How many bytes the KV cache takes, and how many it should get: pure arithmetic, no mlx.

The size of a cache is `(Dk + Dv) * kv_heads * layers * bytes` per token: every layer keeps one key of `Dk` and one
value of `Dv` numbers per KV head. With `Dk = Dv = d` this is the textbook `2 * L * H * d * T * b` (L=32, H=32, d=128,
T=8192, b=2: 4 GiB).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.attention_window import AttentionWindow
from cortexmlx.kv.spec import DEFAULT_BLOCK_SIZE, TAIL_COLUMNS, Counts, LayerGroup

DEFAULT_TOKENS_PER_ROW = 32 * 1024
"""What one row gets in the default arena, where the model's context allows it."""

DEFAULT_FULL_ROWS = 4
"""How many rows of that length the default arena holds: memory is shared with every other app."""

SNAPSHOTS_PER_ROW = 4
"""How many snapshots of its state a row gets in the mean: at the end of a prompt, of turns, where texts part."""

_FIRST_TOKENS = 2048
"""Tokens that the arena holds before it grows: small enough to be there at once."""

_NO_LIMIT = 1 << 40
"""Blocks where each more is of use."""


def bytes_per_token(groups: Iterable[LayerGroup], itemsize: int | None = None) -> int:
    """Bytes of one token in all layers, while it is inside every window. 36 layers, 8 KV heads, d=128 at 2 bytes:
    147,456 bytes (144 KiB).

    `itemsize` is the bytes of a number, here and below; None: that of each group's dtype.
    """
    return sum(_per_token(group, itemsize) for group in groups)


def sequence_bytes(groups: Iterable[LayerGroup], tokens: int, itemsize: int | None = None) -> int:
    """Bytes of one sequence of `tokens`: a windowed layer keeps at most its window, a recurrent one its fixed state."""
    return row_bytes(groups := tuple(groups)) + sum(
        _per_token(group, itemsize) * (tokens if group.spec.window is None else min(tokens, group.spec.window))
        for group in groups
    )


def row_bytes(groups: Iterable[LayerGroup]) -> int:
    """Bytes of the state that a sequence has whatever its length: that of recurrent layers."""
    return sum(group.spec.row_bytes * len(group.layers) for group in groups)


def states_bytes(groups: Iterable[LayerGroup], rows: int) -> int:
    """Bytes of the states of `rows` rows: after a row's last step, and of the step that is being computed."""
    return 2 * rows * row_bytes(groups)


def split_memory(groups: Iterable[LayerGroup], memory: int, rows: int) -> tuple[int, int]:
    """Bytes for keys and values, and how many snapshots of a row's state, out of the cache's `memory`.

    Snapshots get a quarter of it at most, and all of it where tokens take none.
    """
    each = row_bytes(groups := tuple(groups))
    if not each:
        return memory, 0
    share = memory // 4 if bytes_per_token(groups) else memory
    snapshots = min(SNAPSHOTS_PER_ROW * rows, share // each)
    return memory - snapshots * each, snapshots


def tokens_that_fit(groups: Iterable[LayerGroup], available: int, itemsize: int | None = None) -> int | None:
    """The longest single sequence that fits `available` bytes; None where length costs nothing beyond the windows."""
    groups = tuple(groups)
    growing = bytes_per_token((g for g in groups if g.spec.window is None), itemsize)
    widest = max((g.spec.window for g in groups if g.spec.window is not None), default=0)
    beyond = available - sequence_bytes(groups, widest, itemsize)
    if beyond >= 0:
        return widest + beyond // growing if growing else None
    low, high = 0, widest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sequence_bytes(groups, middle, itemsize) <= available else (low, middle)
    return low


def tail_bytes(groups: Iterable[LayerGroup], rows: int, itemsize: int | None = None) -> int:
    """Bytes of the tail for `rows` active rows: `TAIL_COLUMNS` tokens of every layer per row, twice.

    The tail is functional: while a step writes its column, the old and the new tail are both there.
    """
    return 2 * rows * TAIL_COLUMNS * bytes_per_token(groups, itemsize)


def _per_token(group: LayerGroup, itemsize: int | None) -> int:
    size = group.spec.itemsize if itemsize is None else itemsize
    return group.spec.bytes_of(size) * len(group.layers)


def logits_bytes(rows: int, vocab_size: int) -> int:
    """Bytes of one step's logits: `[rows, vocab_size]`, in float32 where they are sampled."""
    return rows * vocab_size * 4


def reserved_bytes(groups: Iterable[LayerGroup], rows: int, vocab_size: int, weights: int) -> int:
    """Bytes that are not the cache's: weights, and the tails, states and logits of `rows` rows."""
    groups = tuple(groups)
    return weights + tail_bytes(groups, rows) + states_bytes(groups, rows) + logits_bytes(rows, vocab_size)


def first_blocks(most: int, block_size: int) -> int:
    """Blocks of a group that the arena has at first, of at most `most`."""
    return min(most, -(-_FIRST_TOKENS // block_size))


def row_blocks(attention_window: AttentionWindow, block_size: int) -> int | None:
    """Blocks of a group that a decoding row has at most: those that the next token sees, and those of the tail's
    columns. None: all of its tokens'.

    From blocks of 16 tokens on, a window of w tokens takes at most `ceil(w / block_size) + 2`.
    """
    if attention_window.tokens is None:
        return None
    tokens = attention_window.tokens - 1 + TAIL_COLUMNS
    return (tokens - 2) // block_size + 2


def row_kv_bytes(groups: Iterable[LayerGroup], tokens: int, block_size: int, itemsize: int | None = None) -> int:
    """Bytes of a running row of `tokens` tokens: whole blocks, of a window as many as it has at most, and its state."""
    places = -(-tokens // block_size)
    return row_bytes(groups := tuple(groups)) + sum(
        _per_token(group, itemsize)
        * block_size
        * min(places, row_blocks(group.spec.attention_window, block_size) or places)
        for group in groups
    )


@dataclass(frozen=True)
class Load:
    """What an arena must do: `rows` rows in blocks of `block_size` tokens, whose prompts are computed in pieces of at
    most `piece` tokens a step, together.
    """

    rows: int
    piece: int
    block_size: int = DEFAULT_BLOCK_SIZE

    def limit(self, group: LayerGroup) -> int:
        """Blocks of a group that are of use. Where all tokens are seen there is no limit.

        Of a window: what the rows have at most, the pieces of a step, and as much as the rows have for prefixes that
        are cached, since the last window of each is all that those who begin with it need.
        """
        most = row_blocks(group.spec.attention_window, self.block_size)
        return _NO_LIMIT if most is None else self.rows * (2 * most + 1) - (-self.piece // self.block_size)


def default_kv_tokens(context: int, max_rows: int) -> int:
    """Tokens of the default arena: `min(context, 32k) * min(max_rows, 4)`."""
    return min(context, DEFAULT_TOKENS_PER_ROW) * min(max_rows, DEFAULT_FULL_ROWS)


def default_kv_bytes(
    groups: Sequence[LayerGroup], load: Load, context: int, working_set: int, reserved: int, itemsize: int | None = None
) -> int:
    """Bytes of the default cache: `default_kv_tokens` in rows of whole blocks, or what is of use of those, and
    snapshots of the rows' states, at most half of what the machine has left.

    `working_set` is what the device recommends to use in all; `reserved` what weights, tails and logits take of it.
    0 means that nothing is left.
    """
    room = max(working_set - reserved, 0) // 2
    blocks = -(-context // load.block_size)  # a row's last block is a whole one
    tokens = default_kv_tokens(blocks * load.block_size, load.rows)
    kept = sum(_per_token(g, itemsize) * min(tokens, load.limit(g) * load.block_size) for g in groups)
    return min(kept + SNAPSHOTS_PER_ROW * load.rows * row_bytes(groups), room)


def blocks_that_fit(memory: int, groups: Sequence[LayerGroup], load: Load, itemsize: int | None = None) -> Counts:
    """Blocks of each group in `memory` bytes: equally many, but in no group more than are of use."""
    limits = [load.limit(group) for group in groups]
    size = [_per_token(group, itemsize) * load.block_size for group in groups]
    blocks = list(limits)
    growing = sorted(range(len(groups)), key=lambda g: limits[g])
    while growing:
        each = memory // sum(size[g] for g in growing)
        if limits[growing[0]] > each:
            for g in growing:
                blocks[g] = each
            break
        memory -= size[g := growing.pop(0)] * limits[g]
    return tuple(blocks)


def sequences_that_fit(groups: Sequence[LayerGroup], blocks: Counts, block_size: int, tokens: int) -> int:
    """How many sequences of `tokens` tokens are at once in an arena of so many blocks of each group."""
    needed = -(-tokens // block_size)
    most = [row_blocks(group.spec.attention_window, block_size) or needed for group in groups]
    return min(count // min(needed, each) for count, each in zip(blocks, most, strict=True))


def check_kv_memory(asked: int, memory: int, working_set: int, machine: str = "this machine") -> None:
    """Raise InvalidRequest if more is asked for than the machine has."""
    if asked > memory:
        raise InvalidRequest(
            f"a KV memory of {format_bytes(asked)} is more than {machine} has: {format_bytes(memory)}, "
            f"{format_bytes(working_set)} of it for models. `cortexmlx plan` says what a model leaves of it."
        )


def beyond_note(asked: int, left: int, machine: str = "this machine") -> tuple[str, ...]:
    """A word about a KV memory that the machine cannot give, if it is one."""
    if asked <= left:
        return ()
    return (
        f"KV memory may grow to {format_bytes(asked)}, but beside the weights {machine} has {format_bytes(left)} "
        "for it: a full cache may be refused memory, or make the machine swap",
    )


def arena_blocks(memory: int, groups: Sequence[LayerGroup], load: Load) -> Counts:
    """`blocks_that_fit` in an arena of `memory` bytes. Raises InvalidRequest if that is not one of each group."""
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
    """Bytes of "4GB" (10**9), "4GiB" or "4G" (2**30), "512MB", "1.5GiB" or a plain number of bytes.

    Raises InvalidRequest for anything else, and for sizes below one byte.
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
    """A size for people, in binary units and at most three digits after 1000: `144 KiB`, `4 GiB`, `1.25 GiB`, `0 B`."""
    size = float(size)
    exponent = 0 if abs(size) < 1024 else min(int(math.log2(abs(size)) / 10), 4)
    scaled = size / 1024**exponent
    digits = 0 if exponent == 0 or abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
    number = f"{scaled:.{digits}f}"
    return f"{number.rstrip('0').rstrip('.') if digits else number} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"
