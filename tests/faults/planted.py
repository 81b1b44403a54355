"""Faults of the attention kernels and of what calls them."""

from __future__ import annotations

from dataclasses import dataclass

DECODE, REDUCE = "metal/shaders/paged_decode.metal", "metal/shaders/paged_reduce.metal"
SHARED = "metal/shaders/paged_attention.h"
MATRIX, TILES = "metal/shaders/paged_matrix.metal", "metal/shaders/matrix_tiles.h"
LAYOUT, SOURCES = "metal/shaders/matrix_layout.h", "metal/sources.py"
QUANTIZED, QUANTIZED_MATRIX = "metal/shaders/quantized.h", "metal/shaders/quantized_matrix.h"
PLACE, CODES = "metal/shaders/matrix_place.h", "metal/shaders/codes.h"
WIDE, WIDE_ENTRY = "metal/shaders/paged_wide.metal", "metal/wide.py"
VECTOR_ENTRY, MATRIX_ENTRY = "metal/vector.py", "metal/matrix.py"
PREFILL, PREFILL_ENTRY = "metal/shaders/paged_prefill.metal", "metal/prefill.py"
CALLS, WORK = "metal/kernels.py", "metal/work.py"
CHOICE, SHAPE = "metal/rules.py", "metal/shape.py"
LAYER_KEY = "cortexmlx/attention/decode_methods.py"
BACKEND, REACH = "cortexmlx/attention/metal.py", "cortexmlx/kv/spec.py"

_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
_CAP = "        score[s] = softcap * precise::tanh(score[s] / softcap);\n"
_BIAS = "        score[s] = fma(slope, float(begin + s * SPAN + int(lane_token) - position), score[s]);\n"


TESTS = (
    "attention/test_alibi.py",
    "attention/test_softmax.py",
    "attention/test_reference.py",
    "attention/test_reference_quantized.py",
    "metal/test_work.py",
    "metal/test_rules.py",
    "metal/test_matrix.py",
    "metal/test_sources.py",
    "metal/test_kernels.py",
    "metal/test_text.py",
    "metal/test_decode.py",
    "metal/test_wide.py",
    "metal/test_decode_wide.py",
    "metal/test_decode_alibi.py",
    "metal/test_decode_quantized.py",
    "metal/test_reduce.py",
    "metal/test_prefill.py",
    "attention/test_metal.py",
    "attention/test_metal_prefill.py",
)
"""The tests that judge these faults, and those of the JSON files."""


@dataclass(frozen=True)
class Fault:
    """`old`, which occurs once in `file`, becomes `new`."""

    name: str
    file: str
    old: str
    new: str


