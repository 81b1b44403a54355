// Attention of prefill: stretches of consecutive query tokens of a row over its paged keys and values. Each query sees its
// row's tokens up to itself, and of those the newest `reach`.
//
//   keys, values   [kv_heads, slots, dim]             slot = block * BLOCK_SIZE + offset
//   queries        [tokens, query_heads, KEY_DIM]     the stretches one after the other
//   attended       [tokens, query_heads, VALUE_DIM]
//
// One threadgroup does one work item, a tile of query tokens, for HEADS query heads of a KV head. The tiles of a row begin
// at multiples of their length; of one that a stretch fills in part, the item has the part. Head by head and token by
// token its queries are the columns of the matrices, 8 for each of SIMDGROUPS simdgroups. For SLICE tokens of keys at a
// time, which all simdgroups bring to threadgroup memory together, and then as many values, a simdgroup computes
//
//   S = K Q                               [SLICE tokens, 8 queries]
//   P = exp(S - maximum of the column)
//   O = O + V P                           [VALUE_DIM, 8 queries]
//
// as paged_matrix.metal does: a token is a row of S, and P is used as S leaves it.
//
// Slices begin at multiples of SLICE, and what a slice that a query does not see adds to it is 0: so a query's result does
// not depend on the stretches that its prompt was cut into. In the place of tokens that the item does not see lie others
// that it does, because 0 * NaN is NaN.

#include "matrix_tiles.h"

// A head in threadgroup memory, an odd number of 32 bytes long: then four of them lie in different banks.
template <typename KV, int DIM>
struct Padded {
  static constexpr constant int ROW = ((DIM * int(sizeof(KV)) + 31) / 32 | 1) * 32 / int(sizeof(KV));
};

// Bring the keys or values of SLICE tokens to threadgroup memory, 16 bytes at a time.
template <int BLOCK_SIZE, int SLICE, int THREADS, typename KV, int DIM>
inline void stage(
    const device KV* heads,  // [slots, DIM], of this KV head
    const device int* block_table,
    int slice,   // the first token
    int oldest,  // before it and from `end` on the nearest token is taken
    int end,
    uint index,
    threadgroup KV* staged) {  // [SLICE, ROW]
  constexpr int PACK = 16 / int(sizeof(KV));
  for (int n = int(index); n < SLICE * (DIM / PACK); n += THREADS) {
    const int row = n / (DIM / PACK);
    const int d = n % (DIM / PACK) * PACK;
    const uint token = uint(clamp(slice + row, oldest, end - 1));
    const uint64_t slot = uint64_t(block_table[token / BLOCK_SIZE]) * BLOCK_SIZE + token % BLOCK_SIZE;
    threadgroup vec<uint, 4>* to = (threadgroup vec<uint, 4>*)(staged + row * Padded<KV, DIM>::ROW + d);
    *to = *(const device vec<uint, 4>*)(heads + slot * DIM + d);
  }
}

// A chunk of a slice's keys by the same chunk of the queries, added to the scores.
template <int UNITS, int ROW, typename T, typename KV>
inline void add_slice_scores(
    thread simdgroup_matrix<float, 8, 8>* score,  // [UNITS], of 8 tokens each
    const threadgroup KV* keys,                   // the chunk of the token in the lane's row
    int count,
    int at,
    const threadgroup T* queries) {  // [8], the lane's two numbers of the matrices of the chunk
  T query_numbers[8];
  load_chunk<1, T, InThreadgroup<T>>(queries, 8, 0, query_numbers);
  UNROLL
  for (int u = 0; u < UNITS; u++) {
    KV numbers[8];
    load_chunk<4, KV, InThreadgroup<KV>>(keys + u * 8 * ROW, count, at, numbers);
    UNROLL
    for (int n = 0; n < 8; n += 2) {
      if (n < count) {
        simdgroup_matrix<KV, 8, 8> tokens;
        tokens.thread_elements()[0] = numbers[n];
        tokens.thread_elements()[1] = numbers[n + 1];
        simdgroup_matrix<typename Factor<T, KV>::type, 8, 8> query;
        query.thread_elements()[0] = query_numbers[n];
        query.thread_elements()[1] = query_numbers[n + 1];
        simdgroup_multiply_accumulate(score[u], tokens, query, score[u]);
      }
    }
  }
}

