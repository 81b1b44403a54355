"""The Metal lines with which a decode kernel finds its keys and values: names of inputs, and lines that locate a row
and a KV head in them. The kernels' own text is the same for plain and for quantized keys and values.
"""

from __future__ import annotations

_KINDS = ("keys", "values")
_PARTS = ("", "_scales", "_biases")

SLABS = tuple(f"{place}_{kind}" for place in ("arena", "tail") for kind in _KINDS)
"""Inputs: the arena's slabs `[kv_heads, slots, dim]` and the tails `[rows, kv_heads, columns, dim]`. If quantized, they
hold the codes in 32-bit words.
"""

SCALES, BIASES = (tuple(f"{name}{part}" for name in SLABS) for part in _PARTS[1:])
"""Inputs: the scales and the biases of quantized keys and values, one number of each for every group."""

WORK = """\
  const int rows = queries_shape[0], kv_heads = arena_keys_shape[0];
  const int share = int(threadgroup_position_in_grid.y) % SHARES;
  const int kv_head = int(threadgroup_position_in_grid.y) / SHARES;
  const int item = int(threadgroup_position_in_grid.z);
  const device RowItems* of_rows = (const device RowItems*)decode_plan;
  const device WorkItem& work = ((const device WorkItem*)(of_rows + rows))[item];
  const int64_t row = work.row;
  const int64_t row_head = row * kv_heads + kv_head, item_head = int64_t(item) * kv_heads + kv_head;"""
"""Lines of an entry that find a threadgroup's work item, its row, its KV head, and its share of the KV head's queries
and values: one of SHARES, which the entry declares. Threadgroups that read the same keys are neighbours in the grid.
"""

_BEGIN = """
  const int64_t first_slot = kv_head * int64_t(arena_keys_shape[1]), first_column = row_head * tail_keys_shape[2];"""


def _quantized_source(kind: str, dim: str) -> str:
    """Return the Metal lines that find quantized keys or values in their arrays."""
    arrays = ", ".join(f"{{arena_{kind}{part}, tail_{kind}{part}}}" for part in _PARTS)
    return f"""
  const QuantizedSource<KV, {dim}, BITS, QUANT_GROUP> {kind} = {{
      {arrays}, uint(first_slot), uint(first_column)}};"""


PLAIN = _BEGIN + "".join(
    f"""
  const HeadSource<KV, {dim}> {kind} = {{arena_{kind} + first_slot * {dim}, tail_{kind} + first_column * {dim}}};"""
    for kind, dim in zip(_KINDS, ("KEY_DIM", "VALUE_DIM"), strict=True)
)
"""Lines of an entry that declare plain `keys` and `values`. They use `kv_head` and `row_head`."""

QUANTIZED = _BEGIN + _quantized_source("keys", "KEY_DIM") + _quantized_source("values", "VALUE_DIM")
"""Lines of an entry that declare `keys` and `values` of BITS bits in groups of QUANT_GROUP."""
