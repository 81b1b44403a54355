// Attention of one query token per row over its paged keys and values: the partial result of one partition.
//
//   arena_keys, arena_values   [kv_heads, slots, dim]             slot = block * BLOCK_SIZE + offset, plain or quantized
//   tail_keys, tail_values     [rows, kv_heads, columns, dim]     a row's tokens after its arena tokens
//   queries                    [rows, kv_heads * GROUP, KEY_DIM]
//   slopes                     [kv_heads * GROUP], of ALiBi
//   results                    [items, kv_heads * GROUP]         Partials, or the Whole of each row and query head
//
// One threadgroup does one work item (row, first, last, arena_tokens) for one tile of a KV head's GROUP query heads: the
// row's tokens first .. last, which lie within one partition, and TILE heads, a power of 2. It has SLICES simdgroups. The
// tokens are cut into slices of 32 at absolute positions and dealt out to them; each holds the whole tile in registers.
//
// For the products the 32 lanes lie across the head, and AHEAD tokens are loaded at a time. Their TILE * AHEAD sums
// over the lanes are made together, so that each ends in one lane: with SPAN = 32 / TILE, lane TILE * t + h has the
// scores of head h and the tokens t, t + SPAN, t + 2 SPAN, ... of a slice. It weighs them and keeps the head's maximum.
//
// What a token contributes, and when it is added, depends on its position alone: not on the row's place in the batch,
// nor on whether it lies in the arena or in the tail.

#include "paged_attention.h"
#include "quantized.h"

// This lane's numbers of the token at `place`.
template <typename KV, int DIM>
inline void load_token(
    const thread HeadSource<KV, DIM>& source, int place, uint lane, thread typename Held<KV>::type* numbers) {
  load_head<DIM>(head_at(source, place), lane, numbers);
}

template <
    typename T, int KEY_DIM, int VALUE_DIM, int BLOCK_SIZE, int GROUP, int TILE, int AHEAD, int SLICES, bool SOFTCAP,
    bool ALIBI, typename Keys, typename Values, typename Results>
