"""Faults at the ends of a thread's own arrays, which unrolling makes constant, and of library functions' ranges."""

from __future__ import annotations

from tests.faults.planted import (
    DECODE,
    MATRIX,
    PREFILL,
    QUANTIZED,
    REDUCE,
    SHARED,
    TESTS,
    TILES,
    WIDE,
    Fault,
)

__all__ = ["FAULTS", "TESTS"]

FAULTS = (
    Fault(
        "zeros behind a thread's output",
        DECODE,
        "n < V_PER_LANE; n++) {\n      out[h][n] = 0.0f;",
        "n <= V_PER_LANE; n++) {\n      out[h][n] = 0.0f;",
    ),
    Fault(
        "zeros behind the output that is reduced",
        REDUCE,
        "n < V_PER_LANE; n++) {\n    out[n] = 0.0f;",
        "n <= V_PER_LANE; n++) {\n    out[n] = 0.0f;",
    ),
    Fault("a pack has one number more", SHARED, "i < PACK; i++", "i <= PACK; i++"),
    Fault("a chunk's second half ends behind it", TILES, "numbers[4 + i] = more[i];", "numbers[5 + i] = more[i];"),
    Fault(
        "all chunks of a value in matrices have eight numbers",
        MATRIX,
        "n < COUNT; n++) {\n    simdgroup_matrix<KV, 8, 8> tokens;",
        "n < 8; n++) {\n    simdgroup_matrix<KV, 8, 8> tokens;",
    ),
    Fault(
        "all chunks of a piece's value have eight numbers",
        PREFILL,
        "n < COUNT; n++) {",
        "n < 8; n++) {",
    ),
    Fault(
        "a wide output has one matrix more",
        WIDE,
        "m < ValueShare::CHUNKS * 4; m++) {\n    out[m] =",
        "m <= ValueShare::CHUNKS * 4; m++) {\n    out[m] =",
    ),
    Fault("a pack of codes has one more", QUANTIZED, "i < PACK; i++", "i <= PACK; i++"),
    Fault("one word more is kept than is loaded", "metal/shaders/words.h", "i < N; i++", "i <= N; i++"),
    Fault("the soft cap is a fast tangent", DECODE, "precise::tanh(", "fast::tanh("),
    Fault(
        "an unseen token raises the maximum",
        WIDE,
        "max(new_max, token >= sees_from && token < sees_to ? x[n] : LOWEST)",
        "max(new_max, x[n])",
    ),
)
