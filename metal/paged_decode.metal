// Attention of one query token per row over its paged keys and values: the partial result of one partition.
//
//   arena_keys, arena_values   [kv_heads, slots, dim]             slot = block * BLOCK_SIZE + offset
//   tail_keys, tail_values     [rows, kv_heads, columns, dim]     a row's tokens after its arena tokens
//   queries                    [rows, kv_heads * GROUP, KEY_DIM]
//   partials                   [items, kv_heads * GROUP]         a Partial for each item and query head
//
// One threadgroup does one work item (row, first, last, arena_tokens) for one KV head: the row's tokens first .. last,
// which lie within one partition. It has SLICES * TILES simdgroups. The tokens are cut into slices of 32 at absolute
// positions, dealt out to SLICES simdgroups; the GROUP query heads of the KV head are cut into TILES tiles of TILE,
// each held in registers by SLICES simdgroups. Within a slice lane i looks after token i: its place, its scores, its
// weights; for the products the 32 lanes lie across the head.
//
// What a token contributes, and when it is added, depends on its position alone: not on the row's place in the batch,
// nor on whether it lies in the arena or in the tail.

#include "paged_attention.h"

template <typename KV, int DIM>
struct HeadSource {
  const device KV* arena;  // token at slot s: arena + s * DIM
  const device KV* tail;   // token in column c: tail + c * DIM
};

// This lane's numbers of a token's head; a token that is not live is not read and counts as zeros.
template <int DIM, typename KV>
inline void load_token(const thread HeadSource<KV, DIM>& source, int place, bool live, uint lane, thread float* numbers) {
  if (live) {
    load_head<DIM>(
        place >= 0 ? source.arena + int64_t(place) * DIM : source.tail + int64_t(~place) * DIM, lane, numbers);
  } else {
    UNROLL
    for (int n = 0; n < LaneLayout<DIM>::COUNT; n++) {
      numbers[n] = 0.0f;
    }
  }
}

template <
    typename T, typename KV, int KEY_DIM, int VALUE_DIM, int BLOCK_SIZE, int GROUP, int TILE, int SLICES, bool SOFTCAP>
