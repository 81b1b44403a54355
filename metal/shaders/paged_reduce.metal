// The result of one query head from the partial results of its row's partitions.
//
//   factor_p = exp(max_score_p - M)
//   out = (sum over p of factor_p * out_p) / L,    L = sum over p of factor_p * sum_exp_score_p  + exp(sink - M)
//
// where M is the largest of all max_score_p and the sink. A row with nothing to attend to gets zeros.
//
//   partials    [items, query_heads]              a Partial each: out_p, max_score_p, sum_exp_score_p
//   attended    [rows, query_heads, VALUE_DIM]
//
// One threadgroup does one query head of one row. Each of its SIMDGROUPS simdgroups adds up every SIMDGROUPS-th partition,
// its lanes across the head.

#include "paged_attention.h"

template <typename T, int VALUE_DIM, int SIMDGROUPS, bool SINKS>
inline void paged_reduce(
    const device Partial<VALUE_DIM>* partials,  // of the row's first item and this head; the next is query_heads further
    int items,
    int query_heads,
    float sink,
    device T* attended,                 // [VALUE_DIM], of this row and head
    threadgroup float* outputs,         // [SIMDGROUPS, VALUE_DIM]
    threadgroup float* sum_exp_scores,  // [SIMDGROUPS]
    uint simdgroup,
    uint lane) {
  constexpr int V_PER_LANE = (VALUE_DIM + 31) / 32;
  const int64_t item_stride = query_heads;

  // A row of one partition has the bits that it has where no row of the step has two.
  if (items == 1) {
    for (int d = int(simdgroup) * 32 + int(lane); d < VALUE_DIM; d += SIMDGROUPS * 32) {
      attended[d] = T(attended_number<SINKS>(partials->out[d], partials->max_score, partials->sum_exp_score, sink));
    }
    return;
  }

  // The common maximum, found by every simdgroup for itself.
  float common_max = SINKS ? sink : LOWEST;
  for (int p = int(lane); p < items; p += 32) {
    common_max = max(common_max, partials[p * item_stride].max_score);
  }
  common_max = simd_max(common_max);

  // Each simdgroup's share of the partitions
  float out[V_PER_LANE];
  UNROLL
  for (int n = 0; n < V_PER_LANE; n++) {
    out[n] = 0.0f;
  }
  float sum_exp_score = 0.0f;
  for (int p = int(simdgroup); p < items; p += SIMDGROUPS) {
    const device Partial<VALUE_DIM>& partial = partials[p * item_stride];
    const float factor = fast::exp(partial.max_score - common_max);
    sum_exp_score += factor * partial.sum_exp_score;
    UNROLL
    for (int n = 0; n < V_PER_LANE; n++) {
      const int d = n * 32 + int(lane);
      if (d < VALUE_DIM) {
        out[n] += factor * partial.out[d];
      }
    }
  }

  // Add up the shares, in the same order in every thread.
  UNROLL
  for (int n = 0; n < V_PER_LANE; n++) {
    const int d = n * 32 + int(lane);
    if (d < VALUE_DIM) {
      outputs[simdgroup * VALUE_DIM + d] = out[n];
    }
  }
  if (lane == 0) {
    sum_exp_scores[simdgroup] = sum_exp_score;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float denominator = SINKS ? fast::exp(sink - common_max) : 0.0f;
  for (int s = 0; s < SIMDGROUPS; s++) {
    denominator += sum_exp_scores[s];
  }
  for (int d = int(simdgroup) * 32 + int(lane); d < VALUE_DIM; d += SIMDGROUPS * 32) {
    float sum = 0.0f;
    for (int s = 0; s < SIMDGROUPS; s++) {
      sum += outputs[s * VALUE_DIM + d];
    }
    attended[d] = T(denominator > 0.0f ? sum / denominator : 0.0f);
  }
}
