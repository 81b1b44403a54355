// The result of one query head from the partial results of its row's partitions.
//
//   out = (sum over p of exp(highest_p - M) * out_p) / L,    L = sum over p of exp(highest_p - M) * total_p  + exp(sink - M)
//
// where M is the largest of all highest_p and the sink. A row with nothing to attend to gets zeros.
//
//   partials    [items, query_heads, VALUE_DIM + 2] float: out_p [VALUE_DIM], highest_p, total_p
//   attended    [rows, query_heads, VALUE_DIM]
//
// One threadgroup does one query head of one row. Each of its SIMDGROUPS simdgroups adds up every SIMDGROUPS-th partition,
// its lanes across the head.

#include "paged_attention.h"

template <typename T, int VALUE_DIM, int SIMDGROUPS, bool SINKS>
inline void paged_reduce(
    const device float* partials,  // of the row's first item and this head; the next item is query_heads further
    int items,
    int query_heads,
    float sink,
    device T* attended,              // [VALUE_DIM], of this row and head
    threadgroup float* shared_out,   // [SIMDGROUPS, VALUE_DIM]
    threadgroup float* shared_total,  // [SIMDGROUPS]
    uint simdgroup,
    uint lane) {
  constexpr int V = (VALUE_DIM + 31) / 32;
  const int64_t stride = int64_t(query_heads) * (VALUE_DIM + 2);

  // The common maximum, found by every simdgroup for itself.
  float common = SINKS ? sink : LOWEST;
  for (int p = int(lane); p < items; p += 32) {
    common = max(common, partials[p * stride + VALUE_DIM]);
  }
  common = simd_max(common);

  // Each simdgroup's share of the partitions
  float out[V];
  UNROLL
  for (int n = 0; n < V; n++) {
    out[n] = 0.0f;
  }
  float total = 0.0f;
  for (int p = int(simdgroup); p < items; p += SIMDGROUPS) {
    const float kept = fast::exp(partials[p * stride + VALUE_DIM] - common);
    total += kept * partials[p * stride + VALUE_DIM + 1];
    UNROLL
    for (int n = 0; n < V; n++) {
      const int d = n * 32 + int(lane);
      if (d < VALUE_DIM) {
        out[n] += kept * partials[p * stride + d];
      }
    }
  }

  // Add up the shares, in the same order in every thread.
  UNROLL
  for (int n = 0; n < V; n++) {
    const int d = n * 32 + int(lane);
    if (d < VALUE_DIM) {
      shared_out[simdgroup * VALUE_DIM + d] = out[n];
    }
  }
  if (lane == 0) {
    shared_total[simdgroup] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  total = SINKS ? fast::exp(sink - common) : 0.0f;
  for (int s = 0; s < SIMDGROUPS; s++) {
    total += shared_total[s];
  }
  for (int d = int(simdgroup) * 32 + int(lane); d < VALUE_DIM; d += SIMDGROUPS * 32) {
    float sum = 0.0f;
    for (int s = 0; s < SIMDGROUPS; s++) {
      sum += shared_out[s * VALUE_DIM + d];
    }
    attended[d] = T(total > 0.0f ? sum / total : 0.0f);
  }
}