inline void paged_decode(
    const device T* queries,  // [GROUP, KEY_DIM], of this row and KV head
    const thread Keys& keys,
    const thread Values& values,
    const device int* block_table,
    int first,
    int last,
    int arena_tokens,
    int position,  // of the query
    float scale,
    float softcap,
    const device float* slopes,         // [GROUP], of this KV head
    int first_head,                     // of this threadgroup's tile
    const thread Results& results,      // [GROUP], of this item and KV head
    threadgroup float* outputs,         // [SLICES, VALUE_DIM]
    threadgroup float* max_scores,      // [SLICES, TILE]
    threadgroup float* sum_exp_scores,  // [SLICES, TILE]
    uint simdgroup,
    uint lane) {
  constexpr int QK_PER_LANE = LaneLayout<KEY_DIM>::COUNT;
  constexpr int V_PER_LANE = LaneLayout<VALUE_DIM>::COUNT;
  constexpr int SPAN = 32 / TILE;  // tokens of a slice of which a lane has one: it has TILE of them

  const int slice = int(simdgroup);
  const uint lane_head = lane % TILE, lane_token = lane / TILE;

  // Read the queries of the tile, in the order in which this lane will give its sums away: the h-th is of head
  // h ^ lane_head. Numbers beyond the head's end are 0. Start with nothing seen.
  typename Held<T>::type query[TILE][QK_PER_LANE];
  float out[TILE][V_PER_LANE];
  UNROLL
  for (int h = 0; h < TILE; h++) {
    const int head = min(first_head + (h ^ int(lane_head)), GROUP - 1);
    load_head<KEY_DIM>(queries + head * KEY_DIM, lane, query[h]);
    UNROLL
    for (int n = 0; n < QK_PER_LANE; n++) {
      query[h][n] = lane_dimension<KEY_DIM>(lane, n) < KEY_DIM ? query[h][n] : typename Held<T>::type(0.0f);
    }
    UNROLL
    for (int n = 0; n < V_PER_LANE; n++) {
      out[h][n] = 0.0f;
    }
  }
  float max_score = LOWEST;    // of head lane_head
  float sum_exp_score = 0.0f;  // of head lane_head and this lane's tokens
  const float slope = ALIBI ? slopes[min(first_head + int(lane_head), GROUP - 1)] : 0.0f;

  // For each slice of 32 tokens that is this simdgroup's turn
  const int first_slice = first / 32;
  const int turn = (slice + SLICES - first_slice % SLICES) % SLICES;
  for (int begin = (first_slice + turn) * 32; begin < last; begin += SLICES * 32) {
    const int from = max(first - begin, 0);
    const int to = min(last - begin, 32);
    // Lane i looks up where token i lies. Instead of a token that is not live, the nearest that is will be loaded.
    const int token = clamp(begin + int(lane), first, last - 1);
    const int place = place_of<BLOCK_SIZE>(token, arena_tokens, block_table);

    // Scores: dot products across the lanes, for all heads and AHEAD tokens together. With lane ^ 1 a lane exchanges
    // half of its sums: it gives what the other keeps and adds what it gets to what it keeps itself. With lane ^ 2 it
    // does so with what is left, and so on, until it has one sum over all lanes. Of heads a lane keeps the first half,
    // because its queries are in such an order; of the tokens, the half that its number says.
    float score[TILE];  // of head lane_head and tokens lane_token + s * SPAN
    UNROLL
    for (int s = 0; s < TILE; s++) {
      score[s] = 0.0f;
    }
    for (int step = from / AHEAD; step * AHEAD < to; step++) {
      typename Keys::Number key[AHEAD][QK_PER_LANE];
      UNROLL
      for (int a = 0; a < AHEAD; a++) {
        load_token(keys, simd_broadcast(place, ushort(step * AHEAD + a)), lane, key[a]);
      }
      float sum[AHEAD];
      UNROLL
      for (int a = 0; a < AHEAD; a++) {
        float product[TILE];
        UNROLL
        for (int h = 0; h < TILE; h++) {
          product[h] = float(query[h][0]) * float(key[a][0]);
          UNROLL
          for (int n = 1; n < QK_PER_LANE; n++) {
            product[h] = fma(float(query[h][n]), float(key[a][n]), product[h]);
          }
        }
        UNROLL
        for (int bit = 1; bit < TILE; bit *= 2) {
          UNROLL
          for (int h = 0; h < TILE; h++) {
            if (h % (2 * bit) == 0) {
              product[h] += simd_shuffle_xor(product[h + bit], ushort(bit));
            }
          }
        }
        sum[a] = product[0];
      }
      UNROLL
      for (int bit = 1; bit < AHEAD; bit *= 2) {
        const bool second_half = (lane_token & bit) != 0;
        UNROLL
        for (int a = 0; a < AHEAD; a++) {
          if (a % (2 * bit) == 0) {
            const float given = second_half ? sum[a] : sum[a + bit], kept = second_half ? sum[a + bit] : sum[a];
            sum[a] = kept + simd_shuffle_xor(given, ushort(TILE * bit));
          }
        }
      }
      UNROLL
      for (int mask = TILE * AHEAD; mask < 32; mask *= 2) {
        sum[0] += simd_shuffle_xor(sum[0], ushort(mask));
      }
      // This is the step of lane_token + s * SPAN, for which the lane keeps it, if first_own = s * SPAN.
      const int first_own = step * AHEAD - int(lane_token / AHEAD * AHEAD);
      UNROLL
      for (int s = 0; s < TILE; s++) {
        score[s] = first_own == s * SPAN ? sum[0] : score[s];
      }
    }

    // Online softmax: raise the maximum, rescale what was summed under the old one, and weigh this slice's tokens.
    bool live[TILE];
    float new_max = max_score;
    UNROLL
    for (int s = 0; s < TILE; s++) {
      score[s] *= scale;
      if (SOFTCAP) {
        score[s] = softcap * precise::tanh(score[s] / softcap);
      }
      if (ALIBI) {
        score[s] = fma(slope, float(begin + s * SPAN + int(lane_token) - position), score[s]);
      }
      live[s] = s * SPAN + int(lane_token) >= from && s * SPAN + int(lane_token) < to;
      new_max = max(new_max, live[s] ? score[s] : LOWEST);
    }
    UNROLL
    for (int mask = TILE; mask < 32; mask *= 2) {
      new_max = max(new_max, simd_shuffle_xor(new_max, ushort(mask)));
    }
    const float factor = fast::exp(max_score - new_max);
    max_score = new_max;
    sum_exp_score *= factor;
    float weight[TILE];
    UNROLL
    for (int s = 0; s < TILE; s++) {
      weight[s] = live[s] ? fast::exp(score[s] - new_max) : 0.0f;
      sum_exp_score += weight[s];
    }
    UNROLL
    for (int h = 0; h < TILE; h++) {
      const float head_factor = simd_broadcast(factor, ushort(h));
      UNROLL
      for (int n = 0; n < V_PER_LANE; n++) {
        out[h][n] *= head_factor;
      }
    }

    // Values: each token's weight goes from its lane to all lanes.
    for (int step = from / AHEAD; step * AHEAD < to; step++) {
      typename Values::Number value[AHEAD][V_PER_LANE];
      UNROLL
      for (int a = 0; a < AHEAD; a++) {
        load_token(values, simd_broadcast(place, ushort(step * AHEAD + a)), lane, value[a]);
      }
      const int first_lane_token = step % (SPAN / AHEAD) * AHEAD;  // of the lanes that weigh this step's tokens
      float of_step = weight[0];
      UNROLL
      for (int s = 1; s < TILE; s++) {
        of_step = step * AHEAD >= s * SPAN ? weight[s] : of_step;
      }
      UNROLL
      for (int a = 0; a < AHEAD; a++) {
        UNROLL
        for (int h = 0; h < TILE; h++) {
          const float token_weight = simd_broadcast(of_step, ushort((first_lane_token + a) * TILE + h));
          UNROLL
          for (int n = 0; n < V_PER_LANE; n++) {
            out[h][n] = fma(token_weight, float(value[a][n]), out[h][n]);
          }
        }
      }
    }
  }

  // Add up the slices, head by head: every simdgroup brings its output under the common maximum.
  UNROLL
  for (int mask = TILE; mask < 32; mask *= 2) {
    sum_exp_score += simd_shuffle_xor(sum_exp_score, ushort(mask));
  }
  if (lane < TILE) {
    max_scores[slice * TILE + int(lane)] = max_score;
    sum_exp_scores[slice * TILE + int(lane)] = sum_exp_score;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int h = 0; h < TILE; h++) {
    float common_max = LOWEST;
    for (int s = 0; s < SLICES; s++) {
      common_max = max(common_max, max_scores[s * TILE + h]);
    }
    const float factor = fast::exp(simd_broadcast(max_score, ushort(h)) - common_max);
    UNROLL
    for (int n = 0; n < V_PER_LANE; n++) {
      const int d = lane_dimension<VALUE_DIM>(lane, n);
      if (d < VALUE_DIM) {
        outputs[slice * VALUE_DIM + d] = out[h][n] * factor;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int head = first_head + h;
    if (head < GROUP) {
      float seen = 0.0f;  // the sum of weights of all slices
      if (Results::WHOLE || (slice == 0 && lane == 0)) {
        for (int s = 0; s < SLICES; s++) {
          const int of_slice = s * TILE + h;
          seen += sum_exp_scores[of_slice] * fast::exp(max_scores[of_slice] - common_max);
        }
      }
      for (int d = slice * 32 + int(lane); d < VALUE_DIM; d += SLICES * 32) {
        float sum = 0.0f;
        for (int s = 0; s < SLICES; s++) {
          sum += outputs[s * VALUE_DIM + d];
        }
        leave(results, head, d, sum, common_max, seen);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
