// Attention over one partition of a row's keys and values for heads that are too wide for one simdgroup: the partial results
// that paged_decode.metal leaves, for keys of up to 576 numbers and values of up to 512, any number of queries that share a
// KV head, and several query tokens per row.
//
//   arena_keys, arena_values   [kv_heads, slots, dim]             slot = block * BLOCK_SIZE + offset
//   tail_keys, tail_values     [rows, kv_heads, columns, dim]     a row's tokens after its arena tokens
//   queries                    [rows, kv_heads * GROUP, TOKENS, KEY_DIM]      of the row's newest TOKENS tokens
//   results                    [items, kv_heads * GROUP, TOKENS]  Partials, or the Whole of each row, query head and token
//
// With LATENT (latent attention) a value is the first VALUE_DIM numbers of its token's key, and the values' buffers are not
// read. The rest of a key is called ROPE, because that is what is rotated by the token's position.
//
// One threadgroup does one work item (row, first, last, arena_tokens) for one tile, 8 of the GROUP * TOKENS queries of a KV
// head. Each of its PARTS simdgroups has a share of the key's numbers, and of the value's. For each slice of SLICE tokens, at
// absolute positions, part p computes
//
//   S_p = K_p Q_p                    [SLICE tokens, 8 queries]        from its share of the key
//   S = S_0 + S_1 + ...              [8 queries, SLICE tokens]        from what all parts leave in threadgroup memory
//   P = exp(S - maximum of the row)
//   O_p = O_p + P V_p                [8 queries, VALUE_DIM / PARTS]   for its share of the value
//
// from K and V [tokens, dim] as they lie in memory and Q [dim, queries]. No product is computed twice. Each part adds up the
// scores for itself, in the same order, and so has bitwise the same weights. As S goes through threadgroup memory it is turned
// over, and tokens are the rows of K and V both: of a latent key a lane has the numbers that it needs of the value.
//
// S lies in one of two buffers, by turns: who writes one again has passed the barrier of the slice between, to which nobody
// comes who still reads it. So a slice needs one barrier.
//
// A token that a query does not see weighs 0. A slice's tokens that the item has not are not read: others are in their
// place, because 0 * NaN is NaN. What a token contributes, and when it is added, depends on its position alone.

#include "matrix_tiles.h"

// The largest of a row's eight numbers, and their sum: over the lanes that differ in the bits of the column.
inline float max_over_columns(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(8)));
}

