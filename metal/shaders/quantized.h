// Quantized keys and values as MLX's `quantize` makes them: of every GROUP neighbouring numbers a scale and a bias in KV,
// and of each number a code of BITS bits:  number = scale * code + bias.  A 32-bit word has its first code in its lowest
// bits. The arena and the tail are the same kind of three arrays, so a token is the same numbers wherever it lies.
//
// A code becomes a float without a conversion, which takes four cycles: written into the upper bits of the fraction of a
// half between 2^BITS and 2^(BITS + 1), it is 2^BITS + code. That much of the scale comes off the bias.

template <typename KV, int DIM, int BITS, int GROUP>
struct QuantizedSource {
  typedef float Number;
  static constexpr constant int VALUE_NEIGHBOURS = GROUP / 8;  // of one group in the eight lanes that share a value
  HeadSource<uint, DIM * BITS / 32> codes;
  HeadSource<KV, DIM / GROUP> scales;
  HeadSource<KV, DIM / GROUP> biases;
  uint first_slot;  // of the KV head, counted through all heads: the arrays are those of all
  uint first_column;

  // A matrix takes two codes that lie 16 bits apart: one instruction makes numbers of both.
  static constexpr int neighbour(int n) {
    return n / 2 / (16 / BITS) * (32 / BITS) + n / 2 % (16 / BITS) + n % 2 * (16 / BITS);
  }
};

// The number of a token that is in the arena, or in the tail.
template <typename KV, int DIM, int BITS, int GROUP>
inline uint token_of(const thread QuantizedSource<KV, DIM, BITS, GROUP>& source, bool in_arena, int slot, int column) {
  return in_arena ? source.first_slot + uint(slot) : source.first_column + uint(column);
}

#include "codes.h"
// The unsigned integer of so many bytes.
template <int BYTES>
struct Bits;
template <>
struct Bits<1> {
  typedef uchar type;
};
template <>
struct Bits<2> {
  typedef ushort type;
};
template <>
struct Bits<4> {
  typedef uint type;
};

// This lane's numbers of the token at `place`: the neighbours of a pack lie in one group.
template <typename KV, int DIM, int BITS, int GROUP>
inline void load_token(
    const thread QuantizedSource<KV, DIM, BITS, GROUP>& source, int place, uint lane, thread float* numbers) {
  constexpr int PACK = LaneLayout<DIM>::PACK;
  typedef typename Bits<PACK * BITS / 8>::type Codes;
  const bool in_arena = place >= 0;
  const uint token = token_of(source, in_arena, place, ~place);
  const device Codes* codes = (const device Codes*)(in_arena ? source.codes.arena : source.codes.tail);
  const device KV* scales = in_arena ? source.scales.arena : source.scales.tail;
  const device KV* biases = in_arena ? source.biases.arena : source.biases.tail;
  UNROLL
  for (int step = 0; step < LaneLayout<DIM>::STEPS; step++) {
    const int pack = min(step * 32 + int(lane), DIM / PACK - 1);
    const uint loaded = codes[token * (DIM / PACK) + uint(pack)];
    const uint number = token * (DIM / GROUP) + uint(pack * PACK / GROUP);
    const Group group = group_of<BITS>(scales[number], biases[number]);
    UNROLL
    for (int i = 0; i < PACK; i++) {
      const half code = as_type<half>(ushort(two_codes<BITS>(loaded, i)));
      numbers[step * PACK + i] = fma(float(code), group.scale, group.bias);
    }
  }
}
