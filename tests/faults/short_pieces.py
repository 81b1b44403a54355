"""Faults in how short pieces are attended to together."""

from __future__ import annotations

from tests.faults.planted import Fault

TESTS = (
    "attention/test_piece_batches.py",
    "attention/test_token_rows.py",
    "attention/test_reference.py",
)

STEP, BATCHES = "cortexmlx/attention/reference_step.py", "cortexmlx/attention/reference_step.py"
ROWS, BACKEND = "cortexmlx/attention/metal.py", "cortexmlx/attention/metal.py"

FAULTS = (
    Fault(
        "a verified token sees the one after it",
        STEP,
        "arena_visible = (position <= query_position)",
        "arena_visible = (position <= np.minimum(query_position + 1, query_position.max(axis=1, keepdims=True)))",
    ),
    Fault(
        "all tokens of a short piece have the newest one's window",
        STEP,
        "oldest_token = self._window.oldest_visible(np.maximum(query_position + tail_tokens, 0))",
        "oldest_token = self._window.oldest_visible(np.maximum(query_position.max(axis=1, "
        "keepdims=True) + tail_tokens, 0))",
    ),
    Fault(
        "the window of a short piece is one token longer",
        STEP,
        "(position >= oldest_token)",
        "(position >= oldest_token - 1)",
    ),
    Fault(
        "a short piece's first block is that of its newest token",
        STEP,
        "np.maximum(queries.min(axis=1), 0)) // block_size",
        "np.maximum(queries.max(axis=1), 0)) // block_size",
    ),
    Fault(
        "distances of a short piece count from its newest token",
        STEP,
        "(self._queries + tail_tokens)[:, :, None]",
        "np.broadcast_to(self._queries[:, -1:] + tail_tokens, self._queries.shape)[:, :, None]",
    ),
    Fault("short pieces are filled up with the next piece's tokens", BATCHES, ", p.end - 1) for p", ", p.end) for p"),
    Fault(
        "short pieces stay in the order of their batches",
        BATCHES,
        "None if in_order else mx.array(order",
        "None if flat_tokens else mx.array(order",
    ),
    Fault(
        "positions of short pieces count from the step's first token",
        BATCHES,
        "piece.first - piece.begin",
        "piece.first",
    ),
    Fault(
        "a piece of 17 tokens is short",
        BATCHES,
        "piece.end - piece.begin <= MAX_SHORT_TOKENS",
        "piece.end - piece.begin - 1 <= MAX_SHORT_TOKENS",
    ),
    Fault(
        "a token's row ends where its piece does",
        ROWS,
        "np.arange(piece.first + 1, piece.tokens + 1)",
        "np.full(piece.tokens - piece.first, piece.tokens)",
    ),
    Fault(
        "results stay in the order of the rows",
        ROWS,
        "if self._inverse_order is None",
        "if self._inverse_order is not None or output.size",
    ),
    Fault(
        "the rows of all tokens have the first piece's blocks",
        ROWS,
        "zip(counts, blocks, strict",
        "zip(counts, blocks[:1] * len(blocks), strict",
    ),
    Fault(
        "pieces become rows where answers must be repeatable",
        BACKEND,
        "not prefill\n            and not reproducible\n            and",
        "not prefill and",
    ),
)
