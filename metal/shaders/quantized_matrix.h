// Quantized keys and values as matrices: the products are of the codes, as halves from 2^BITS to 2^(BITS + 1), which are
// exact. The scale and bias of a group come behind the sum for keys, and before it, into the weights, for values:
//
//   sum over d of (scale * code_d + bias) * q_d  =  scale * (sum of code_d * q_d) + bias * (sum of q_d)
//   sum over t of weight_t * (scale_t * code_t + bias_t)  =  sum of (weight_t * scale_t) * code_t  +  sum of weight_t * bias_t

#include "words.h"
// Slots are counted from the first.
template <typename KV, int DIM, int BITS, int GROUP>
inline QuantizedSource<KV, DIM, BITS, GROUP> from_slot(
    const thread QuantizedSource<KV, DIM, BITS, GROUP>& source, int) {
  return source;
}

// What belongs to a token in one of the arrays.
template <typename Number, int COUNT, typename Source>
inline Head<Number> head_of(const thread HeadSource<Number, COUNT>& array, const thread Source& source, Neighbour token) {
  const bool in_arena = token.column < 0;
  return Head<Number>{in_arena ? array.arena : array.tail, token_of(source, in_arena, token.slot, token.column) * COUNT};
}

// The sums of the queries over each group of a key, [groups, 8 queries], for this simdgroup.
template <typename T, typename KV, int DIM, int BITS, int GROUP>
inline void sum_queries(
    const thread QuantizedSource<KV, DIM, BITS, GROUP>&,
    const threadgroup T* queries,  // as in add_scores
    MatrixPlace lane,
    threadgroup float* sums) {
  ROLLED
  for (int g = 0; g < DIM / GROUP; g++) {
    float sum[2] = {0.0f, 0.0f};
    UNROLL
    for (int n = 0; n < GROUP / 4; n++) {
      sum[n % 2] += float(queries[g * (GROUP / 32 * 256) + n / 8 * 256 + n % 8]);
    }
    UNROLL
    for (int e = 0; e < 2; e++) {
      sum[e] = sum_over_rows(sum[e]);
      if (lane.row == 0) {
        sums[g * 8 + lane.column + e] = sum[e];
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// The scores of a slice: its keys by the queries of the tile.
template <typename T, typename KV, int DIM, int BITS, int GROUP>
inline void add_scores(
    thread simdgroup_matrix<float, 8, 8>* score,  // [4], of 8 tokens each
    const thread QuantizedSource<KV, DIM, BITS, GROUP>& keys,
    const thread Neighbours& tokens,  // those of the lane's row
    MatrixPlace lane,
    const threadgroup T* queries,           // the lane's numbers of a chunk, 256 numbers behind them those of the next
    const threadgroup float* query_sums) {  // [groups, 8 queries]
  constexpr int WORDS = BITS / 4;  // of a lane's 8 numbers of a chunk
  UNROLL
  for (int u = 0; u < 4; u += 2) {  // two at a time, for fewer registers
    UNROLL
    for (int g = 0; g < DIM / GROUP; g++) {
      simdgroup_matrix<float, 8, 8> sum[2];
      UNROLL
      for (int i = 0; i < 2; i++) {
        sum[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
      UNROLL
      for (int c = 0; c < GROUP / 32; c++) {
        const int chunk = g * (GROUP / 32) + c;
        T query_numbers[8];
        load_chunk_of_queries(queries + chunk * 256, query_numbers);
        UNROLL
        for (int i = 0; i < 2; i++) {
          uint words[WORDS];
          const Head<uint> codes = head_of(keys.codes, keys, neighbour(tokens, u + i));
          load_words<WORDS>(codes.base, codes.first + uint(chunk * 4 + (lane.column >> 1)) * WORDS, words);
          UNROLL
          for (int n = 0; n < 4; n++) {
            simdgroup_matrix<typename Factor<T, half>::type, 8, 8> query;
            query.thread_elements()[0] = query_numbers[n * 2];
            query.thread_elements()[1] = query_numbers[n * 2 + 1];
            const half2 numbers = as_type<half2>(two_codes<BITS>(words[n / (16 / BITS)], n % (16 / BITS)));
            simdgroup_matrix<half, 8, 8> token;
            token.thread_elements()[0] = numbers[0];
            token.thread_elements()[1] = numbers[1];
            simdgroup_multiply_accumulate(sum[i], token, query, sum[i]);
          }
        }
      }
      UNROLL
      for (int i = 0; i < 2; i++) {
        const Head<KV> scales = head_of(keys.scales, keys, neighbour(tokens, u + i));
        const Head<KV> biases = head_of(keys.biases, keys, neighbour(tokens, u + i));
        const Group group = group_of<BITS>(scales.base[scales.first + uint(g)], biases.base[biases.first + uint(g)]);
        UNROLL
        for (int e = 0; e < 2; e++) {
          const float bias = group.bias * query_sums[g * 8 + lane.column + e];
          score[u + i].thread_elements()[e] += fma(group.scale, sum[i].thread_elements()[e], bias);
        }
      }
    }
  }
}

// The weighed biases of the tokens that the lane has rows of, for its two queries.
template <typename KV, int DIM, int BITS, int GROUP, int PART_DIM>
struct Biases<QuantizedSource<KV, DIM, BITS, GROUP>, PART_DIM> {
  float sums[PART_DIM / GROUP][2];
};

template <typename KV, int DIM, int BITS, int GROUP, int PART_DIM>
inline void clear(thread Biases<QuantizedSource<KV, DIM, BITS, GROUP>, PART_DIM>& biases) {
  UNROLL
  for (int g = 0; g < PART_DIM / GROUP; g++) {
    biases.sums[g][0] = 0.0f;
    biases.sums[g][1] = 0.0f;
  }
}

template <typename KV, int DIM, int BITS, int GROUP, int PART_DIM>
inline void rescale(thread Biases<QuantizedSource<KV, DIM, BITS, GROUP>, PART_DIM>& biases, int e, float factor) {
  UNROLL
  for (int g = 0; g < PART_DIM / GROUP; g++) {
    biases.sums[g][e] *= factor;
  }
}

template <typename KV, int DIM, int BITS, int GROUP, int PART_DIM>
inline void add_biases(
    thread simdgroup_matrix<float, 8, 8>* out,
    thread Biases<QuantizedSource<KV, DIM, BITS, GROUP>, PART_DIM>& biases) {
  UNROLL
  for (int g = 0; g < PART_DIM / GROUP; g++) {
    UNROLL
    for (int e = 0; e < 2; e++) {
      const float sum = sum_over_rows(biases.sums[g][e]);
      UNROLL
      for (int n = 0; n < GROUP / 8; n++) {
        out[g * (GROUP / 8) + n].thread_elements()[e] += sum;
      }
    }
  }
}

// Eight tokens' values, weighed and added to the output.
template <int PART_DIM, typename KV, int DIM, int BITS, int GROUP>
inline void add_values(
    thread simdgroup_matrix<float, 8, 8>* out,  // [PART_DIM / 8]
    thread Biases<QuantizedSource<KV, DIM, BITS, GROUP>, PART_DIM>& weighed,
    const thread QuantizedSource<KV, DIM, BITS, GROUP>& values,
    Neighbour left,  // the tokens that are the lane's columns of the values
    Neighbour right,
    Neighbour of_row,  // the token that is the lane's row of the weights
    int part,
    MatrixPlace lane,
    const thread simdgroup_matrix<float, 8, 8>& weight) {
  constexpr int SHORTS = GROUP * BITS / 128;  // of a lane's numbers of a group
  constexpr int PER_SHORT = 16 / BITS;
  const uint first = uint(part * (PART_DIM / GROUP));
  const Head<uint> from_left = head_of(values.codes, values, left), from_right = head_of(values.codes, values, right);
  const Head<KV> scales = head_of(values.scales, values, of_row), biases = head_of(values.biases, values, of_row);
  const uint left_first = from_left.first * 2 + (first * 8 + uint(lane.row)) * SHORTS;
  const uint right_first = from_right.first * 2 + (first * 8 + uint(lane.row)) * SHORTS;
  simdgroup_matrix<float, 8, 8> plain = weight;
  UNROLL
  for (int g = 0; g < PART_DIM / GROUP; g++) {
    const Group group = group_of<BITS>(scales.base[scales.first + first + uint(g)], biases.base[biases.first + first + uint(g)]);
    simdgroup_matrix<float, 8, 8> scaled;
    UNROLL
    for (int e = 0; e < 2; e++) {
      scaled.thread_elements()[e] = plain.thread_elements()[e] * group.scale;
      weighed.sums[g][e] = fma(plain.thread_elements()[e], group.bias, weighed.sums[g][e]);
    }
    ushort codes[2][SHORTS];
    load_words<SHORTS>((const device ushort*)from_left.base, left_first + uint(g * 8 * SHORTS), codes[0]);
    load_words<SHORTS>((const device ushort*)from_right.base, right_first + uint(g * 8 * SHORTS), codes[1]);
    UNROLL
    for (int n = 0; n < GROUP / 8; n++) {
      const uint both = uint(codes[0][n / PER_SHORT]) | uint(codes[1][n / PER_SHORT]) << 16;
      const half2 numbers = as_type<half2>(two_codes<BITS>(both, n % PER_SHORT));
      simdgroup_matrix<half, 8, 8> tokens;
      tokens.thread_elements()[0] = numbers[0];
      tokens.thread_elements()[1] = numbers[1];
      simdgroup_multiply_accumulate(out[g * (GROUP / 8) + n], tokens, scaled, out[g * (GROUP / 8) + n]);
    }
  }
}
