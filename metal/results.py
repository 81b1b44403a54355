"""Where a decode kernel writes its results: lines of its entry that declare `results`."""

from __future__ import annotations

PARTIAL = """
  const Partials<VALUE_DIM> results = {(device Partial<VALUE_DIM>*)partials + item_head * (GROUP * TOKENS)};"""
"""Lines that leave partial results in `partials` `[items, query_heads * TOKENS]`, for the reduce kernel."""

_WHOLE = """
  const Whole<T, VALUE_DIM, TOKENS, SINKS> results = {
      attended + row_head * (GROUP * TOKENS * VALUE_DIM), head_sinks + kv_head * GROUP};"""


def make_whole_entry(entry: str) -> str:
    """Return the entry lines of a decode kernel, changed so that they write final results to `attended` `[rows,
    query_heads, TOKENS, VALUE_DIM]` instead of partial ones. They need the template argument SINKS, the input
    `head_sinks`, and one work item for each row.
    """
    return entry.replace(PARTIAL, _WHOLE)