// A chunk of the values of 8 tokens, weighed and added to the output.
template <int CHUNK, int VALUE_DIM, typename KV>
inline void add_slice_values(
    thread simdgroup_matrix<float, 8, 8>* out,  // [VALUE_DIM / 8]
    const threadgroup KV* left,                 // of the token that is the lane's column of the values; then the next
    int at,
    const thread simdgroup_matrix<float, 8, 8>& weight) {
  constexpr int COUNT = Share<VALUE_DIM, 8>::count(CHUNK);
  KV numbers[2][8];
  load_chunk<8, KV, InThreadgroup<KV>>(left + CHUNK * 64, COUNT, at, numbers[0]);
  load_chunk<8, KV, InThreadgroup<KV>>(left + Padded<KV, VALUE_DIM>::ROW + CHUNK * 64, COUNT, at, numbers[1]);
  UNROLL
  for (int n = 0; n < COUNT; n++) {
    simdgroup_matrix<KV, 8, 8> tokens;
    tokens.thread_elements()[0] = numbers[0][n];
    tokens.thread_elements()[1] = numbers[1][n];
    simdgroup_multiply_accumulate(out[CHUNK * 8 + n], tokens, weight, out[CHUNK * 8 + n]);
  }
}

template <
    typename T, typename KV, int KEY_DIM, int VALUE_DIM, int BLOCK_SIZE, int HEADS, int SLICE, int SIMDGROUPS,
    bool SOFTCAP, bool SINKS>
