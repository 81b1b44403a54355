// Attention over one partition of a row's keys and values by products of 8 x 8 matrices: the partial results that
// paged_decode.metal leaves, for up to 16 queries that share a KV head, and for several query tokens per row.
//
//   arena_keys, arena_values   [kv_heads, slots, dim]             slot = block * BLOCK_SIZE + offset, plain or quantized
//   tail_keys, tail_values     [rows, kv_heads, columns, dim]     a row's tokens after its arena tokens
//   queries                    [rows, kv_heads * GROUP, TOKENS, KEY_DIM]      of the row's newest TOKENS tokens
//   slopes                     [kv_heads * GROUP], of ALiBi
//   results                    [items, kv_heads * GROUP, TOKENS]  Partials, or the Whole of each row, query head and token
//
// One threadgroup does one work item (row, first, last, arena_tokens) for one tile of 8 of a KV head's GROUP * TOKENS
// queries, which are the columns of all matrices. The tokens are cut into slices of 32 at absolute positions, dealt out to
// SLICES simdgroups. A wide value is cut into two PARTS, each in a threadgroup of its own, because one simdgroup has not the
// registers for its output; both compute the scores. For a slice a simdgroup computes
//
//   S = K Q                               [32 tokens, 8 queries]    four matrices, each a sum of KEY_DIM / 8 products
//   P = exp(S - maximum of the column)
//   O = O + V P                           [PART_DIM, 8 queries]     PART_DIM / 8 matrices, and four products for each
//
// from K [tokens, KEY_DIM] as it lies in memory, Q [KEY_DIM, queries] and V [PART_DIM, tokens]. A lane has two neighbours
// of a row of each matrix. Tokens are the rows of S, and the second product takes P as the first leaves S: nothing moves
// between lanes but the maxima of the columns.
//
// A sum of products may have its terms in any order, and the rows of O may stand in any. So a lane loads neighbouring
// numbers of a head, up to 16 bytes at once, which go to as many matrices (`Share`). Tokens, too: row r of S's matrix u is
// token 4 r + u of the slice, so the four tokens of a lane's row lie side by side in one block, and the eight of its columns.
//
// A token that a query does not see weighs 0. A slice's tokens that the item has not are not read: others are in their
// place, because 0 * NaN is NaN. What a token contributes, and when it is added, depends on its position alone.

#include "matrix_layout.h"
#include "quantized.h"

// The lane's numbers of a chunk of the queries.
template <typename T>
inline void load_chunk_of_queries(const threadgroup T* queries, thread T* numbers) {
  UNROLL
  for (int i = 0; i < 8; i += 4) {
    const vec<T, 4> loaded = *(const threadgroup vec<T, 4>*)(queries + i);
    UNROLL
    for (int n = 0; n < 4; n++) {
      numbers[i + n] = loaded[n];
    }
  }
}

// A chunk of 32 keys by the same chunk of the queries, added to the scores.
template <typename T, typename KV>
inline void add_chunk_of_scores(
    thread simdgroup_matrix<float, 8, 8>* score,  // [4], of 8 tokens each
    const thread Head<KV>* key,                   // [4], of the token in the lane's row
    int chunk,                                    // its first number
    int count,
    int at,
    const threadgroup T* queries) {  // [8], the lane's two numbers of the matrices of the chunk
  T query_numbers[8];
  load_chunk_of_queries(queries, query_numbers);
  UNROLL
  for (int u = 0; u < 4; u += 2) {  // two at a time, for fewer registers
    KV numbers[2][8];
    load_chunk<4>(key[u].base, key[u].first + uint(chunk), count, at, numbers[0]);
    load_chunk<4>(key[u + 1].base, key[u + 1].first + uint(chunk), count, at, numbers[1]);
    UNROLL
    for (int n = 0; n < 8; n += 2) {
      if (n < count) {
        simdgroup_matrix<typename Factor<T, KV>::type, 8, 8> query;
        query.thread_elements()[0] = query_numbers[n];
        query.thread_elements()[1] = query_numbers[n + 1];
        UNROLL
        for (int i = 0; i < 2; i++) {
          simdgroup_matrix<KV, 8, 8> tokens;
          tokens.thread_elements()[0] = numbers[i][n];
          tokens.thread_elements()[1] = numbers[i][n + 1];
          simdgroup_multiply_accumulate(score[u + i], tokens, query, score[u + i]);
        }
      }
    }
  }
}

