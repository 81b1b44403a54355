// What a decode step does with a layer's new queries, keys and values before it attends: RMSNorm of queries and keys,
// rotary positions, and the tail with one column more.
//
//   queries                  [rows, query_heads, KEY_DIM]          of one token of each row
//   keys, values             [rows, kv_heads, KEY_DIM or VALUE_DIM]
//   query_weight, key_weight [KEY_DIM], of the norms
//   frequencies              [ROTATED / 2] float32: a pair turns by position / frequency
//   tail_keys, tail_values   [rows, kv_heads, columns, dim]
//   turned                   [rows, query_heads, KEY_DIM]
//   new_keys, new_values     [rows, kv_heads, columns, dim]        the tails, with the new token in one column
//
//   norm(x) = x / sqrt(mean(x^2) + eps) * weight
//   turned pair (a, b): a' = a cos - b sin,  b' = a sin + b cos,   angle = scale * position / frequency
//
// One simdgroup does one head of a row's queries, or four columns of a head of its keys or values. Numbers are rounded to T
// where MLX's own kernels round them: after the norm, and after the rotation.

// How fast the pairs of a head turn.
template <int ROTATED, bool FREQUENCIES>
struct Rotation {
  const device float* frequencies;
  float log2_base;  // without FREQUENCIES, the frequency of pair p is 2^(log2_base * 2 p / ROTATED)
  float position;   // times the scale
};

template <int ROTATED, bool FREQUENCIES>
inline float angle_of(const thread Rotation<ROTATED, FREQUENCIES>& rotation, int pair) {
  const float turn = FREQUENCIES ? 1.0f / rotation.frequencies[pair]
                                 : precise::exp2(-(float(pair) / float(ROTATED / 2)) * rotation.log2_base);
  return rotation.position * turn;
}

// Write a head with its norm, if it has one, and its rotation.
template <typename T, int DIM, bool NORM, int ROTATED, bool TRADITIONAL, bool FREQUENCIES>
inline void write_turned(
    const device T* head,
    const device T* weight,
    float eps,
    const thread Rotation<ROTATED, FREQUENCIES>& rotation,
    device T* to,
    threadgroup T* numbers,  // [DIM]
    uint lane) {
  float scale = 1.0f;
  if (NORM) {
    float sum = 0.0f;
    for (int d = int(lane); d < DIM; d += 32) {
      const float x = float(head[d]);
      sum = fma(x, x, sum);
    }
    scale = precise::rsqrt(simd_sum(sum) / float(DIM) + eps);
  }
  for (int d = int(lane); d < DIM; d += 32) {
    const T x = NORM ? T(float(head[d]) * scale) : head[d];
    numbers[d] = NORM ? T(float(x) * float(weight[d])) : x;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int pair = int(lane); pair < ROTATED / 2; pair += 32) {
    const float angle = angle_of(rotation, pair);
    const float c = precise::cos(angle), s = precise::sin(angle);
    const int first = TRADITIONAL ? 2 * pair : pair;
    const int second = TRADITIONAL ? 2 * pair + 1 : pair + ROTATED / 2;
    const float a = float(numbers[first]), b = float(numbers[second]);
    to[first] = T(a * c - b * s);
    to[second] = T(a * s + b * c);
  }
  for (int d = ROTATED + int(lane); d < DIM; d += 32) {
    to[d] = numbers[d];
  }
}

// Copy columns of a tail, but not the new one. Without a tail they are zeros.
template <typename T, int DIM>
inline void copy_columns(const device T* tail, device T* to, int begin, int end, int column, bool begins, uint lane) {
  for (int c = begin; c < end; c++) {
    if (c == column) {
      continue;
    }
    device vec<T, 4>* target = (device vec<T, 4>*)(to + c * DIM);
    for (int n = int(lane); n < DIM / 4; n += 32) {
      if (begins) {
        target[n] = vec<T, 4>(T(0.0f));
      } else {
        target[n] = ((const device vec<T, 4>*)(tail + c * DIM))[n];
      }
    }
  }
}