FAULTS = (
    Fault(
        "tokens of a context have 16 bits",
        SHARED,
        "block_table[token / BLOCK_SIZE]",
        "block_table[ushort(token) / BLOCK_SIZE]",
    ),
    Fault(
        "no barrier after the statistics", DECODE, "  " + _BARRIER + "  UNROLL\n  for (int h", "  UNROLL\n  for (int h"
    ),
    Fault("no barrier before the slices are summed", DECODE, _BARRIER + "    const int head = ", "const int head = "),
    Fault("no barrier before the next head", DECODE, "    " + _BARRIER + "  }\n}", "  }\n}"),
    Fault("no barrier in the reduce", REDUCE, "  " + _BARRIER, ""),
    Fault(
        "tokens before the first are not masked", DECODE, "int(lane_token) >= from && s", "int(lane_token) >= 0 && s"
    ),
    Fault("tokens behind the last are not masked", DECODE, " && s * SPAN + int(lane_token) < to;", ";"),
    Fault("dead tokens are loaded", DECODE, "clamp(begin + int(lane), first, last - 1)", "begin + int(lane)"),
    Fault("tokens in front of a window are loaded", DECODE, "int(lane), first, last - 1)", "int(lane), 0, last - 1)"),
    Fault("the last token's neighbour is loaded", DECODE, "int(lane), first, last - 1)", "int(lane), first, last)"),
    Fault("the next block at a block's last token", SHARED, "block_table[token / ", "block_table[(token + 1) / "),
    Fault("the first tail token is looked for in the arena", SHARED, "token < arena_tokens", "token <= arena_tokens"),
    Fault("tail columns off by one", SHARED, "~(token - arena_tokens)", "~(token - arena_tokens + 1)"),
    Fault("the running maximum starts at 0", DECODE, "float max_score = LOWEST;", "float max_score = 0.0f;"),
    Fault("the common maximum of slices starts at 0", DECODE, "float common_max = LOWEST;", "float common_max = 0.0f;"),
    Fault("the common maximum of partitions starts at 0", REDUCE, "? sink : LOWEST", "? sink : 0.0f"),
    Fault("an epsilon in the denominator", REDUCE, "sum / denominator :", "sum / (denominator + 1e-5f) :"),
    Fault("32-bit offsets in a slab", SHARED, "~place)) * DIM", "~place) * DIM)"),
    Fault("32-bit offsets of heads", SOURCES, "const int64_t first_slot =", "const unsigned first_slot ="),
    Fault(
        "tail strides swapped",
        SOURCES,
        "first_column = row_head *",
        "first_column = (kv_head * rows + row) *",
    ),
    Fault(
        "the head stride of values is that of keys",
        SOURCES,
        "first_slot * {dim}",
        "first_slot * KEY_DIM",
    ),
    Fault("the sum is not rescaled", DECODE, "    sum_exp_score *= factor;\n", ""),
    Fault("the output is not rescaled", DECODE, "out[h][n] *= head_factor;", ""),
    Fault("slices are summed under different maxima", DECODE, "out[h][n] * factor;", "out[h][n];"),
    Fault("the weight is not taken under the maximum", DECODE, "fast::exp(score[s] - new_max)", "fast::exp(score[s])"),
    Fault(
        "every tile has the first tile's queries",
        DECODE,
        "min(first_head + (h ^ int(lane_head)), GROUP - 1)",
        "min(h ^ int(lane_head), GROUP - 1)",
    ),
    Fault("scores go to another step's lanes", DECODE, "int(lane_token / AHEAD * AHEAD)", "int(lane_token / AHEAD)"),
    Fault("scores are kept as another step's", DECODE, "first_own == s * SPAN", "first_own == (s ^ 1) * SPAN"),
    Fault("weights come from another token's lane", DECODE, "(first_lane_token + a) * TILE", "first_lane_token * TILE"),
    Fault("weights come from another step", DECODE, "step * AHEAD >= s * SPAN", "step * AHEAD > s * SPAN"),
    Fault("every lane holds the heads in one order", DECODE, "first_head + (h ^ int(lane_head))", "first_head + h"),
    Fault("a lane keeps the sums that it gives", DECODE, "kept = second_half ?", "kept = !second_half ?"),
    Fault(
        "the quarters of a simdgroup are not added up",
        DECODE,
        "mask = TILE * AHEAD; mask < 32",
        "mask = TILE * AHEAD; mask < 16",
    ),
    Fault(
        "lanes have maxima of their own",
        DECODE,
        "new_max = max(new_max, simd_shuffle_xor(new_max, ushort(mask)));",
        "",
    ),
    Fault(
        "the weights of other lanes are not summed",
        DECODE,
        "sum_exp_score += simd_shuffle_xor(sum_exp_score, ushort(mask));",
        "",
    ),
    Fault(
        "all heads have the first's factor", DECODE, "simd_broadcast(factor, ushort(h))", "simd_broadcast(factor, 0)"
    ),
    Fault("scores are not scaled", DECODE, "score[s] *= scale;", ""),
    Fault(
        "queries behind the head's end count",
        DECODE,
        "lane_dimension<KEY_DIM>(lane, n) < KEY_DIM ?",
        "lane_dimension<KEY_DIM>(lane, n) < KEY_DIM + 4 ?",
    ),
    Fault("products in half precision", DECODE, "sum[a] = product[0];", "sum[a] = float(KV(product[0]));"),
    Fault("lanes beyond the head's end load", SHARED, "int(lane), DIM / PACK - 1)", "int(lane), DIM / PACK)"),
    Fault("the softcap is not divided by", DECODE, "precise::tanh(score[s] / softcap)", "precise::tanh(score[s])"),
    Fault(
        "the partitions' maximum is left out",
        REDUCE,
        "common_max = max(common_max, partials[p * item_stride].max_score);",
        "",
    ),
    Fault(
        "the sink counts once per simdgroup",
        REDUCE,
        "denominator += sum_exp_scores[s];",
        "denominator += sum_exp_scores[s] + (s ? denominator : 0);",
    ),
    Fault("the sink of the KV head", CALLS, "head_sinks[head / TOKENS]", "head_sinks[head / TOKENS / 2]"),
    Fault(
        "the last partition is left out", REDUCE, "p < items; p += SIMDGROUPS", "p < max(1, items - 1); p += SIMDGROUPS"
    ),
    Fault(
        "partials of the neighbouring head",
        REDUCE,
        "item_stride = query_heads;",
        "item_stride = query_heads - 1;",
    ),
    Fault(
        "a row with nothing to attend divides by 0",
        REDUCE,
        "denominator > 0.0f ? sum / denominator : 0.0f",
        "sum / denominator",
    ),
    Fault(
        "a write into the arena",
        DECODE,
        "  const int slice = ",
        "  ((device KV*)keys.arena)[0] = KV(0);\n  const int slice = ",
    ),
    Fault("the window is one token too long", REACH, "position - (self.tokens - 1)", "position - self.tokens"),
    Fault("a chunk's last token sees itself alone", REACH, "% self.tokens", "% (self.tokens - 1 or 1)"),
    Fault("a later chunk's queries take the first one's blocks", WORK, "blocks + start // block_size", "blocks"),
    Fault(
        "work items run to the partition's end",
        WORK,
        "np.minimum(item_start + partition, end[row])",
        "item_start + partition",
    ),
    Fault("rows find their neighbour's items", WORK, "np.cumsum(counts) - counts", "np.cumsum(counts) - counts[0]"),
    Fault("windows start at partition 0", WORK, "first_part = start // partition", "first_part = start * 0"),
    Fault("small plans are not padded", WORK, "max(0, SMALL - len(numbers))", "0"),
    Fault("small tables are not padded", WORK, "max(0, -(-SMALL // rows) - blocks)", "0"),
    Fault(
        "the plan of the window's first step is kept",
        BACKEND,
        "(cached.tail_tokens, cached.partition) == (tail_tokens, partition)",
        "cached",
    ),
    Fault("old sinks are kept", BACKEND, "cached is None or cached[0] is not numbers", "cached is None"),
    Fault("queries are read as if they were no views", BACKEND, "mx.contiguous(queries),  #", "queries,  #"),
    Fault("slabs are not looked at", BACKEND, "kv.tail_tokens == _CHECKED_TAIL_TOKENS", "kv.tail_tokens < 0"),
    Fault("MLX may copy a slab", CALLS, "    copies: bool = False,", "    copies: bool = True,"),
    Fault("the dearer kernel serves", CHOICE, "return min(candidates", "return max(candidates"),
    Fault(
        "partitions differ with the number of query tokens",
        SHAPE,
        "2 * 4 * self.shape.group * self",
        "2 * 4 * self.shape.query_tokens * self.shape.group * self",
    ),
    Fault(
        "partitions depend on the batch",
        BACKEND,
        "step.attention_window, partition)",
        "step.attention_window, partition >> (step.rows > 1))",
    ),
    Fault("a matrix has other rows", PLACE, "(lane >> 2 & 4) + (lane >> 1 & 3)", "(lane >> 1 & 4) + (lane >> 1 & 3)"),
    Fault(
        "a column's maximum leaves out four rows",
        PLACE,
        "return max(x, simd_shuffle_xor(x, ushort(16)));",
        "return x;",
    ),
    Fault("a column's sum leaves out four rows", PLACE, "return x + simd_shuffle_xor(x, ushort(16));", "return x;"),
    Fault("the last numbers of a head are taken for others", TILES, "in_chunk < (REST & 4) ? 4", "in_chunk < 4 ? 4"),
    Fault(
        "odd numbers of a head come from its start",
        TILES,
        "base[first + uint((count & 6) * LANES + at)]",
        "base[first + uint(at)]",
    ),
    Fault("a table is read for no token", TILES, "max(min(token, heads.arena_tokens - 1), 0)", "token"),
    Fault("the first token of the tail is the arena's", TILES, "return column < 0 ?", "return column <= 0 ?"),
    Fault("offsets of 32 bits for matrices", TILES, "uint64_t(block) * BLOCK_SIZE", "uint32_t(block) * BLOCK_SIZE"),
    Fault("neighbours that are not there are read", LAYOUT, "clamp(n, tokens.first, tokens.last)", "n"),
    Fault("the token behind the last is read", LAYOUT, "min(last - 1 - begin,", "min(last - begin,"),
    Fault("a slice without tokens is looked up", LAYOUT, "clamp(token, first, last - 1) & ~", "token & ~"),
    Fault("the first token of the tail is a neighbour in the arena", LAYOUT, "token.column < 0;", "token.column <= 0;"),
    Fault(
        "tokens before the first weigh",
        MATRIX,
        "score[u].thread_elements()[e] = token >= sees_from[e] && ",
        "score[u].thread_elements()[e] = ",
    ),
    Fault("tokens behind the last weigh", MATRIX, "token < sees_to[e] ? weight : 0.0f", "true ? weight : 0.0f"),
    Fault("an older query sees the newest token", MATRIX, "min(last, end - older)", "last"),
    Fault("windows of older queries are those of the newest", MATRIX, "max(first, start - older)", "max(first, start)"),
    Fault("query tokens are taken for heads", MATRIX, "place.column + e) % TOKENS", "place.column + e) / TOKENS"),
    Fault(
        "the second tile has the first tile's queries",
        MATRIX,
        "const int query = tile * 8 + place.column + n % 2;",
        "const int query = place.column + n % 2;",
    ),
    Fault(
        "no barrier after the queries",
        MATRIX,
        "  " + _BARRIER + "  threadgroup float* query_sums",
        "  threadgroup float* query_sums",
    ),
    Fault(
        "no barrier before slices of matrices are merged",
        MATRIX,
        "  " + _BARRIER + "  for (int query",
        "  for (int query",
    ),
    Fault("no barrier before the next chunk", MATRIX, "  " + _BARRIER + "}", "}"),
    Fault("outputs of matrices are not rescaled", MATRIX, "out[m].thread_elements()[e] *= factor;", ""),
    Fault("weights of the first eight tokens for all", MATRIX, "      score[0] = score[1];\n", ""),
    Fault(
        "both parts of a value are the first",
        MATRIX,
        "from_left.first += part * PART_DIM;",
        "",
    ),
    Fault(
        "a slice's maximum is not the tile's",
        MATRIX,
        "factor[e] = fast::exp(max_score[e] - common_max);",
        "factor[e] = 1.0f;",
    ),
    Fault("the sink of the query token", CALLS, "head_sinks[head / TOKENS]", "head_sinks[head]"),
    Fault("no barrier between a part's scores and their sum", WIDE, "    " + _BARRIER + "    float x", "    float x"),
    Fault("one buffer for the scores of all slices", WIDE, "    buffer = PARTS * PART_SCORES - buffer;\n", ""),
    Fault("the scores of the last part are left out", WIDE, "p < PARTS; p++", "p < PARTS - 1; p++"),
    Fault("all parts leave their scores in one place", WIDE, "shared_scores + part * PART_SCORES", "shared_scores"),
    Fault(
        "the rest of a latent key begins within its value",
        WIDE,
        "key, rope - first_number, at",
        "key, rope - first_number - 4, at",
    ),
    Fault(
        "the rest of a query is that of the first part",
        WIDE,
        "first_query, rope, place",
        "first_query, PARTS * Part::KEY, place",
    ),
    Fault("the values of eight tokens for all sixteen", WIDE, "at, numbers[0][u], weight", "at, numbers[0][0], weight"),
    Fault("each part has the first part's values", WIDE, "first, last - 1)) + part * Part::VALUE", "first, last - 1))"),
    Fault("each part leaves the first part's values", WIDE, "const int d = part * Part::VALUE + ", "const int d = "),
    Fault("a row's maximum leaves out columns", WIDE, "return max(x, simd_shuffle_xor(x, ushort(8)));", "return x;"),
    Fault("a row's sum leaves out columns", WIDE, "return x + simd_shuffle_xor(x, ushort(8));", "return x;"),
    Fault("one of two numbers of a wide output is not rescaled", WIDE, "out[m].thread_elements()[1] *= factor;", ""),
    Fault(
        "keys of the wide kernel that are not there are read",
        WIDE,
        "(keys, clamp(begin + u * 8 + place.row, first, last - 1))",
        "(keys, begin + u * 8 + place.row)",
    ),
    Fault("tokens that are not there weigh", WIDE, "token < sees_to ? exp_score : 0.0f", "true ? exp_score : 0.0f"),
    Fault("a wide head's older query sees the newest token", WIDE, "min(last, end - older)", "last"),
    Fault("every tile has the first tile's queries", WIDE_ENTRY, "share * 8,", "0,"),
    Fault("every threadgroup has the first tile of heads", VECTOR_ENTRY, "share * TILE,", "0,"),
    Fault("every threadgroup has the first tile of columns", MATRIX_ENTRY, "share / PARTS, share", "0, share"),
    Fault("every threadgroup has the first part of a value", MATRIX_ENTRY, "share % PARTS,", "0,"),
    Fault("tiles are taken for parts", MATRIX_ENTRY, "share / PARTS, share % PARTS", "share % PARTS, share / PARTS"),
    Fault(
        "shares are taken for KV heads",
        SOURCES,
        "threadgroup_position_in_grid.y) / SHARES",
        "threadgroup_position_in_grid.y) % SHARES",
    ),
    Fault("a part of a value has no threadgroup", SHAPE, "return self.tiles * self.parts\n", "return self.tiles\n"),
    Fault("half of the tiles have no threadgroup", WIDE_ENTRY, "return self.tiles\n", "return -(-self.tiles // 2)\n"),
    Fault(
        "all heads have the first's slope", DECODE, "slopes[min(first_head + int(lane_head), GROUP - 1)]", "slopes[0]"
    ),
    Fault("every tile has the first tile's slopes", DECODE, "slopes[min(first_head + int", "slopes[min(int"),
    Fault("slopes are read behind the heads", DECODE, "int(lane_head), GROUP - 1)] :", "int(lane_head), GROUP + 8)] :"),
    Fault(
        "slopes before the soft cap",
        DECODE,
        "      if (SOFTCAP) {\n" + _CAP + "      }\n      if (ALIBI) {\n" + _BIAS + "      }\n",
        "      if (ALIBI) {\n" + _BIAS + "      }\n      if (SOFTCAP) {\n" + _CAP + "      }\n",
    ),
    Fault("distances of a lane's first token", DECODE, "float(begin + s * SPAN + int", "float(begin + int"),
    Fault("positions count from the row's end", VECTOR_ENTRY, "of_rows[row].end - 1,", "of_rows[row].end,"),
    Fault("positions are those of the arena", VECTOR_ENTRY, "of_rows[row].end - 1,", "work.arena_tokens - 1,"),
    Fault("every KV head has the first's slopes", VECTOR_ENTRY, "head_slopes + kv_head * GROUP", "head_slopes"),
    Fault("every KV head's slopes in matrices", MATRIX_ENTRY, "head_slopes + kv_head * GROUP", "head_slopes + kv_head"),
    Fault("older queries are where the newest is", MATRIX, "position[e] = end - 1 - older;", "position[e] = end - 1;"),
    Fault("query tokens have slopes", MATRIX, "QUERIES - 1) / TOKENS] : 0.0f", "QUERIES - 1) % GROUP] : 0.0f"),
    Fault(
        "slopes of the first eight tokens", MATRIX, "float(token - position[e])", "float(token - u * 8 - position[e])"
    ),
    Fault(
        "slopes are not for pieces",
        BACKEND,
        "reference.attend_pieces(queries, kv, params, one_by_one",
        "reference.attend_pieces(queries, kv, replace(params, slopes=None), one_by_one",
    ),
    Fault(
        "slopes are no part of a variant's key",
        LAYER_KEY,
        "        params.slopes is not None,\n        kv.quantization,\n",
        "        False,\n        kv.quantization,\n",
    ),
    Fault(
        "keys are brought while values are read",
        PREFILL,
        "    " + _BARRIER + "    stage<BLOCK_SIZE, SLICE, THREADS, KV, KEY_DIM>",
        "    stage<BLOCK_SIZE, SLICE, THREADS, KV, KEY_DIM>",
    ),
    Fault(
        "keys are read while they are brought", PREFILL, _BARRIER + "\n    simdgroup_matrix", "\n    simdgroup_matrix"
    ),
    Fault(
        "values are brought while keys are read",
        PREFILL,
        "    " + _BARRIER + "    stage<BLOCK_SIZE, SLICE, THREADS, KV, VALUE_DIM>",
        "    stage<BLOCK_SIZE, SLICE, THREADS, KV, VALUE_DIM>",
    ),
    Fault("values are read while they are brought", PREFILL, _BARRIER + "\n    if (seen) {", "\n    if (seen) {"),
    Fault("a query sees the future", PREFILL, "older >= 0 && older < reach", "older < reach"),
    Fault("a window is a token too long", PREFILL, "older < reach ?", "older <= reach ?"),
    Fault("the diagonal is not masked for older queries", PREFILL, "SLICE - 1 > low ||", "SLICE - 1 > high ||"),
    Fault(
        "a window's begin is masked for its first query only",
        PREFILL,
        "|| slice <= high - reach",
        "|| slice <= low - reach",
    ),
    Fault("a slice that is seen in part is left out", PREFILL, "slice + SLICE + reach > low", "slice + reach > low"),
    Fault(
        "tokens in front of a piece's window are brought",
        PREFILL,
        "slice + row, oldest, end - 1",
        "slice + row, 0, end - 1",
    ),
    Fault("tokens behind a piece are brought", PREFILL, "slice + row, oldest, end - 1", "slice + row, oldest, end"),
    Fault("slices begin with the window", PREFILL, "int slice = oldest / SLICE * SLICE;", "int slice = oldest;"),
    Fault("the sink counts in every row of lanes", PREFILL, "SINKS && place.row == 0 ?", "SINKS ?"),
    Fault(
        "16-byte stores behind an odd threadgroup array",
        PREFILL_ENTRY,
        "alignas(16) threadgroup KV staged",
        "threadgroup KV odd[1];\n  threadgroup KV staged",
    ),
    Fault("unseen tokens score minus infinity", PREFILL, ": UNSEEN", ": -INFINITY"),
    Fault("the maximum of a piece starts at 0", PREFILL, "sinks[head] : LOWEST", "sinks[head] : 0.0f"),
    Fault("outputs of a piece are not rescaled", PREFILL, "out[m].thread_elements()[e] *= factor;", ""),
    Fault("sums of a piece are not rescaled", PREFILL, "sum_exp_score[e] *= factor;", ""),
    Fault("weights of a slice's first eight tokens for all", PREFILL, "score[next - 1] = score[next];", ""),
    Fault("simdgroups take heads for tokens", PREFILL, "int(simdgroup) / (TILE / 8)", "int(simdgroup) % HEADS"),
    Fault("a tile writes queries that are not its piece's", PREFILL, "query + e >= begin && query", "query"),
    Fault("32-bit offsets of a piece", PREFILL, "heads + slot * DIM + d", "heads + uint(slot) * DIM + d"),
    Fault(
        "the KV head of another group", PREFILL_ENTRY, "first_head / (query_heads / kv_heads)", "first_head % kv_heads"
    ),
    Fault("a code keeps the power that it is written behind", CODES, "-float(1 << BITS)", "0.0f"),
    Fault(
        "codes of the tail with scales of the arena",
        QUANTIZED,
        "? source.scales.arena : source.scales.tail",
        "? source.scales.arena : source.scales.arena",
    ),
    Fault("the group of a pack is the first", QUANTIZED, "uint(pack * PACK / GROUP)", "0u"),
    Fault("codes of matrices in the order of memory", QUANTIZED, "n % 2 * (16 / BITS)", "n % 2"),
    Fault("sums of queries leave out the last chunk", QUANTIZED_MATRIX, "n < GROUP / 4", "n < GROUP / 4 - 8"),
    Fault("biases are weighed under the old maximum", QUANTIZED_MATRIX, "biases.sums[g][e] *= factor;", ""),
    Fault(
        "a row's biases are not those of its column",
        QUANTIZED_MATRIX,
        "sum_over_rows(biases.sums[g][e])",
        "biases.sums[g][e]",
    ),
    Fault(
        "a part of a value has the scales of the first", QUANTIZED_MATRIX, "scales.first + first +", "scales.first +"
    ),
    Fault("a tile goes on behind its piece", WORK, "np.minimum(tile_start + tile, last)", "tile_start + tile"),
)
