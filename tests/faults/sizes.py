"""Faults of the kernels that only some sizes, types and parts show, or what is called with them."""

from __future__ import annotations

from tests.faults.matmul import ENTRY, SERVED, TEXT
from tests.faults.planted import (
    BACKEND,
    DECODE,
    MATRIX,
    PREFILL,
    PREFILL_ENTRY,
    QUANTIZED_MATRIX,
    SHARED,
    SOURCES,
    TILES,
    WIDE,
    WIDE_ENTRY,
    Fault,
)

WORDS, TAIL_TEXT, TAIL = "metal/shaders/words.h", "metal/shaders/tail_write.metal", "cortexmlx/attention/tail_write.py"

TESTS = (
    "matmul/test_served.py",
    "metal/matmul/test_kernel.py",
    "metal/test_tail_write.py",
    "attention/test_tail_write.py",
    "attention/test_token_rows.py",
    "attention/test_metal.py",
    "metal/test_results.py",
    "metal/test_decode.py",
    "metal/test_decode_wide.py",
    "metal/test_decode_alibi.py",
    "metal/test_decode_quantized.py",
    "metal/test_prefill.py",
    "attention/selfcheck/test_check.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault("a tail has 16 columns", SOURCES, "row_head * tail_keys_shape[2];", "row_head * 16;"),
    Fault("a tail has 16 columns in the wide kernel", WIDE_ENTRY, "row_head * tail_keys_shape[2];", "row_head * 16;"),
    Fault(
        "words are counted by signed 32 bits",
        WORDS,
        "const device Word* from, uint first,",
        "const device Word* from, int first,",
    ),
    Fault(
        "sums of slices are of the results' type",
        TEXT,
        "o * 8 + place.row] = out[o][t][e];",
        "o * 8 + place.row] = float(T(out[o][t][e]));",
    ),
    Fault(
        "queries of wide heads become the keys' type",
        WIDE,
        "simdgroup_matrix<typename Factor<T, KV>::type, 8, 8> query;",
        "simdgroup_matrix<KV, 8, 8> query;",
    ),
    Fault(
        "queries of a piece become the keys' type",
        PREFILL,
        "simdgroup_matrix<typename Factor<T, KV>::type, 8, 8> query;",
        "simdgroup_matrix<KV, 8, 8> query;",
    ),
    Fault(
        "weights of wide heads are of the values' type", WIDE, "? exp_score : 0.0f;", "? float(KV(exp_score)) : 0.0f;"
    ),
    Fault(
        "weights of a piece are of the values' type",
        PREFILL,
        "score[u].thread_elements()[e] = weight;",
        "score[u].thread_elements()[e] = float(KV(weight));",
    ),
    Fault(
        "the last chunk of a wide value has the numbers before it",
        WIDE,
        "at, numbers[3][u], weight",
        "at, numbers[2][u], weight",
    ),
    Fault(
        "the last chunk of a piece's values is left out",
        PREFILL,
        "        add_slice_values<3, VALUE_DIM>(out, left, place.row, score[0]);\n",
        "",
    ),
    Fault("scores of four parts have room", WIDE_ENTRY, "shared_scores[2 * PARTS * 8", "shared_scores[2 * 4 * 8"),
    Fault(
        "parts of a value begin at groups of 32",
        QUANTIZED_MATRIX,
        "uint(part * (PART_DIM / GROUP))",
        "uint(part * (PART_DIM / 32))",
    ),
    Fault(
        "distances of ALiBi have 16 bits",
        DECODE,
        "float(begin + s * SPAN + int(lane_token) - position)",
        "float(short(begin + s * SPAN + int(lane_token) - position))",
    ),
    Fault(
        "distances of ALiBi have 16 bits in matrices",
        MATRIX,
        "float(token - position[e])",
        "float(short(token - position[e]))",
    ),
    Fault(
        "squares of a norm are summed in the head's type",
        TAIL_TEXT,
        "sum = fma(x, x, sum);",
        "sum = float(T(fma(x, x, sum)));",
    ),
    Fault(
        "angles are turned by fast functions",
        TAIL_TEXT,
        "precise::cos(angle), s = precise::sin(angle)",
        "fast::cos(angle), s = fast::sin(angle)",
    ),
    Fault(
        "matmuls of fewer slices are not checked",
        SERVED,
        "shape.group, shape.slices, row_split)",
        "shape.group, row_split)",
    ),
    Fault(
        "matmuls of other tiles are not checked",
        SERVED,
        "shape.group, shape.slices, row_split)",
        "shape.group, shape.slices)",
    ),
    Fault(
        "mxfp4 counts as affine",
        SERVED,
        "(shape.dtype, shape.mode, shape.bits, shape",
        "(shape.dtype, shape.bits, shape",
    ),
    Fault("experts of rows that are several tokens", SERVED, "x.shape[-2] == 1 and batch in", "batch in"),
    Fault("a second scale of a matrix is left out", SERVED, 'module.get("global_scale") is not None or ', ""),
    Fault(
        "the denominator is of another maximum",
        SHARED,
        "fma(factor, sum_exp_score, fast::exp(sink - common_max))",
        "sum_exp_score + fast::exp(sink - common_max)",
    ),
    Fault(
        "an unseen token raises an older query's maximum",
        MATRIX,
        "sees_from[e] && token < sees_to[e] ? x : LOWEST",
        "sees_from[e] && token < last ? x : LOWEST",
    ),
    Fault(
        "sinks may be infinite",
        BACKEND,
        "finite = mx.maximum(numbers.astype(mx.float32), -1e37)",
        "finite = numbers.astype(mx.float32)",
    ),
    Fault(
        "blocks of short pieces have 16 bits",
        BACKEND,
        "np.full((original.rows + sum(counts), width), null_block, np.int32)",
        "np.full((original.rows + sum(counts), width), null_block & 0x7FFF, np.int16)",
    ),
    Fault(
        "keys of other frequencies turn as the queries",
        TAIL,
        "query_origin.rope == key_origin.rope and query_origin.frequencies is key_origin.frequencies",
        "query_origin.rope == key_origin.rope",
    ),
    Fault(
        "values may be of another type than keys",
        TAIL,
        "queries.dtype == keys.dtype == values.dtype:",
        "queries.dtype == keys.dtype:",
    ),
    Fault(
        "norms may be of another type",
        TAIL,
        "if weight.dtype == input_array.dtype == x.dtype:",
        "if weight is not None:",
    ),
    Fault("halves of a head are turned, not of what rotates", TAIL_TEXT, "pair + ROTATED / 2", "pair + DIM / 2"),
    Fault(
        "a piece's memory is that of keys",
        PREFILL_ENTRY,
        "row = -(-max(self.key_dim, self.value_dim) * item",
        "row = -(-self.key_dim * item",
    ),
    Fault(
        "pairs that are found are read at once",
        ENTRY,
        "done, writes, found, lane);\n      threadgroup_barrier(mem_flags::mem_threadgroup);",
        "done, writes, found, lane);",
    ),
    Fault(
        "tokens of a piece have 16 bits", PREFILL, "const uint token = uint(clamp(", "const uint token = ushort(clamp("
    ),
    Fault(
        "tokens of a wide row have 16 bits",
        TILES,
        "const uint in_arena = uint(max(",
        "const uint in_arena = ushort(max(",
    ),
)
