// The matmul of a few rows x with weights that MLX has quantized:  y[row][output] = sum over i of w[output][i] * x[row][i].
//
// Weights are the rows of the left matrix, and rows of x the columns of the right one: Y = W X, 8 outputs by 8 rows. A
// simdgroup takes 8 OCTETS outputs and every SLICES-th group of inputs, so that each weight is loaded once, whatever the
// number of rows. The matmuls are of codes, which are exact in halves. Of every group
//
//   sum over i of (scale * code_i + bias) * x_i  =  scale * (sum of code_i * x_i) + bias * (sum of x_i)
//
// goes to float sums. These are always added in the same order: a row's result does not depend on how many rows there are.

#include <metal_simdgroup_matrix>

#include "unroll.h"
#include "matrix_place.h"
#include "codes.h"
#include "words.h"

// MLX's affine format, number = scale * code + bias, in 32-bit words with the first code in the lowest bits.
template <typename T, int BITS>
struct AffineWeights {
  static constexpr constant bool BIASED = true;
  const device uint* codes;  // [outputs, inputs * BITS / 32]
  const device T* scales;    // [outputs, inputs / GROUP]
  const device T* biases;    // the same
};

template <typename T, int BITS>
inline Group group_at(const thread AffineWeights<T, BITS>& weights, uint at) {
  return group_of<BITS>(weights.scales[at], weights.biases[at]);
}

template <typename T, int BITS>
inline half2 two_numbers(const thread AffineWeights<T, BITS>&, uint bits, int k) {
  return as_type<half2>(two_codes<BITS>(bits, k));
}

// MXFP4: a code is a sign, two bits of exponent and one of fraction; a scale is a power of two, of which a byte is the
// exponent.
struct Mxfp4Weights {
  static constexpr constant bool BIASED = false;
  const device uint* codes;
  const device uchar* scales;
};

inline Group group_at(const thread Mxfp4Weights& weights, uint at) {
  const uint exponent = weights.scales[at];
  return Group{as_type<float>(exponent == 0 ? 0x400000u : exponent << 23), 0.0f};
}

// In a half a code's exponent and fraction stand for 2^14 times less. The smallest is subnormal there, which the
// arithmetic knows; of matrices no one says so, so a multiplication comes first.
inline half2 two_numbers(const thread Mxfp4Weights&, uint bits, int k) {
  const int shift = 4 * k - 9;
  const uint magnitudes = (shift < 0 ? bits << -shift : bits >> shift) & 0x0e000e00u;
  const uint signs = (bits << (12 - 4 * k)) & 0x80008000u;
  half2 numbers = as_type<half2>(magnitudes | signs);
  numbers[0] = numbers[0] * half(16384.0f);
  numbers[1] = numbers[1] * half(16384.0f);
  return numbers;
}

// Rows that lie one after the other, in x and in y.
struct NextRows {
  int count;
  int first;
};

inline int row_of_x(const thread NextRows& rows, int row) {
  return rows.first + row;
}

inline int row_of_y(const thread NextRows& rows, int row) {
  return rows.first + row;
}

// The rows of an expert: some of the pairs (token, expert). A token has `repeat` pairs.
struct RowsOfExpert {
  int count;
  int repeat;
  const threadgroup int* pairs;  // [count]
};

inline int row_of_x(const thread RowsOfExpert& rows, int row) {
  return rows.pairs[row] / rows.repeat;
}

inline int row_of_y(const thread RowsOfExpert& rows, int row) {
  return rows.pairs[row];
}

// Find the pairs of an expert in ascending order: write the `skip`-th and MOST - 1 more to `found`, return how many there
// are in all.
template <int MOST>
inline int find_pairs(
    const device uint* expert_of_pair, int pairs, uint expert, int skip, bool writes, threadgroup int* found, uint lane) {
  int count = 0;
  for (int begin = 0; begin < pairs; begin += 32) {
    const int pair = begin + int(lane);
    const int is_one = int(pair < pairs && expert_of_pair[min(pair, pairs - 1)] == expert);
    const int rank = count + simd_prefix_exclusive_sum(is_one) - skip;
    if (writes && is_one != 0 && rank >= 0 && rank < MOST) {
      found[rank] = pair;
    }
    count += simd_sum(is_one);
  }
  return count;
}

