"""Faults at the edges of a piece that lie amid a tile: queries and results beside it."""

from __future__ import annotations

from tests.faults.planted import PREFILL, WORK, Fault

FAULTS = (
    Fault(
        "queries before a piece are read",
        PREFILL,
        "clamp(query + n % 2, begin, end - 1)",
        "min(query + n % 2, end - 1)",
    ),
    Fault(
        "queries behind a piece are read", PREFILL, "clamp(query + n % 2, begin, end - 1)", "max(query + n % 2, begin)"
    ),
    Fault(
        "the query behind a piece is read",
        PREFILL,
        "clamp(query + n % 2, begin, end - 1)",
        "clamp(query + n % 2, begin, end)",
    ),
    Fault("results behind a piece are written", PREFILL, "query + e >= begin && query + e < end", "query + e >= begin"),
    Fault("a result behind a piece is written", PREFILL, "query + e < end", "query + e <= end"),
    Fault("a tile begins before its piece", WORK, "np.maximum(tile_start, first), np", "tile_start, np"),
    Fault(
        "a tile ends behind its piece",
        WORK,
        "np.minimum(tile_start + tile, last)",
        "tile_start + tile",
    ),
)

TESTS = ("metal/test_prefill.py",)
"""The tests that judge these faults."""
