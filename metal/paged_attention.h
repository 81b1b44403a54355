// What the paged attention kernels share: how a head lies over the lanes of a simdgroup, and where a token lies.

// The smallest running maximum: finite, so that no difference of two maxima is ever NaN.
#define LOWEST (-3.402823466e+38f)

// For loops over a thread's arrays: unrolled, so that the arrays stay in registers.
#define UNROLL _Pragma("clang loop unroll(full)")

// A head of DIM numbers over the 32 lanes of a simdgroup, PACK neighbours at a time: lane i holds, for each step j,
// the numbers from (32 j + i) * PACK. Lanes beyond the head's end hold zeros.
template <int DIM>
struct LaneLayout {
  static constexpr constant int PACK = (DIM % 64 == 0 && DIM % 128 != 0) ? 2 : 4;
  static constexpr constant int STEPS = (DIM / PACK + 31) / 32;
  static constexpr constant int COUNT = STEPS * PACK;
};

// The dimension that number n of a lane stands for.
template <int DIM>
inline int lane_dimension(uint lane, int n) {
  constexpr int PACK = LaneLayout<DIM>::PACK;
  return (n / PACK * 32 + int(lane)) * PACK + n % PACK;
}

// This lane's numbers of the head at `from`, as floats.
template <int DIM, typename T>
inline void load_head(const device T* from, uint lane, thread float* numbers) {
  constexpr int PACK = LaneLayout<DIM>::PACK;
  UNROLL
  for (int step = 0; step < LaneLayout<DIM>::STEPS; step++) {
    const int pack = step * 32 + int(lane);
    if (pack < DIM / PACK) {
      const vec<T, PACK> loaded = ((const device vec<T, PACK>*)from)[pack];  // one vector load
      UNROLL
      for (int i = 0; i < PACK; i++) {
        numbers[step * PACK + i] = float(loaded[i]);
      }
    } else {
      UNROLL
      for (int i = 0; i < PACK; i++) {
        numbers[step * PACK + i] = 0.0f;
      }
    }
  }
}

// Where token `token` of a row lies: its slot of the arena, or ~column of the tail for the row's newest tokens.
template <int BLOCK_SIZE>
inline int place_of(int token, int arena_tokens, const device int* block_table) {
  if (token < arena_tokens) {
    return block_table[token / BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE;
  }
  return ~(token - arena_tokens);
}