// Compute 8 OCTETS outputs, from `first` on, of up to 8 TILES rows. All threads of the threadgroup come here together.
template <typename T, int BITS, int GROUP, int SLICES, int OCTETS, int TILES, typename Weights, typename Rows>
inline void quantized_matmul(
    const device T* x,  // [rows, inputs]
    const thread Weights& weights,
    const thread Rows& rows,
    uint groups,  // inputs / GROUP
    int matrix,   // the expert, or 0
    int first,
    int outputs,
    device T* y,             // [rows, outputs]
    threadgroup float* sums,  // [SLICES, 8 rows, 8 OCTETS + 4]: gaps, for stores to different banks
    uint slice,
    uint lane) {
  constexpr int WORDS = GROUP * BITS / 128;  // of a lane's codes of a group: a quarter of those of an output
  constexpr int RUN = 16 / BITS;             // neighbouring inputs that half a word has the codes of
  constexpr int ROW = 8 * OCTETS + 4;
  const MatrixPlace place = matrix_place(lane);

  // Codes come in twos that lie 16 bits apart, for the lane's two columns of the weights. So its row of x stands for every
  // run of inputs that such a half of a word has. Beyond the last row, and the last output, the last takes their place.
  // Words are counted by 32 bits, which memory adds to the array's address at no cost.
  uint x_at[TILES][2];
  UNROLL
  for (int t = 0; t < TILES; t++) {
    UNROLL
    for (int e = 0; e < 2; e++) {
      const int row = row_of_x(rows, min(t * 8 + place.column + e, rows.count - 1));
      x_at[t][e] = uint(row) * groups * GROUP + uint(place.row / 2 * (GROUP / 4) + place.row % 2 * RUN);
    }
  }
  uint output[OCTETS];
  float out[OCTETS][TILES][2];
  UNROLL
  for (int o = 0; o < OCTETS; o++) {
    output[o] = uint(matrix * outputs + min(first + o * 8 + place.row, outputs - 1)) * groups;
    UNROLL
    for (int t = 0; t < TILES; t++) {
      out[o][t][0] = 0.0f;
      out[o][t][1] = 0.0f;
    }
  }

  // For each group of inputs that is this simdgroup's turn
  for (uint g = slice; g < groups; g += SLICES) {
    // The rows of x, as matrices, and the sum of each over the group
    simdgroup_matrix<typename Factor<T, half>::type, 8, 8> numbers[TILES][GROUP / 8];
    float x_sum[TILES][2];
    UNROLL
    for (int t = 0; t < TILES; t++) {
      UNROLL
      for (int e = 0; e < 2; e++) {
        float sum = 0.0f;
        UNROLL
        for (int w = 0; w < WORDS; w++) {
          const vec<T, RUN> loaded = *(const device vec<T, RUN>*)(x + (x_at[t][e] + g * GROUP + uint(w * 2 * RUN)));
          UNROLL
          for (int k = 0; k < RUN; k++) {
            numbers[t][w * RUN + k].thread_elements()[e] = loaded[k];
            sum += float(loaded[k]);
          }
        }
        x_sum[t][e] = Weights::BIASED ? sum_over_rows(sum) : 0.0f;
      }
    }

    // Eight outputs at a time: a load of codes, GROUP / 8 matmuls for each tile of rows, and the scale and bias
    UNROLL
    for (int o = 0; o < OCTETS; o++) {
      const uint at = output[o] + g;
      uint words[WORDS];
      load_words<WORDS>(weights.codes, (at * 4 + uint(place.column / 2)) * WORDS, words);
      const Group group = group_at(weights, at);
      simdgroup_matrix<float, 8, 8> sum[TILES];
      UNROLL
      for (int t = 0; t < TILES; t++) {
        sum[t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
      UNROLL
      for (int n = 0; n < GROUP / 8; n++) {
        const half2 two = two_numbers(weights, words[n / RUN], n % RUN);
        simdgroup_matrix<half, 8, 8> codes;
        codes.thread_elements()[0] = two[0];
        codes.thread_elements()[1] = two[1];
        UNROLL
        for (int t = 0; t < TILES; t++) {
          simdgroup_multiply_accumulate(sum[t], codes, numbers[t][n], sum[t]);
        }
      }
      UNROLL
      for (int t = 0; t < TILES; t++) {
        UNROLL
        for (int e = 0; e < 2; e++) {
          const float before = Weights::BIASED ? fma(group.bias, x_sum[t][e], out[o][t][e]) : out[o][t][e];
          out[o][t][e] = fma(group.scale, sum[t].thread_elements()[e], before);
        }
      }
    }
  }

  // Add up the slices in their order, a tile of rows at a time.
  UNROLL
  for (int t = 0; t < TILES; t++) {
    UNROLL
    for (int o = 0; o < OCTETS; o++) {
      UNROLL
      for (int e = 0; e < 2; e++) {
        sums[(int(slice) * 8 + place.column + e) * ROW + o * 8 + place.row] = out[o][t][e];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int n = int(slice * 32 + lane); n < 64 * OCTETS; n += SLICES * 32) {
      const int row = n / (8 * OCTETS), o = n % (8 * OCTETS);
      float sum = 0.0f;
      for (int s = 0; s < SLICES; s++) {
        sum += sums[(s * 8 + row) * ROW + o];
      }
      if (t * 8 + row < rows.count && first + o < outputs) {
        y[int64_t(row_of_y(rows, t * 8 + row)) * outputs + first + o] = T(sum);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