// The scores of a slice: its keys by the queries of the tile.
template <typename T, typename KV, int DIM>
inline void add_scores(
    thread simdgroup_matrix<float, 8, 8>* score,  // [4], of 8 tokens each
    const thread HeadSource<KV, DIM>& all_keys,
    const thread Neighbours& tokens,  // those of the lane's row
    MatrixPlace lane,
    const threadgroup T* queries,  // the lane's numbers of a chunk, 256 numbers behind them those of the next
    const threadgroup float*) {
  typedef Share<DIM, 4> KeyShare;
  const HeadSource<KV, DIM> keys = from_slot(all_keys, tokens.slot);
  Head<KV> key[4];
  UNROLL
  for (int u = 0; u < 4; u++) {
    key[u] = head_of(keys, neighbour(tokens, u));
  }
  ROLLED
  for (int n = 0; n + 8 <= KeyShare::EACH; n += 8) {
    add_chunk_of_scores(score, key, n * 4, 8, lane.column / 2, queries + n / 8 * 256);
  }
  if (KeyShare::REST > 0) {
    const int n = KeyShare::EACH - KeyShare::REST;
    add_chunk_of_scores(score, key, n * 4, KeyShare::REST, lane.column / 2, queries + n / 8 * 256);
  }
}

template <typename T, typename KV, int DIM>
inline void sum_queries(const thread HeadSource<KV, DIM>&, const threadgroup T*, MatrixPlace, threadgroup float*) {}

// A chunk of two tokens' values, weighed and added to the output.
template <int PART_DIM, int CHUNK, typename KV>
inline void add_chunk_of_values(
    thread simdgroup_matrix<float, 8, 8>* out,  // [PART_DIM / 8]
    Head<KV> left,                              // of the tokens that are the lane's columns of the values
    Head<KV> right,
    int at,
    const thread simdgroup_matrix<float, 8, 8>& weight) {
  constexpr int COUNT = Share<PART_DIM, 8>::count(CHUNK);
  KV numbers[2][8];
  load_chunk<8>(left.base, left.first + CHUNK * 64, COUNT, at, numbers[0]);
  load_chunk<8>(right.base, right.first + CHUNK * 64, COUNT, at, numbers[1]);
  UNROLL
  for (int n = 0; n < COUNT; n++) {
    simdgroup_matrix<KV, 8, 8> tokens;
    tokens.thread_elements()[0] = numbers[0][n];
    tokens.thread_elements()[1] = numbers[1][n];
    simdgroup_multiply_accumulate(out[CHUNK * 8 + n], tokens, weight, out[CHUNK * 8 + n]);
  }
}

// What goes to the output beside its matrices: of plain values nothing.
template <typename Values, int PART_DIM>
struct Biases {};

// Eight tokens' values, weighed and added to the output.
template <int PART_DIM, typename KV, int DIM>
inline void add_values(
    thread simdgroup_matrix<float, 8, 8>* out,  // [PART_DIM / 8]
    thread Biases<HeadSource<KV, DIM>, PART_DIM>&,
    const thread HeadSource<KV, DIM>& values,
    Neighbour left,  // the tokens that are the lane's columns of the values
    Neighbour right,
    Neighbour,
    int part,
    MatrixPlace lane,
    const thread simdgroup_matrix<float, 8, 8>& weight) {
  Head<KV> from_left = head_of(values, left), from_right = head_of(values, right);
  from_left.first += part * PART_DIM;
  from_right.first += part * PART_DIM;
  add_chunk_of_values<PART_DIM, 0>(out, from_left, from_right, lane.row, weight);
  add_chunk_of_values<PART_DIM, 1>(out, from_left, from_right, lane.row, weight);
  add_chunk_of_values<PART_DIM, 2>(out, from_left, from_right, lane.row, weight);
  add_chunk_of_values<PART_DIM, 3>(out, from_left, from_right, lane.row, weight);
}

template <typename KV, int DIM, int PART_DIM>
inline void clear(thread Biases<HeadSource<KV, DIM>, PART_DIM>&) {}

template <typename KV, int DIM, int PART_DIM>
inline void rescale(thread Biases<HeadSource<KV, DIM>, PART_DIM>&, int, float) {}

template <typename KV, int DIM, int PART_DIM>
inline void add_biases(thread simdgroup_matrix<float, 8, 8>*, thread Biases<HeadSource<KV, DIM>, PART_DIM>&) {}

#include "quantized_matrix.h"