inline float sum_over_columns(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

// A part's numbers of a value, and of a key: KEY of them, and behind all parts' shares of those ROPE.
template <int KEY_DIM, int VALUE_DIM, int PARTS, bool LATENT>
struct WidePart {
  static constexpr constant int VALUE = VALUE_DIM / PARTS;
  static constexpr constant int KEY = LATENT ? VALUE : KEY_DIM / PARTS;
  static constexpr constant int ROPE = LATENT ? KEY_DIM / PARTS - VALUE : 0;
  // Numbers of a tile's queries in threadgroup memory: 8 for each lane and chunk of KEY, 4 for all of ROPE.
  static constexpr constant int KEY_QUERIES = Share<KEY, 4>::CHUNKS * 256;
  static constexpr constant int QUERIES = KEY_QUERIES + (ROPE > 0 ? 128 : 0);
};

// Put the lane's numbers of DIM dimensions of a tile's queries where it finds them again: Q in matrices, a chunk together.
template <int DIM, int EACH, int KEY_DIM, int QUERIES, typename T>
inline void put_queries(
    const device T* queries,  // [QUERIES, KEY_DIM]
    int first_query,
    int begin,  // the first dimension
    MatrixPlace place,
    threadgroup T* lane_queries) {  // [chunks, 32 lanes, EACH], the lane's
  for (int n = 0; n < (DIM / 4 + EACH - 1) / EACH * EACH; n++) {  // of matrix n / 2 the number at column + n % 2
    const int d = min(share_dimension<DIM, 4>(n / 2 * 2 + place.row % 2, place.row / 2), DIM - 1);
    const int query = first_query + place.column + n % 2;
    const float number = float(queries[min(query, QUERIES - 1) * KEY_DIM + begin + d]);
    lane_queries[n / EACH * 32 * EACH + n % EACH] = T(query < QUERIES ? number : 0.0f);
  }
}

// A chunk of a slice's keys by the same chunk of the queries, added to the scores. The lane's numbers of the keys stay.
template <int EIGHTS, int CHUNK, int COUNT, typename T, typename KV>
inline void add_part_scores(
    thread simdgroup_matrix<float, 8, 8>* score,  // [EIGHTS], of 8 tokens each
    const device KV* thread const* key,           // [EIGHTS], of the token in the lane's row
    int begin,                                    // the chunk's first number
    int at,
    const threadgroup T* lane_queries,  // [chunks, 32 lanes, 8], the lane's two numbers of each matrix
    thread KV (*numbers)[8]) {          // [EIGHTS]
  if (COUNT == 0) {
    return;
  }
  T query_numbers[8];
  UNROLL
  for (int i = 0; i < COUNT; i += 4) {
    const vec<T, 4> loaded = *(const threadgroup vec<T, 4>*)(lane_queries + CHUNK * 256 + i);
    UNROLL
    for (int n = 0; n < 4; n++) {
      query_numbers[i + n] = loaded[n];
    }
  }
  UNROLL
  for (int u = 0; u < EIGHTS; u++) {
    load_chunk<4>(key[u] + begin, COUNT, at, numbers[u]);
    UNROLL
    for (int n = 0; n < COUNT; n += 2) {
      simdgroup_matrix<KV, 8, 8> tokens;
      tokens.thread_elements()[0] = numbers[u][n];
      tokens.thread_elements()[1] = numbers[u][n + 1];
      simdgroup_matrix<typename Factor<T, KV>::type, 8, 8> query;
      query.thread_elements()[0] = query_numbers[n];
      query.thread_elements()[1] = query_numbers[n + 1];
      simdgroup_multiply_accumulate(score[u], tokens, query, score[u]);
    }
  }
}

// A chunk of eight tokens' values, weighed and added to the output. With LOADED the lane has the numbers.
template <int CHUNK, int COUNT, bool LOADED, typename KV>
inline void add_part_values(
    thread simdgroup_matrix<float, 8, 8>* out,  // [chunks, 4]
    const device KV* value,                     // of the token in the lane's row
    int at,
    thread KV* numbers,  // [8]
    const thread simdgroup_matrix<float, 8, 8>& weight) {
  if (!LOADED) {
    load_chunk<4>(value + CHUNK * 32, COUNT, at, numbers);
  }
  UNROLL
  for (int n = 0; n < COUNT; n += 2) {
    simdgroup_matrix<KV, 8, 8> tokens;
    tokens.thread_elements()[0] = numbers[n];
    tokens.thread_elements()[1] = numbers[n + 1];
    simdgroup_multiply_accumulate(out[CHUNK * 4 + n / 2], weight, tokens, out[CHUNK * 4 + n / 2]);
  }
}

template <
    typename T, typename KV, int KEY_DIM, int VALUE_DIM, int BLOCK_SIZE, int GROUP, int TOKENS, int SLICE, int PARTS,
    bool LATENT, bool SOFTCAP, typename Results>
inline void paged_wide(
    const device T* queries,  // [GROUP, TOKENS, KEY_DIM], of this row and KV head
    const thread PagedHeads<KV, KEY_DIM>& keys,
    const thread PagedHeads<KV, VALUE_DIM>& values,
    int first,
    int last,
    int start,  // the row's newest query sees its tokens start .. end, one before it start - 1 .. end - 1
    int end,
    float scale,
    float softcap,
    int first_query,                   // of this threadgroup's tile
    const thread Results& results,     // [GROUP, TOKENS], of this item and KV head
    threadgroup T* shared_queries,     // [PARTS, Part::QUERIES]
    threadgroup float* shared_scores,  // [2, PARTS, 8 queries, SLICE + 4]: a gap, for stores to different banks
    uint simdgroup,
    uint lane) {
  constexpr int QUERIES = GROUP * TOKENS;
  constexpr int EIGHTS = SLICE / 8;
  constexpr int QUERY_SCORES = SLICE + 4;
  constexpr int PART_SCORES = 8 * QUERY_SCORES;
  using Part = WidePart<KEY_DIM, VALUE_DIM, PARTS, LATENT>;
  using KeyShare = Share<Part::KEY, 4>;
  using RopeShare = Share<Part::ROPE, 4>;
  using ValueShare = Share<Part::VALUE, 4>;
  const int part = int(simdgroup);
  const MatrixPlace place = matrix_place(lane);
  const int at = place.column / 2;  // whose share of a row's head the lane has

  // Queries
  const int first_number = part * Part::KEY;
  const int rope = PARTS * Part::KEY + part * Part::ROPE;  // where the part's share of the rest begins
  threadgroup T* key_queries = shared_queries + part * Part::QUERIES + int(lane) * 8;
  threadgroup T* rope_queries = shared_queries + part * Part::QUERIES + Part::KEY_QUERIES + int(lane) * 4;
  put_queries<Part::KEY, 8, KEY_DIM, QUERIES>(queries, first_query, first_number, place, key_queries);
  put_queries<Part::ROPE, 4, KEY_DIM, QUERIES>(queries, first_query, rope, place, rope_queries);

  // Start with nothing seen. Of what follows a lane has the query of its row.
  simdgroup_matrix<float, 8, 8> out[ValueShare::CHUNKS * 4];
  UNROLL
  for (int m = 0; m < ValueShare::CHUNKS * 4; m++) {
    out[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  float max_score = LOWEST;
  float sum_exp_score = 0.0f;
  const int query = first_query + place.row;
  const int older = TOKENS - 1 - query % TOKENS;
  const int sees_from = TOKENS == 1 ? first : max(first, start - older);
  const int sees_to = TOKENS == 1 ? last : min(last, end - older);

  // Where this lane leaves scores, of two queries and one token of each eight, and where it finds those of its query.
  constexpr int PAIR = 2 * EIGHTS;  // two neighbours of each eight tokens, together
  threadgroup float* left =
      shared_scores + part * PART_SCORES + place.column * QUERY_SCORES + place.row / 2 * PAIR + place.row % 2;
  const threadgroup float* found = shared_scores + place.row * QUERY_SCORES + at * PAIR;
  int buffer = 0;

  // For each slice
  for (int begin = first / SLICE * SLICE; begin < last; begin += SLICE) {
    // This part's share of the scores
    simdgroup_matrix<float, 8, 8> score[EIGHTS];
    const device KV* key[EIGHTS];
    UNROLL
    for (int u = 0; u < EIGHTS; u++) {
      score[u] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      key[u] = head_of<BLOCK_SIZE>(keys, clamp(begin + u * 8 + place.row, first, last - 1)) + first_number;
    }
    KV numbers[5][EIGHTS][8];
    KV rest[EIGHTS][8];
    add_part_scores<EIGHTS, 0, KeyShare::count(0)>(score, key, 0, at, key_queries, numbers[0]);
    add_part_scores<EIGHTS, 1, KeyShare::count(1)>(score, key, 32, at, key_queries, numbers[1]);
    add_part_scores<EIGHTS, 2, KeyShare::count(2)>(score, key, 64, at, key_queries, numbers[2]);
    add_part_scores<EIGHTS, 3, KeyShare::count(3)>(score, key, 96, at, key_queries, numbers[3]);
    add_part_scores<EIGHTS, 4, KeyShare::count(4)>(score, key, 128, at, key_queries, numbers[4]);
    add_part_scores<EIGHTS, 0, RopeShare::count(0)>(score, key, rope - first_number, at, rope_queries, rest);

    // The scores
    UNROLL
    for (int u = 0; u < EIGHTS; u++) {
      left[buffer + u * 2] = score[u].thread_elements()[0];
      left[buffer + QUERY_SCORES + u * 2] = score[u].thread_elements()[1];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float x[PAIR];
    UNROLL
    for (int n = 0; n < PAIR; n++) {
      x[n] = 0.0f;
    }
    UNROLL
    for (int p = 0; p < PARTS; p++) {
      UNROLL
      for (int n = 0; n < PAIR; n += 4) {
        const vec<float, 4> of_part = *(const threadgroup vec<float, 4>*)(found + buffer + p * PART_SCORES + n);
        UNROLL
        for (int i = 0; i < 4; i++) {
          x[n + i] += of_part[i];
        }
      }
    }
    buffer = PARTS * PART_SCORES - buffer;

    // Online softmax: raise the maximum, rescale what was summed under the old one, and weigh this slice's tokens.
    float new_max = max_score;
    UNROLL
    for (int n = 0; n < PAIR; n++) {
      const int token = begin + n / 2 * 8 + place.column + n % 2;
      x[n] *= scale;
      if (SOFTCAP) {
        x[n] = softcap * precise::tanh(x[n] / softcap);
      }
      new_max = max(new_max, token >= sees_from && token < sees_to ? x[n] : LOWEST);
    }
    new_max = max_over_columns(new_max);
    const float factor = fast::exp(max_score - new_max);
    max_score = new_max;
    sum_exp_score *= factor;
    UNROLL
    for (int m = 0; m < ValueShare::CHUNKS * 4; m++) {
      out[m].thread_elements()[0] *= factor;
      out[m].thread_elements()[1] *= factor;
    }

    // Values
    UNROLL
    for (int u = 0; u < EIGHTS; u++) {
      simdgroup_matrix<float, 8, 8> weight;
      UNROLL
      for (int e = 0; e < 2; e++) {
        const int token = begin + u * 8 + place.column + e;
        const float exp_score = fast::exp(x[u * 2 + e] - new_max);
        weight.thread_elements()[e] = token >= sees_from && token < sees_to ? exp_score : 0.0f;
        sum_exp_score += weight.thread_elements()[e];
      }
      const device KV* value = key[u];
      if (!LATENT) {
        value = head_of<BLOCK_SIZE>(values, clamp(begin + u * 8 + place.row, first, last - 1)) + part * Part::VALUE;
      }
      add_part_values<0, ValueShare::count(0), LATENT>(out, value, at, numbers[0][u], weight);
      add_part_values<1, ValueShare::count(1), LATENT>(out, value, at, numbers[1][u], weight);
      add_part_values<2, ValueShare::count(2), LATENT>(out, value, at, numbers[2][u], weight);
      add_part_values<3, ValueShare::count(3), LATENT>(out, value, at, numbers[3][u], weight);
    }
  }

  // The results: each part has its share of the values.
  const float sum = sum_over_columns(sum_exp_score);
  if (query < QUERIES) {
    UNROLL
    for (int n = 0; n < ValueShare::EACH; n++) {
      const int d = part * Part::VALUE + share_dimension<Part::VALUE, 4>(n, at);
      leave(results, query, d, out[n / 2].thread_elements()[n % 2], max_score, sum);
    }
  }
}