inline void paged_prefill(
    const device T* queries,  // [tokens, query_heads, KEY_DIM]
    const device KV* keys,    // [slots, KEY_DIM], of this KV head
    const device KV* values,  // [slots, VALUE_DIM]
    const device int* block_table,
    int begin,   // the item's queries are the row's tokens begin .. end
    int end,
    int origin,  // the query of the row's token t is number origin + t
    int reach,
    int query_heads,
    int first_head,  // of HEADS
    float scale,
    float softcap,
    const device float* sinks,      // [query_heads]
    device T* attended,             // [tokens, query_heads, VALUE_DIM]
    threadgroup T* shared_queries,  // [SIMDGROUPS, chunks of a key, 32 lanes, 8]
    threadgroup KV* staged,         // [SLICE, ROW of a key or of a value]
    uint simdgroup,
    uint lane) {
  constexpr int UNITS = SLICE / 8;
  constexpr int TILE = SIMDGROUPS / HEADS * 8;
  constexpr int THREADS = SIMDGROUPS * 32;
  constexpr int KEY_ROW = Padded<KV, KEY_DIM>::ROW;
  constexpr int VALUE_ROW = Padded<KV, VALUE_DIM>::ROW;
  using KeyShare = Share<KEY_DIM, 4>;  // of a key the four lanes of its row; of a value the eight of its column
  const MatrixPlace place = matrix_place(lane);
  const uint index = simdgroup * 32 + lane;

  // This simdgroup has the queries of one head and 8 tokens of the tile; a lane has those of its two columns.
  const int head = first_head + int(simdgroup) / (TILE / 8);
  const int first = begin / TILE * TILE + int(simdgroup) % (TILE / 8) * 8;
  const int query = first + place.column;

  // Put them where they can be read again, a chunk of each lane's numbers together. A column whose query is not the item's
  // gets the nearest that is.
  threadgroup T* own_queries = shared_queries + (int(simdgroup) * KeyShare::CHUNKS * 32 + int(lane)) * 8;
  for (int n = 0; n < KeyShare::CHUNKS * 8; n++) {  // of matrix n / 2 the number at column + n % 2
    const int d = min(share_dimension<KEY_DIM, 4>(n / 2 * 2 + place.row % 2, place.row / 2), KEY_DIM - 1);
    const int64_t number = origin + clamp(query + n % 2, begin, end - 1);
    own_queries[n / 8 * 256 + n % 8] = queries[(number * query_heads + head) * KEY_DIM + d];
  }

  // Start with nothing seen, or with the sink, which one row of lanes counts.
  simdgroup_matrix<float, 8, 8> out[VALUE_DIM / 8];
  UNROLL
  for (int m = 0; m < VALUE_DIM / 8; m++) {
    out[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  const float first_max = SINKS ? sinks[head] : LOWEST;
  const float first_sum = SINKS && place.row == 0 ? 1.0f : 0.0f;
  float max_score[2] = {first_max, first_max};
  float sum_exp_score[2] = {first_sum, first_sum};

  // The item's queries see tokens oldest .. end; those of this simdgroup that are the item's are low .. high.
  const int oldest = max(begin + 1 - reach, 0);
  const int low = max(first, begin);
  const int high = min(first + 7, end - 1);

  // For each slice of tokens
  for (int slice = oldest / SLICE * SLICE; slice < end; slice += SLICE) {
    const bool seen = low <= high && slice <= high && slice + SLICE + reach > low + 1;  // by any
    const bool in_part = slice + SLICE - 1 > low || slice <= high - reach;              // or not all of it by all

    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage<BLOCK_SIZE, SLICE, THREADS, KV, KEY_DIM>(keys, block_table, slice, oldest, end, index, staged);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    simdgroup_matrix<float, 8, 8> score[UNITS];
    UNROLL
    for (int u = 0; u < UNITS; u++) {
      score[u] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    if (seen) {
      // Scores
      const threadgroup KV* key = staged + place.row * KEY_ROW;
      ROLLED
      for (int n = 0; n + 8 <= KeyShare::EACH; n += 8) {
        add_slice_scores<UNITS, KEY_ROW>(score, key + n * 4, 8, place.column / 2, own_queries + n / 8 * 256);
      }
      if (KeyShare::REST > 0) {
        const int n = KeyShare::EACH - KeyShare::REST;
        add_slice_scores<UNITS, KEY_ROW>(
            score, key + n * 4, KeyShare::REST, place.column / 2, own_queries + n / 8 * 256);
      }

      // Online softmax: raise the maximum, rescale what was summed under the old one, and weigh this slice's tokens.
      UNROLL
      for (int e = 0; e < 2; e++) {
        UNROLL
        for (int u = 0; u < UNITS; u++) {
          float x = score[u].thread_elements()[e] * scale;
          if (SOFTCAP) {
            x = softcap * precise::tanh(x / softcap);
          }
          score[u].thread_elements()[e] = x;
        }
        if (in_part) {
          UNROLL
          for (int u = 0; u < UNITS; u++) {
            const int older = query + e - (slice + u * 8 + place.row);
            score[u].thread_elements()[e] = older >= 0 && older < reach ? score[u].thread_elements()[e] : UNSEEN;
          }
        }
        float new_max = max_score[e];
        UNROLL
        for (int u = 0; u < UNITS; u++) {
          new_max = max(new_max, score[u].thread_elements()[e]);
        }
        new_max = max_over_rows(new_max);
        const float factor = fast::exp(max_score[e] - new_max);
        max_score[e] = new_max;
        sum_exp_score[e] *= factor;
        UNROLL
        for (int u = 0; u < UNITS; u++) {
          const float weight = fast::exp(score[u].thread_elements()[e] - new_max);
          score[u].thread_elements()[e] = weight;
          sum_exp_score[e] += weight;
        }
        UNROLL
        for (int m = 0; m < VALUE_DIM / 8; m++) {
          out[m].thread_elements()[e] *= factor;
        }
      }
    }

    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage<BLOCK_SIZE, SLICE, THREADS, KV, VALUE_DIM>(values, block_table, slice, oldest, end, index, staged);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (seen) {
      // Values: what were scores are weights now.
      ROLLED
      for (int u = 0; u < UNITS; u++) {
        const threadgroup KV* left = staged + (u * 8 + place.column) * VALUE_ROW;
        add_slice_values<0, VALUE_DIM>(out, left, place.row, score[0]);
        add_slice_values<1, VALUE_DIM>(out, left, place.row, score[0]);
        add_slice_values<2, VALUE_DIM>(out, left, place.row, score[0]);
        add_slice_values<3, VALUE_DIM>(out, left, place.row, score[0]);
        UNROLL
        for (int next = 1; next < UNITS; next++) {
          score[next - 1] = score[next];
        }
      }
    }
  }

  UNROLL
  for (int e = 0; e < 2; e++) {
    const float sum = sum_over_rows(sum_exp_score[e]);
    if (query + e >= begin && query + e < end) {
      device T* to = attended + ((int64_t(origin) + query + e) * query_heads + head) * VALUE_DIM;
      UNROLL
      for (int m = 0; m < VALUE_DIM / 8; m++) {
        to[share_dimension<VALUE_DIM, 8>(m, place.row)] = T(out[m].thread_elements()[e] / sum);
      }
    }
  }
}