// A chunk of the outputs of all slices of a tile, added up in the order of the slices.
template <int PART_DIM, int NEIGHBOURS, int CHUNK, int SLICES, typename Results>
inline void merge_slices(
    thread simdgroup_matrix<float, 8, 8>* out,  // [PART_DIM / 8]
    const thread float* factor,                 // [2], for the lane's columns
    const thread Results& results,
    int first_query,
    int queries,
    threadgroup float* outputs,               // [SLICES, 8 queries, 72]: after 8 numbers a gap, for stores to different banks
    const threadgroup float* max_scores,      // [SLICES, 8 queries]
    const threadgroup float* sum_exp_scores,  // [SLICES, 8 queries]
    int part,
    int slice,
    MatrixPlace place,
    uint lane) {
  constexpr int COUNT = Share<PART_DIM, 8>::count(CHUNK);
  if (COUNT == 0) {
    return;
  }
  UNROLL
  for (int n = 0; n < COUNT; n++) {
    const int d = share_dimension<PART_DIM, 8, NEIGHBOURS>(CHUNK * 8 + n, place.row) - CHUNK * 64;
    UNROLL
    for (int e = 0; e < 2; e++) {
      outputs[(slice * 8 + place.column + e) * 72 + d + d / 8] = out[CHUNK * 8 + n].thread_elements()[e] * factor[e];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int query = slice; query < queries; query += SLICES) {
    float common_max = LOWEST;
    float seen = 0.0f;  // the sum of weights of all slices
    if (Results::WHOLE || (CHUNK == 0 && part == 0 && lane == 0)) {
      for (int s = 0; s < SLICES; s++) {
        common_max = max(common_max, max_scores[s * 8 + query]);
      }
      for (int s = 0; s < SLICES; s++) {
        seen += sum_exp_scores[s * 8 + query] * fast::exp(max_scores[s * 8 + query] - common_max);
      }
    }
    for (int d = int(lane); d < COUNT * 8; d += 32) {
      float sum = 0.0f;
      for (int s = 0; s < SLICES; s++) {
        sum += outputs[(s * 8 + query) * 72 + d + d / 8];
      }
      leave(results, first_query + query, part * PART_DIM + CHUNK * 64 + d, sum, common_max, seen);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <
    typename T, int KEY_DIM, int VALUE_DIM, int BLOCK_SIZE, int GROUP, int TOKENS, int SLICES, int PARTS, bool SOFTCAP,
    bool ALIBI, typename Keys, typename Values, typename Results>
inline void paged_matrix(
    const device T* queries,  // [GROUP, TOKENS, KEY_DIM], of this row and KV head
    const thread Keys& keys,
    const thread Values& values,
    const device int* block_table,
    int first,
    int last,
    int arena_tokens,
    int start,  // the row's newest query sees its tokens start .. end, one before it start - 1 .. end - 1
    int end,
    float scale,
    float softcap,
    const device float* slopes,         // [GROUP], of this KV head
    int tile,                           // of this threadgroup, and its part of the value
    int part,
    const thread Results& results,      // [GROUP, TOKENS], of this item and KV head
    threadgroup T* shared_queries,      // [chunks of a key, 32 lanes, 8]
    threadgroup float* outputs,         // [SLICES, 8 queries, 72]
    threadgroup float* max_scores,      // [SLICES, 8 queries]
    threadgroup float* sum_exp_scores,  // [SLICES, 8 queries]
    uint simdgroup,
    uint lane) {
  constexpr int QUERIES = GROUP * TOKENS;
  constexpr int PART_DIM = VALUE_DIM / PARTS;
  const int slice = int(simdgroup);
  const MatrixPlace place = matrix_place(lane);

  // Put the queries of the tile where its simdgroups share them: Q in matrices, a chunk of each lane's numbers together.
  threadgroup T* tile_queries = shared_queries + int(lane) * 8;
  for (int n = slice; n < Share<KEY_DIM, 4>::CHUNKS * 8; n += SLICES) {  // of matrix n / 2 the number at column + n % 2
    const int d = min(share_dimension<KEY_DIM, 4, 8>(Keys::neighbour(n / 2 * 2 + place.row % 2), place.row / 2), KEY_DIM - 1);
    const int query = tile * 8 + place.column + n % 2;
    const float number = float(queries[min(query, QUERIES - 1) * KEY_DIM + d]);
    tile_queries[n / 8 * 256 + n % 8] = T(query < QUERIES ? number : 0.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* query_sums = outputs + slice * (8 * 72);
  sum_queries(keys, tile_queries, place, query_sums);

  // Start with nothing seen. Of what follows a lane has the queries of its two columns.
  simdgroup_matrix<float, 8, 8> out[PART_DIM / 8];
  UNROLL
  for (int m = 0; m < PART_DIM / 8; m++) {
    out[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  Biases<Values, PART_DIM> biases;
  clear(biases);
  float max_score[2] = {LOWEST, LOWEST};
  float sum_exp_score[2] = {0.0f, 0.0f};
  int sees_from[2];
  int sees_to[2];
  int position[2];
  float slope[2];
  UNROLL
  for (int e = 0; e < 2; e++) {
    const int older = TOKENS - 1 - (tile * 8 + place.column + e) % TOKENS;
    position[e] = end - 1 - older;
    slope[e] = ALIBI ? slopes[min(tile * 8 + place.column + e, QUERIES - 1) / TOKENS] : 0.0f;
    sees_from[e] = TOKENS == 1 ? first : max(first, start - older);
    sees_to[e] = TOKENS == 1 ? last : min(last, end - older);
  }

  // For each slice of 32 tokens that is this simdgroup's turn
  const int first_slice = first / 32;
  const int turn = (slice + SLICES - first_slice % SLICES) % SLICES;
  for (int begin = (first_slice + turn) * 32; begin < last; begin += SLICES * 32) {
    // Scores
    simdgroup_matrix<float, 8, 8> score[4];
    const Neighbours row_tokens = neighbours_of<4, BLOCK_SIZE>(begin + place.row * 4, first, last, arena_tokens, block_table);
    UNROLL
    for (int u = 0; u < 4; u++) {
      score[u] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    add_scores(score, keys, row_tokens, place, tile_queries, query_sums);

    // Online softmax: raise the maximum, rescale what was summed under the old one, and weigh this slice's tokens.
    UNROLL
    for (int e = 0; e < 2; e++) {
      float new_max = max_score[e];
      UNROLL
      for (int u = 0; u < 4; u++) {
        const int token = begin + place.row * 4 + u;
        float x = score[u].thread_elements()[e] * scale;
        if (SOFTCAP) {
          x = softcap * precise::tanh(x / softcap);
        }
        if (ALIBI) {
          x = fma(slope[e], float(token - position[e]), x);
        }
        score[u].thread_elements()[e] = x;
        new_max = max(new_max, token >= sees_from[e] && token < sees_to[e] ? x : LOWEST);
      }
      new_max = max_over_rows(new_max);
      const float factor = fast::exp(max_score[e] - new_max);
      max_score[e] = new_max;
      sum_exp_score[e] *= factor;
      UNROLL
      for (int u = 0; u < 4; u++) {
        const int token = begin + place.row * 4 + u;
        const float weight = fast::exp(score[u].thread_elements()[e] - new_max);
        score[u].thread_elements()[e] = token >= sees_from[e] && token < sees_to[e] ? weight : 0.0f;
        sum_exp_score[e] += score[u].thread_elements()[e];
      }
      UNROLL
      for (int m = 0; m < PART_DIM / 8; m++) {
        out[m].thread_elements()[e] *= factor;
      }
      rescale(biases, e, factor);
    }

    // Values: what were scores are weights now. A lane reads the two tokens that are the columns of its numbers of V.
    const Neighbours column_tokens =
        neighbours_of<8, BLOCK_SIZE>(begin + place.column * 4, first, last, arena_tokens, block_table);
    const Values slice_values = from_slot(values, column_tokens.slot);
    ROLLED
    for (int u = 0; u < 4; u++) {
      const Neighbour left = neighbour(column_tokens, u), right = neighbour(column_tokens, u + 4);
      const Neighbour of_row = neighbour(row_tokens, u);
      add_values<PART_DIM>(out, biases, slice_values, left, right, of_row, part, place, score[0]);
      score[0] = score[1];
      score[1] = score[2];
      score[2] = score[3];
    }
  }

  add_biases(out, biases);

  // Add up the slices: every simdgroup brings its output under the common maximum.
  UNROLL
  for (int e = 0; e < 2; e++) {
    const float sum = sum_over_rows(sum_exp_score[e]);
    if (place.row == 0) {
      max_scores[slice * 8 + place.column + e] = max_score[e];
      sum_exp_scores[slice * 8 + place.column + e] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int queries_here = min(8, QUERIES - tile * 8);
  float factor[2];
  UNROLL
  for (int e = 0; e < 2; e++) {
    float common_max = LOWEST;
    for (int s = 0; s < SLICES; s++) {
      common_max = max(common_max, max_scores[s * 8 + place.column + e]);
    }
    factor[e] = fast::exp(max_score[e] - common_max);
  }
  merge_slices<PART_DIM, Values::VALUE_NEIGHBOURS, 0, SLICES>(
      out, factor, results, tile * 8, queries_here, outputs, max_scores, sum_exp_scores, part, slice, place, lane);
  merge_slices<PART_DIM, Values::VALUE_NEIGHBOURS, 1, SLICES>(
      out, factor, results, tile * 8, queries_here, outputs, max_scores, sum_exp_scores, part, slice, place, lane);
  merge_slices<PART_DIM, Values::VALUE_NEIGHBOURS, 2, SLICES>(
      out, factor, results, tile * 8, queries_here, outputs, max_scores, sum_exp_scores, part, slice, place, lane);
  merge_slices<PART_DIM, Values::VALUE_NEIGHBOURS, 3, SLICES>(
      out, factor, results, tile * 8, queries_here, outputs, max_scores, sum_exp_scores, part, slice, place, lane);
}