inline void paged_decode(
    const device T* queries,  // [GROUP, KEY_DIM], of this row and KV head
    const thread HeadSource<KV, KEY_DIM>& keys,
    const thread HeadSource<KV, VALUE_DIM>& values,
    const device int* block_table,
    int first,
    int last,
    int arena_tokens,
    float scale,
    float softcap,
    device Partial<VALUE_DIM>* partials,  // [GROUP], of this item and KV head
    threadgroup float* outputs,           // [SIMDGROUPS, VALUE_DIM]
    threadgroup float* max_scores,        // [SIMDGROUPS, TILE]
    threadgroup float* sum_exp_scores,    // [SIMDGROUPS, TILE]
    uint simdgroup,
    uint lane) {
  constexpr int QK_PER_LANE = LaneLayout<KEY_DIM>::COUNT;
  constexpr int V_PER_LANE = LaneLayout<VALUE_DIM>::COUNT;
  // Tokens loaded before the first is used
  constexpr int AHEAD = (QK_PER_LANE > 4 || V_PER_LANE > 4 || TILE * (QK_PER_LANE + V_PER_LANE) > 48) ? 2 : 4;

  const int slice = int(simdgroup) % SLICES;
  const int first_head = int(simdgroup) / SLICES * TILE;

  // Read the queries of the tile, scaled, and start with nothing seen.
  float query[TILE][QK_PER_LANE];
  float out[TILE][V_PER_LANE];
  float max_score[TILE];
  float sum_exp_score[TILE];
  UNROLL
  for (int h = 0; h < TILE; h++) {
    const int head = min(first_head + h, GROUP - 1);
    load_head<KEY_DIM>(queries + head * KEY_DIM, lane, query[h]);
    UNROLL
    for (int n = 0; n < QK_PER_LANE; n++) {
      query[h][n] *= scale;
    }
    UNROLL
    for (int n = 0; n < V_PER_LANE; n++) {
      out[h][n] = 0.0f;
    }
    max_score[h] = LOWEST;
    sum_exp_score[h] = 0.0f;
  }

  // For each slice of 32 tokens that is this simdgroup's turn
  const int first_slice = first / 32;
  const int turn = (slice + SLICES - first_slice % SLICES) % SLICES;
  for (int begin = (first_slice + turn) * 32; begin < last; begin += SLICES * 32) {
    const int token = begin + int(lane);
    const bool live = token >= first && token < last;
    const int place = live ? place_of<BLOCK_SIZE>(token, arena_tokens, block_table) : 0;
    const int from = max(first - begin, 0);
    const int to = min(last - begin, 32);

    // Scores: a dot product across the lanes for each token and head; lane i keeps those of token i.
    float score[TILE];
    UNROLL
    for (int h = 0; h < TILE; h++) {
      score[h] = 0.0f;
    }
    for (int i = from / AHEAD * AHEAD; i < to; i += AHEAD) {
      float key[AHEAD][QK_PER_LANE];
      UNROLL
      for (int a = 0; a < AHEAD; a++) {
        load_token<KEY_DIM>(keys, simd_shuffle(place, ushort(i + a)), i + a >= from && i + a < to, lane, key[a]);
      }
      UNROLL
      for (int h = 0; h < TILE; h++) {
        UNROLL
        for (int a = 0; a < AHEAD; a++) {
          float product = 0.0f;
          UNROLL
          for (int n = 0; n < QK_PER_LANE; n++) {
            product += query[h][n] * key[a][n];
          }
          product = simd_sum(product);
          score[h] = int(lane) == i + a ? product : score[h];
        }
      }
    }

    // Online softmax: raise the maximum, rescale what was summed under the old one, and weigh this slice's tokens.
    float weight[TILE];
    UNROLL
    for (int h = 0; h < TILE; h++) {
      if (SOFTCAP) {
        score[h] = softcap * precise::tanh(score[h] / softcap);
      }
      const float new_max = max(max_score[h], simd_max(live ? score[h] : LOWEST));
      const float factor = fast::exp(max_score[h] - new_max);
      weight[h] = live ? fast::exp(score[h] - new_max) : 0.0f;
      sum_exp_score[h] = sum_exp_score[h] * factor + weight[h];
      max_score[h] = new_max;
      UNROLL
      for (int n = 0; n < V_PER_LANE; n++) {
        out[h][n] *= factor;
      }
    }

    // Values: each token's weight goes from its lane to all lanes.
    for (int i = from / AHEAD * AHEAD; i < to; i += AHEAD) {
      float value[AHEAD][V_PER_LANE];
      UNROLL
      for (int a = 0; a < AHEAD; a++) {
        load_token<VALUE_DIM>(values, simd_shuffle(place, ushort(i + a)), i + a >= from && i + a < to, lane, value[a]);
      }
      UNROLL
      for (int h = 0; h < TILE; h++) {
        UNROLL
        for (int a = 0; a < AHEAD; a++) {
          const float token_weight = simd_shuffle(weight[h], ushort(i + a));
          UNROLL
          for (int n = 0; n < V_PER_LANE; n++) {
            out[h][n] += token_weight * value[a][n];
          }
        }
      }
    }
  }

  // Add up the slices, head by head: every simdgroup of the tile brings its output under the tile's common maximum.
  UNROLL
  for (int h = 0; h < TILE; h++) {
    const float sum = simd_sum(sum_exp_score[h]);
    if (lane == 0) {
      max_scores[simdgroup * TILE + h] = max_score[h];
      sum_exp_scores[simdgroup * TILE + h] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int tile_start = int(simdgroup) - slice;
  UNROLL
  for (int h = 0; h < TILE; h++) {
    float common_max = LOWEST;
    for (int s = 0; s < SLICES; s++) {
      common_max = max(common_max, max_scores[(tile_start + s) * TILE + h]);
    }
    const float factor = fast::exp(max_score[h] - common_max);
    UNROLL
    for (int n = 0; n < V_PER_LANE; n++) {
      const int d = lane_dimension<VALUE_DIM>(lane, n);
      if (d < VALUE_DIM) {
        outputs[simdgroup * VALUE_DIM + d] = out[h][n] * factor;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int head = first_head + h;
    if (head < GROUP) {
      for (int d = slice * 32 + int(lane); d < VALUE_DIM; d += SLICES * 32) {
        float sum = 0.0f;
        for (int s = 0; s < SLICES; s++) {
          sum += outputs[(tile_start + s) * VALUE_DIM + d];
        }
        partials[head].out[d] = sum;
      }
      if (slice == 0 && lane == 0) {
        float sum = 0.0f;
        for (int s = 0; s < SLICES; s++) {
          const int of_slice = (tile_start + s) * TILE + h;
          sum += sum_exp_scores[of_slice] * fast::exp(max_scores[of_slice] - common_max);
        }
        partials[head].max_score = common_max;
        partials[head].sum_exp_score = sum;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
